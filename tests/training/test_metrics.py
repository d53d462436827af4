"""The metrics of a step, counted by hand."""

import numpy as np
import pytest
import torch
from helpers import in_groups, run

from stapo_lite import Callback, Trainer
from stapo_lite.training.metrics import finish, has_variance
from stapo_lite.types import Completion, Prompt


def test_metrics_of_a_step_are_means_over_its_completions_and_the_tokens_of_its_updates(
    write_config, trained
):
    seen = []

    class Note(Callback):
        def on_update(self, run, batch, update):
            seen.append((batch, update.masks, update.gradient, update.grad_norm))

    changes = {"algorithm": "grpo", "objective": {"s2t": {"enabled": True, "tau_p": 0.01}}}
    config = write_config(train__max_steps=1, **changes)
    (m,) = Trainer(config=config, callbacks=[Note()]).train()
    lengths, surprise = zip(
        *((len(c.token_ids), -sum(c.rollout_logprobs)) for c in trained), strict=True
    )
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
        "sampled_nll": sum(surprise) / sum(lengths),
        "lag_mean": 0,
    }

    rows = []
    for batch, masks, gradient, _ in seen:
        logprobs, entropy, collision = gradient.statistics
        old = logprobs if batch.old is None else batch.old.logprobs
        kl, gap = gradient.ref_logprobs - logprobs, old - batch.rollout_logprobs
        rows.append((batch.advantages, masks.keep, masks.silenced, entropy, collision, kl, gap))
    advantages, keep, silenced, *values = (
        torch.cat(part).double() for part in zip(*rows, strict=True)
    )
    entropy, collision, kl, gap = values
    active = advantages != 0
    means |= {
        "entropy": entropy[active].mean(),
        **{f"entropy_p{p}": np.quantile(entropy[active], p / 100) for p in (10, 50, 90)},
        "collision": collision[active].mean(),
        "kept_share": keep.mean(),
        "silenced_share": silenced.mean(),
        "kl": (kl.exp() - kl - 1)[keep.bool()].mean(),
        "sampler_gap_mean": gap[active].abs().mean(),
        "sampler_gap_k3": (gap.exp() - gap - 1)[active].mean(),
        "loss": np.mean([gradient.loss for _, _, gradient, _ in seen]),
        "grad_norm": np.mean([norm for *_, norm in seen]),
    }
    assert 0 < m["silenced_share"] < m["candidate_share"]
    assert 0 < m["spurious_gradient_share"] < 1
    for name, value in means.items():
        assert m[name] == pytest.approx(float(value), rel=1e-5, abs=1e-7), name


def test_means_add_up_over_mini_batches_by_hand():
    parts = [
        {"a": (3.0, 2), "b": (torch.tensor(1.0), torch.tensor(4)), "c": (0.0, 0)},
        {"a": (1.0, 8), "reward": (6.0, 3), "reward_std": (14.0, 3)},  # of 1, 2 and 3
        {"reward/f": (5.0, 1), "reward_std/f": (25.0, 1)},
    ]
    rewards = {"reward": 2.0, "reward_std": 1.0, "reward/f": 5.0, "reward_std/f": None}
    assert finish(parts) == {"a": 0.4, "b": 0.25, "c": None} | rewards


def test_a_metric_without_a_value_is_missing_until_it_had_one_and_then_null(
    write_config, user_reward
):
    user_reward(
        "def even(prompts, trainer_state, **_): "
        "return [float(i * trainer_state.global_step % 2) for i, _ in enumerate(prompts)]"
    )
    metrics = run(write_config(train__max_steps=3))
    assert [m["updates"] for m in metrics] == [0, 2, 0]
    for name in ("loss", "entropy", "candidate_share", "sampler_gap_mean"):
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
