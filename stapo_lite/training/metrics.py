"""The metrics of a step (docs/metrics.md).

Each is a mean, kept as a sum and a number until the step ends, so that the means of mini-batches
and processes add up. Until then they stay on the device.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from stapo_lite.config import Objective
from stapo_lite.method.loss import k3, masked_sum
from stapo_lite.method.tokens import Tokens
from stapo_lite.types import Completion, LossOutputs, Masks, Rollouts

Means = Mapping[str, tuple[Any, Any]]
"""Metric -> its sum and the number of values: numbers, or [] tensors."""


def has_variance(group: Sequence[Completion]) -> bool:
    """Whether the group's rewards differ, ignoring completions without a reward."""
    return len({c.reward for c in group if c.reward is not None}) > 1


def rollout_means(rollouts: Rollouts, step: int) -> Means:
    """What this process sampled for a step. Until `gather_means`, deviations are squares."""
    groups = rollouts.sampled
    completions, batch = list(chain(*groups)), list(chain(*rollouts.batch))
    rewards = defaultdict[str, list[float]](list, reward=[])  # there, even without a value
    for completion in completions:
        scores = {f"/{name}": score for name, score in completion.scores.items()}
        if completion.reward is not None:
            scores[""] = completion.reward
        for name, score in scores.items():
            rewards[f"reward{name}"].append(score)
            rewards[f"reward_std{name}"].append(score**2)
    rewarded = [group for group in groups if any(c.reward is not None for c in group)]
    number, written = len(completions), sum(c.written for c in completions)
    return {
        **{name: (sum(values), len(values)) for name, values in rewards.items()},
        "zero_variance_groups": (sum(not has_variance(group) for group in rewarded), len(rewarded)),
        "overlong_penalty": (sum(c.overlong_penalty for c in batch), len(batch)),
        "completion_length": (written, number),
        "truncated_share": (sum(c.truncated for c in completions), number),
        "lag_mean": (sum(step - c.adapter_version for c in completions), number),
        "sampled_nll": (-sum(sum(c.rollout_logprobs) for c in completions), written),
    }


def token_means(tokens: Tokens, masks: Masks) -> dict[str, tuple[Any, Any]]:
    """What the masks did with a mini-batch."""
    return {
        "kept_share": sum_and_number(masks.keep, tokens.written),
        "silenced_share": sum_and_number(masks.silenced, tokens.written),
        "amplified_share": sum_and_number(masks.amplification != 1, tokens.written),
    }


def update_means(
    tokens: Tokens, masks: Masks, outputs: LossOutputs, objective: Objective
) -> dict[str, tuple[Any, Any]]:
    """What an update did with the tokens that have an advantage."""
    active = tokens.written & (tokens.advantages != 0)
    trained = active & masks.keep
    logprobs, entropy, _ = outputs.statistics
    means = {
        "entropy": sum_and_number(entropy, active),
        "clip_low_share": sum_and_number(outputs.clipped_low, trained),
        "clip_high_share": sum_and_number(outputs.clipped_high, trained),
        "sampler_capped_share": sum_and_number(outputs.capped, active),
    }
    if objective.beta:
        means["kl"] = sum_and_number(k3(logprobs, outputs.ref_logprobs), masks.keep)
    if tokens.old is None or objective.old_logprobs == "trainer":  # else it was not measured
        old_logprobs = logprobs if tokens.old is None else tokens.old.logprobs
        gap = (old_logprobs - tokens.rollout_logprobs).abs()
        means["sampler_gap_mean"] = sum_and_number(gap, active)
        means["sampler_gap_k3"] = sum_and_number(k3(tokens.rollout_logprobs, old_logprobs), active)
    return means


def sum_and_number(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of the values in a mask."""
    return masked_sum(values, mask), mask.sum()


def gather_means(parts: Iterable[Means]) -> dict[str, float | None]:
    """The metrics of a step, from all its means on all processes; None if one has no value.

    Collective: every rank must call it.
    """
    ours = [
        (name, float(total), float(number))
        for part in parts
        for name, (total, number) in part.items()
    ]
    sums, numbers = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, total, number in gather_object(ours):
        sums[name] += total
        numbers[name] += number
    means = {name: sums[name] / numbers[name] if numbers[name] else None for name in numbers}
    for name, number in numbers.items():
        if name.startswith("reward_std"):
            rewards = name.replace("reward_std", "reward", 1)
            squares = max(0.0, sums[name] - sums[rewards] ** 2 / number)
            means[name] = math.sqrt(squares / (number - 1)) if number > 1 else None
    return means


def gather_values(values: Tensor) -> Tensor:
    """Concatenate 1-D tensors of different lengths over the processes, in host memory.

    Collective: every rank must call it.
    """
    return torch.cat(gather_object([values.cpu()]))
