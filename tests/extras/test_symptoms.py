"""Symptoms of metrics made by hand."""

import pytest
from helpers import MINIMAL

from stapo_lite.config import Config, flatten
from stapo_lite.extras.symptoms import RULES, new_symptoms

HEALTHY = {
    "entropy": 0.8, "zero_variance_groups": 0.4, "silenced_share": 1e-4, "sampler_gap_mean": 0.004,
    "clip_low_share": 0.01, "clip_high_share": 0.01,
}  # fmt: skip


def after(steps, before, value):
    return lambda step: before if step < steps else value


def history(steps, **values):
    """Steps of a run; a value may be a function of the step, from 0."""
    rising = {"reward": lambda step: 0.01 * step + (step % 3) / 10}
    columns = HEALTHY | rising | values
    return [{k: v(step) if callable(v) else v for k, v in columns.items()} for step in range(steps)]


# name: (metrics, symptom -> the steps after which it is new)
RUNS = {
    "healthy": ({}, {}),
    "entropy to a quarter, as runs do": ({"entropy": lambda step: 0.8 - 0.005 * step}, {}),
    "no values": (dict.fromkeys((*HEALTHY, "reward")), {}),
    "late values": (dict.fromkeys(("entropy", "sampler_gap_mean"), after(15, None, 0.8)), {}),
    # The mean over ten steps: 0.8 -> 0.08, and below with the tenth step at 0.07.
    "collapse": ({"entropy": after(30, 0.8, 0.07)}, {"entropy_collapse": [40]}),
    "collapse, half of the values": (
        {"entropy": lambda step: None if step % 2 else 0.8 if step < 40 else 0.01},
        {"entropy_collapse": [59]},
    ),
    "no signal": ({"zero_variance_groups": after(30, 0.4, 1.0)}, {"no_signal": [40]}),
    "no update, such as with rewards that are all None": (
        {"updates": after(30, 2, 0), "zero_variance_groups": None},
        {"no_signal": [40]},
    ),
    "from the start": ({"updates": 0, "zero_variance_groups": None}, {"no_signal": [10]}),
    "one update in ten steps": ({"updates": lambda step: step % 10 == 0}, {}),
    "silenced again": (
        {"silenced_share": lambda step: 0.05 if 30 <= step < 40 or step > 70 else 0.0},
        {"silenced_share": [33, 74]},
    ),
    "tools": ({"tools/failure_frequency": after(7, 0.9, 1.0)}, {"tools_fail": [8]}),
    "each at its limit": (
        {"entropy": after(30, 0.8, 1.6), "sampler_gap_mean": after(30, 0.015, 0.03)}
        | {"zero_variance_groups": 0.95, "silenced_share": 0.01}
        | {"clip_low_share": 0.1, "clip_high_share": 0.1},
        {},
    ),
    "small values at their limit": (
        {"entropy": after(30, 0.125, 0.625), "sampler_gap_mean": after(30, 0.005, 0.02)},
        {},
    ),
    "each just above": (
        {"entropy": after(30, 0.125, 0.626), "sampler_gap_mean": after(30, 0.005, 0.0201)}
        | {"zero_variance_groups": 0.951, "silenced_share": 0.0101}
        | {"clip_low_share": 0.1, "clip_high_share": 0.101},
        {"entropy_explosion": [40], "sampler_gap": [40]}
        | {name: [20] for name in ("no_signal", "silenced_share", "ratio")},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_symptom_is_reported_when_it_begins(name):
    values, symptoms = RUNS[name]
    lines, steps = history(120, **values), {}
    for end in range(1, len(lines) + 1):
        for symptom in new_symptoms(lines[:end]):
            steps.setdefault(symptom, []).append(end)
    assert steps == symptoms


def test_every_rule_names_a_key():
    keys = [key for key in flatten(Config(**MINIMAL).model_dump()) if "." in key]
    for name, rule in RULES.items():
        assert any(key in rule.text for key in keys), name
