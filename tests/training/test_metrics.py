"""The metrics of a step, counted by hand."""

import math

import numpy as np
import pytest
from accelerate import Accelerator
from helpers import in_groups, run

from stapo_lite.files import read_lines
from stapo_lite.training.metrics import has_variance, reduce_sums, step_metrics
from stapo_lite.types import Completion, Prompt, Update


def test_metrics_and_token_log_of_a_step_by_hand(write_config, trained, monkeypatch, tmp_path):
    """Counted from the completions; shares and means of docs/metrics.md from sums that the oracle
    checks."""
    totals = []

    def note(*arguments):
        totals.append(reduce_sums(*arguments))
        return totals[-1]

    monkeypatch.setattr("stapo_lite.training.run.reduce_sums", note)
    changes = {"algorithm": "grpo", "objective": {"s2t": {"enabled": True, "tau_p": 0.01}}}
    m = run(write_config(train__max_steps=1, log__audit_tokens=3, **changes))[0]
    t, completions = totals[0], trained
    lengths = [len(c.token_ids) for c in completions]
    tokens = sum(lengths)
    right = sum(i % 2 == 0 for c in completions for i in c.token_ids)
    cut = sum(
        n == 8 and c.token_ids[-1] not in (1, 2) for n, c in zip(lengths, completions, strict=True)
    )
    flat = sum(len({c.reward for c in group}) == 1 for group in in_groups(trained))
    assert m["completion_length"] == pytest.approx(tokens / 16)
    rewards = [sum(i % 2 == 0 for i in c.token_ids) for c in completions]
    assert m["reward"] == m["reward/parity:even"] == pytest.approx(right / 16)
    assert m["reward_std"] == m["reward_std/parity:even"] == pytest.approx(np.std(rewards, ddof=1))
    assert m["truncated_share"] == pytest.approx(cut / 16)
    assert m["zero_variance_groups"] == flat / 4
    assert m["sampled_nll"] == pytest.approx(
        -sum(sum(c.rollout_logprobs) for c in completions) / tokens, rel=1e-5
    )
    assert m["sampler_gap_max"] < 1e-4
    active = sum(len(c.token_ids) for c in completions if c.advantage)
    trains = active - t["silenced"]
    assert active > trains > 0
    assert t["candidate"] > t["spurious"] > 0
    assert len(t["entropies"]) == active
    assert m["entropy"] == pytest.approx(t["entropies"].double().mean().item())
    for p in (10, 50, 90):
        assert m[f"entropy_p{p}"] == pytest.approx(np.quantile(t["entropies"].double(), p / 100))
    for count in ("kept", "silenced", "candidate", "spurious", "negative_rare", "negative_sure"):
        assert m[f"{count}_share"] == pytest.approx(t[count] / tokens), count
    for kind in ("spurious", "negative_rare", "negative_sure"):
        assert m[f"{kind}_gradient_share"] == pytest.approx(
            t[f"{kind}_mass"] / t["gradient_mass"]
        ), kind
    for metric, total, count in (
        ("entropy", "entropy", active),
        ("collision", "collision", active),
        ("logit_grad_norm", "logit_grad_norm", trains),
        ("clip_low_share", "clipped_low", trains),
        ("clip_high_share", "clipped_high", trains),
        ("kl", "kl", tokens - t["silenced"]),
        ("sampler_gap_mean", "gap", active),
        ("sampler_gap_k3", "gap_k3", active),
        ("sampler_capped_share", "capped", active),
    ):
        assert m[metric] == pytest.approx(t[total] / count), metric
    (step,) = read_lines(tmp_path / "run" / "quadrants.jsonl")
    assert (sum(step["tokens"][:2]), step["tokens"][0]) == (t["candidate"], t["spurious"])
    assert step["tau_h"] == pytest.approx(m["tau_h"])
    assert len(read_lines(tmp_path / "run" / "tokens.jsonl")) == 3 < t["candidate"]


def test_a_step_whose_updates_have_no_active_token_has_no_largest_gap(write_config, user_reward):
    """A KL term updates the policy without any advantage."""
    user_reward("def even(completions, **columns): return [1.0 for c in completions]")
    (metrics,) = run(write_config(algorithm="grpo", train__max_steps=1))
    assert metrics["updates"] == 2
    assert (metrics["sampler_gap_max"], metrics["sampler_gap_mean"]) == (None, None)


def test_means_over_the_updates_of_a_step_by_hand():
    sums = reduce_sums({"loss": 3.0, "tokens": 50}, Accelerator(cpu=True))
    updates = [Update(2.0, 0.5, {}), Update(4.0, None, {}), Update(9.0, 1.5, {})]
    updates += [Update(None, None, {}), Update(math.nan, None, {}, skipped=True)]
    seconds = {"rollout": 3.0, "reward": 1.0, "update": 6.0}
    m = step_metrics(7, sums, ["math"], updates, seconds)
    assert (m["step"], m["updates"], m["loss"], m["grad_norm"]) == (7, 3, 1.0, 5.0)
    assert m["skipped_updates"] == 1
    assert (m["reward"], m["reward/math"], m["reward_std/math"]) == (None, None, None)
    assert m["tau_h"] == 1.0  # of the updates that have one
    assert (m["seconds_step"], m["seconds_update"], m["tokens_per_second"]) == (10.0, 6.0, 5.0)
    none = step_metrics(7, sums, ["math"], [], seconds)
    assert (none["loss"], none["grad_norm"], none["tau_h"]) == (None, None, None)


def test_unjudged_completions_make_no_variance():
    group = [
        Completion(Prompt("", [1], None), [1], [0.0], False, 0, reward=reward)
        for reward in (None, 1.0, 1.0)
    ]
    assert not has_variance(group)
