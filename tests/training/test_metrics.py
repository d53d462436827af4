"""The metrics of a step, counted by hand."""

import math

import numpy as np
import pytest
import torch
from helpers import in_groups, run

from stapo_lite.method.advantages import has_variance
from stapo_lite.method.metrics import Deviation, Mean, Ratio
from stapo_lite.training import loop
from stapo_lite.training.metrics import gather_metrics, rollout_metrics
from stapo_lite.types import Completion, Prompt, Rollouts


def test_metrics_of_a_step_are_means_over_completions_or_tokens(write_config, trained, watch):
    seen = []
    watch(loop, "update", lambda update, learner, batch: seen.append((batch, update)))
    changes = {"algorithm": "grpo", "objective": {"s2t": {"enabled": True, "tau_p": 0.01}}}
    (m,) = run(write_config(train__max_steps=1, **changes))
    lengths = [len(c.token_ids) for c in trained]
    rewards = [sum(i % 2 == 0 for i in c.token_ids) for c in trained]
    cut = [len(c.token_ids) == 8 and c.token_ids[-1] not in (1, 2) for c in trained]
    flat = [len({c.reward for c in group}) == 1 for group in in_groups(trained)]
    means = {
        "completion_length": np.mean(lengths),
        "reward": np.mean(rewards),
        "reward_std": np.std(rewards, ddof=1),
        "reward/parity:even": np.mean(rewards),
        "reward_std/parity:even": np.std(rewards, ddof=1),
        "truncated_share": np.mean(cut),
        "zero_variance_groups": np.mean(flat),
        "sampled_nll": -sum(sum(c.rollout_logprobs) for c in trained) / sum(lengths),
        "lag_mean": 0,
    }
    # The oracle has all of an update; here its tokens count the same in both mini-batches.
    active = torch.cat([batch.advantages for batch, _ in seen]) != 0
    entropy = torch.cat([update.outputs.statistics.entropy for _, update in seen])[active].double()
    means |= {
        "entropy": entropy.mean(),
        **{f"entropy_p{p}": np.quantile(entropy, p / 100) for p in (10, 50, 90)},
        "kept_share": torch.cat([update.masks.keep for _, update in seen]).double().mean(),
        "silenced_share": torch.cat([update.masks.silenced for _, update in seen]).double().mean(),
        "loss": np.mean([update.outputs.loss for _, update in seen]),
        "grad_norm": np.mean([update.grad_norm for _, update in seen]),
    }
    assert 0 < m["silenced_share"] < m["candidate_share"]
    for name, value in means.items():
        assert m[name] == pytest.approx(float(value), rel=1e-5, abs=1e-7), name


def test_means_add_up_over_mini_batches_by_hand():
    parts = [
        {"mean": Mean(3.0, 2), "tensor": Mean(torch.tensor(1.0), torch.tensor(4))},
        {"mean": Mean(1.0, 8), "nothing": Mean.of([]), "ratio": Ratio(2.0, 10.0)},
        {"deviation": Deviation.of([1.0, 3.0]), "one": Deviation.of([5.0])},
        {"deviation": Deviation.of([2.0]), "ratio": Ratio(1.0, 20.0)},
    ]
    expected = {"mean": 0.4, "tensor": 0.25, "nothing": None, "ratio": 0.1}
    assert gather_metrics(parts) == expected | {"deviation": 1.0, "one": None}


def test_a_mean_over_a_mask_by_hand():
    mean = Mean.over(torch.tensor([True, True, False]), torch.tensor([1.0, 2.0, math.nan]))
    assert mean.value == 1.5


def test_a_metric_is_missing_until_it_has_a_value_and_then_null(write_config, user_reward):
    user_reward(
        "def even(prompts, trainer_state, **_): "
        "return [float(i * trainer_state.global_step % 2) for i, _ in enumerate(prompts)]"
    )
    metrics = run(write_config(train__max_steps=3))
    assert [m["updates"] for m in metrics] == [0, 2, 0]
    assert metrics[0]["spurious_share"] == metrics[0]["silenced_share"] == 0.0
    for name in ("loss", "entropy", "candidate_gradient_share", "sampler_gap_mean"):
        assert name not in metrics[0]
        assert metrics[1][name] is not None
        assert metrics[2][name] is None


def test_a_kl_term_alone_updates_tokens_that_have_no_gap(write_config, user_reward):
    user_reward("def even(completions, **columns): return [1.0 for c in completions]")
    (metrics,) = run(write_config(algorithm="grpo", train__max_steps=1))
    assert metrics["updates"] == 2
    assert metrics["sampler_gap_mean"] is metrics["entropy"] is None


def test_completions_without_a_reward_make_no_variance():
    prompt, rewards = Prompt("", [1], None), (None, 1.0, 1.0)
    group = [Completion(prompt, [1], [0.0], False, 0, reward=reward) for reward in rewards]
    assert not has_variance(group)


def test_groups_without_any_reward_do_not_count_as_groups_without_variance():
    prompt, rewards = Prompt("", [1], None), ((1.0, 1.0), (0.0, 1.0), (None, None))
    groups = [
        [Completion(prompt, [1], [0.0], False, 0, reward=r) for r in pair] for pair in rewards
    ]
    metrics = rollout_metrics(Rollouts(sampled=groups), step=1, seconds=1.0)
    assert metrics["zero_variance_groups"].value == 0.5
