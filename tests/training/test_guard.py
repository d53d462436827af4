"""Each symptom on metrics made by hand, and none on a healthy run."""

import pytest

from stapo_lite.config import Config, flatten
from stapo_lite.training.guard import RULES, new_symptoms

HEALTHY = {
    "entropy": 0.8, "zero_variance_groups": 0.4, "silenced_share": 1e-4, "sampler_gap_mean": 0.004,
    "clip_low_share": 0.01, "clip_high_share": 0.01,
}  # fmt: skip


def history(steps, **values):
    """Steps of a run; a value may be a function of the step, from 0."""
    rising = {"reward": lambda step: 0.01 * step + (step % 3) / 10}
    columns = HEALTHY | rising | values
    return [{k: v(step) if callable(v) else v for k, v in columns.items()} for step in range(steps)]


def found(lines):
    """{symptom: the steps after which it is new}"""
    steps = {}
    for end in range(1, len(lines) + 1):
        for name in new_symptoms(lines[:end]):
            steps.setdefault(name, []).append(end)
    return steps


def test_a_healthy_run_has_none():
    assert found(history(200)) == {}
    assert found(history(200, entropy=lambda step: 0.8 - 0.003 * step)) == {}  # to a quarter, as runs do


SICK = {
    # The mean over ten steps: 0.8 -> 0.08, and below with the tenth step at 0.07.
    "entropy_collapse": ({"entropy": lambda step: 0.8 if step < 30 else 0.07}, [40]),
    "entropy_explosion": ({"entropy": lambda step: 0.8 if step < 30 else 1.7}, [39]),
    "no_signal": ({"zero_variance_groups": lambda step: 0.4 if step < 30 else 1.0}, [40]),
    "reward_stuck": ({"reward": lambda step: (step % 3) / 10}, [100]),
    "silenced_share": ({"silenced_share": lambda step: 1e-4 if step < 30 else 0.02}, [35]),
    "sampler_gap": ({"sampler_gap_mean": lambda step: 0.015 if step < 30 else 0.04}, [37]),
    "ratio": ({"clip_low_share": lambda step: 0.01 if step < 30 else 0.3}, [37]),
}


@pytest.mark.parametrize("symptom", SICK)
def test_a_symptom_is_told_when_it_begins(symptom):
    values, steps = SICK[symptom]
    assert found(history(120, **values)) == {symptom: steps}


def test_one_that_comes_again_is_told_again_and_the_first_steps_say_nothing():
    shares = history(100, silenced_share=lambda step: 0.05 if 30 <= step < 40 or step > 70 else 0.0)
    assert found(shares) == {"silenced_share": [33, 74]}
    assert found(history(20, zero_variance_groups=1.0)) == {"no_signal": [20]}


def test_steps_without_a_value_are_passed_over():
    assert found(history(60, **dict.fromkeys((*HEALTHY, "reward")))) == {}
    late = {name: lambda step: None if step < 15 else 0.8 for name in ("entropy", "sampler_gap_mean")}
    assert found(history(60, **late)) == {}
    gaps = {"entropy": lambda step: None if step % 2 else 0.8 if step < 40 else 0.01}
    assert list(found(history(60, **gaps))) == ["entropy_collapse"]


def test_every_rule_can_stop_a_run_and_names_a_key():
    config = Config(model="m", output_dir="o", stop_on=list(RULES))
    keys = [key for key in flatten(config.model_dump()) if "." in key]
    assert config.stop_on == list(RULES)
    for rule in RULES.values():
        assert any(key in rule.cause for key in keys)
