"""Symptoms of metrics made by hand."""

import pytest
from helpers import MINIMAL

from stapo_lite.config import Config, flatten
from stapo_lite.extras.symptoms import RULES, new_symptoms

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


RUNS = {
    "healthy": ({}, {}),
    "entropy to a quarter, as runs do": ({"entropy": lambda step: 0.8 - 0.005 * step}, {}),
    "no values": (dict.fromkeys((*HEALTHY, "reward")), {}),
    "late values": (
        {name: lambda step: None if step < 15 else 0.8 for name in ("entropy", "sampler_gap_mean")},
        {},
    ),
    # The mean over ten steps: 0.8 -> 0.08, and below with the tenth step at 0.07.
    "collapse": ({"entropy": lambda step: 0.8 if step < 30 else 0.07}, {"entropy_collapse": [40]}),
    "collapse, half of the values": (
        {"entropy": lambda step: None if step % 2 else 0.8 if step < 40 else 0.01},
        {"entropy_collapse": [59]},
    ),
    "explosion": ({"entropy": lambda step: 0.8 if step < 30 else 1.7}, {"entropy_explosion": [39]}),
    "no signal": (
        {"zero_variance_groups": lambda step: 0.4 if step < 30 else 1.0},
        {"no_signal": [40]},
    ),
    "no signal in the first steps, which say nothing": (
        {"zero_variance_groups": 1.0},
        {"no_signal": [20]},
    ),
    "reward": ({"reward": lambda step: (step % 3) / 10}, {"reward_stuck": [100]}),
    "silenced": (
        {"silenced_share": lambda step: 1e-4 if step < 30 else 0.02},
        {"silenced_share": [35]},
    ),
    "silenced again": (
        {"silenced_share": lambda step: 0.05 if 30 <= step < 40 or step > 70 else 0.0},
        {"silenced_share": [33, 74]},
    ),
    "gap": ({"sampler_gap_mean": lambda step: 0.015 if step < 30 else 0.04}, {"sampler_gap": [37]}),
    "each at its limit": (
        {
            "entropy": lambda step: 0.8 if step < 30 else 1.6,
            "zero_variance_groups": 0.95,
            "silenced_share": 0.01,
            "sampler_gap_mean": lambda step: 0.015 if step < 30 else 0.03,
            "clip_low_share": 0.1,
            "clip_high_share": 0.1,
        },
        {},
    ),
    "small values at their limit": (
        {
            "entropy": lambda step: 0.125 if step < 30 else 0.625,
            "sampler_gap_mean": lambda step: 0.005 if step < 30 else 0.02,
        },
        {},
    ),
    "each just above": (
        {
            "entropy": lambda step: 0.125 if step < 30 else 0.626,
            "zero_variance_groups": 0.951,
            "silenced_share": 0.0101,
            "sampler_gap_mean": lambda step: 0.005 if step < 30 else 0.0201,
            "clip_low_share": 0.1,
            "clip_high_share": 0.101,
        },
        {
            "entropy_explosion": [40],
            "no_signal": [20],
            "silenced_share": [20],
            "sampler_gap": [40],
            "ratio": [20],
        },
    ),
    "clipped": ({"clip_low_share": lambda step: 0.01 if step < 30 else 0.3}, {"ratio": [37]}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_symptom_is_reported_when_it_begins(name):
    values, symptoms = RUNS[name]
    assert found(history(120, **values)) == symptoms


def test_every_rule_can_stop_a_run_and_names_a_key():
    config = Config(**MINIMAL, stop_on=list(RULES))
    keys = [key for key in flatten(config.model_dump()) if "." in key]
    assert config.stop_on == list(RULES)
    for rule in RULES.values():
        assert any(key in rule.cause for key in keys)
