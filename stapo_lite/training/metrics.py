"""What a step counts, and the metrics computed from it.

Counts are plain dictionaries of sums: `count_*` make them, `add_up` adds those of several
mini-batches, and `reduce_sums` those of all processes. Until then they stay on the device.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.algorithm.objective import k3
from stapo_lite.algorithm.s2t import candidate_mask, linear_quantiles, spurious_mask
from stapo_lite.config import Objective
from stapo_lite.types import Completion, Gradient, Masks, TokenDetails, Update

Sums = Mapping[str, Any]
"""Numbers or [] tensors by name. Names in MAXIMA are combined by maximum instead of sum; ENTROPIES
is a 1-D tensor of all values."""
MAXIMA = ("lag_max", "gap_max")
ENTROPIES = "entropies"
KINDS = ("spurious", "negative_rare", "negative_sure")
"""Kinds of tokens whose share of the gradient is logged."""


def has_variance(group: Sequence[Completion]) -> bool:
    """Whether the group's rewards differ, ignoring completions without a reward."""
    return len({c.reward for c in group if c.reward is not None}) > 1


def count_rollouts(groups: Sequence[Sequence[Completion]], step: int) -> dict[str, Any]:
    """Count what this process sampled for a step."""
    completions = [completion for group in groups for completion in group]
    lags = [step - c.adapter_version for c in completions]
    return {
        **count_rewards(completions),
        "groups": len(groups),
        "zero_variance_groups": sum(not has_variance(group) for group in groups),
        "completions": len(completions),
        "truncated": sum(c.truncated for c in completions),
        "tokens": sum(len(c.token_ids) for c in completions),
        "written": sum(c.written for c in completions),
        "sampled_nll": -sum(sum(c.rollout_logprobs) for c in completions),
        "lag": sum(lags),
        "lag_max": max(lags, default=-math.inf),
    }


def count_rewards(completions: Sequence[Completion]) -> dict[str, float]:
    """Number, sum and sum of squares of the rewards, and of what each function gave."""
    sums: defaultdict[str, float] = defaultdict(float)
    for completion in completions:
        rewards = {f"reward/{name}": score for name, score in completion.scores.items()}
        if completion.reward is not None:
            rewards["reward"] = completion.reward
        for name, reward in rewards.items():
            sums[f"{name} number"] += 1
            sums[f"{name} sum"] += reward
            sums[f"{name} squares"] += reward**2
    return sums


def count_batch(groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Count the completions that are trained on, those of all processes."""
    penalties = [completion.overlong_penalty for group in groups for completion in group]
    return {"batch_completions": len(penalties), "overlong_penalty": sum(penalties)}


def count_tokens(batch: MiniBatch, masks: Masks) -> dict[str, Tensor]:
    """Count the tokens of a mini-batch, whether or not they have a gradient."""
    return {
        "batch_tokens": batch.loss_mask.sum(),
        "kept": masks.keep.sum(),
        "silenced": masks.silenced.sum(),
        "amplified": (masks.amplification != 1).sum(),
    }


def count_gradient(
    batch: MiniBatch,
    gradient: Gradient,
    tokens: TokenDetails,
    tau_h: float | None,
    objective: Objective,
) -> dict[str, Tensor]:
    """Count the kinds of tokens with an advantage and their share of the gradient, silenced tokens
    included (docs/metrics.md)."""
    active = batch.loss_mask & (batch.advantages != 0)
    trained = active & tokens.keep
    logprobs, entropy, collision = gradient.statistics
    sums = {
        "loss": gradient.loss,
        "active_tokens": active.sum(),
        "trained_tokens": trained.sum(),
        "entropy": masked_sum(entropy, active),
        "collision": masked_sum(collision, active),
        "capped": (gradient.capped & active).sum(),
        "clipped_low": (gradient.clipped_low & trained).sum(),
        "clipped_high": (gradient.clipped_high & trained).sum(),
        "logit_grad_norm": masked_sum(tokens.gradient_norm, trained),
        "gradient_mass": masked_sum(tokens.gradient_norm, active),
        "candidate": tokens.candidate.sum(),
        ENTROPIES: entropy[active],
    }
    for kind, mask in token_kinds(batch, tokens, tau_h, objective.s2t.tau_p).items():
        sums[kind] = mask.sum()
        sums[f"{kind}_mass"] = masked_sum(tokens.gradient_norm, mask)
    if objective.beta:
        sums["kl"] = masked_sum(k3(logprobs, gradient.ref_logprobs), tokens.keep)
        sums["kl_tokens"] = tokens.keep.sum()
    if batch.old is None or objective.old_logprobs == "trainer":
        trainer_logprobs = logprobs if batch.old is None else batch.old.logprobs
        gap = (trainer_logprobs - batch.rollout_logprobs).abs()
        sums["gap_tokens"] = active.sum()
        sums["gap"] = masked_sum(gap, active)
        sums["gap_k3"] = masked_sum(k3(batch.rollout_logprobs, trainer_logprobs), active)
        if len(gap):  # -inf without an active token
            sums["gap_max"] = gap.where(active, -torch.inf).max()
    return sums


def token_kinds(
    batch: MiniBatch, tokens: TokenDetails, tau_h: float | None, tau_p: float
) -> dict[str, Tensor]:
    """Masks of KINDS, [N] bool each: spurious tokens; tokens with the same low pi and H in
    incorrect responses (A < 0), which S2T never silences; and the mirror case, almost certain
    tokens of incorrect responses."""
    logprobs, entropy, _ = tokens.statistics
    negative = batch.loss_mask & (batch.advantages < 0)
    rare = negative & candidate_mask(logprobs, -batch.advantages, tau_p)
    sure = negative & (-torch.expm1(logprobs) < tau_p)
    masks = (tokens.spurious, spurious_mask(rare, entropy, tau_h), sure)
    return dict(zip(KINDS, masks, strict=True))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over a mask, [] float64; `values[mask]` would wait for the device."""
    return values.where(mask, 0.0).sum(dtype=torch.float64)


def add_up(parts: Iterable[Sums]) -> dict[str, Any]:
    """Put sums together."""
    result: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in result:
                result[name] = value
            elif name == ENTROPIES:
                result[name] = torch.cat([result[name], value])
            elif name in MAXIMA:
                result[name] = torch.maximum(*map(torch.as_tensor, (result[name], value)))
            else:
                result[name] = result[name] + value
    return result


def reduce_sums(sums: Sums, accelerator: Accelerator) -> dict[str, Any]:
    """Combine the sums of all processes into numbers, and concatenate their entropies, 1-D. A name
    that no process has reads as 0; a maximum over nothing is left out.

    Collective: every rank must call it.
    """
    numbers = {name: float(value) for name, value in sums.items() if name != ENTROPIES}
    numbers = {name: value for name, value in numbers.items() if value != -math.inf}
    result: defaultdict[str, Any] = defaultdict(float)
    for name, value in itertools.chain(*(part.items() for part in gather_object([numbers]))):
        if name in MAXIMA:
            result[name] = max(result.get(name, -math.inf), value)
        else:
            result[name] += value
    nothing = torch.zeros(0, device=accelerator.device)
    result[ENTROPIES] = gather_values(sums.get(ENTROPIES, nothing), accelerator)
    return result


def gather_values(values: Tensor, accelerator: Accelerator) -> Tensor:
    """Concatenate 1-D tensors of different lengths over the processes."""
    if accelerator.num_processes == 1:
        return values
    padded = accelerator.pad_across_processes(values, pad_index=math.nan)
    gathered = accelerator.gather(padded)
    return gathered[~gathered.isnan()]


def step_metrics(
    step: int,
    t: Mapping[str, Any],
    reward_functions: Sequence[str],
    updates: Sequence[Update],
    seconds: dict[str, float],
    **others: float | None,
) -> dict[str, Any]:
    """The step's metrics as docs/metrics.md defines them; None if one has no value.

    Args:
        t: from `reduce_sums`.
        reward_functions: their names, each of which has its own mean and deviation.
        updates: all of the step.
    """
    low, median, high = linear_quantiles(t[ENTROPIES], (0.1, 0.5, 0.9))
    total_seconds = sum(seconds.values())
    return {
        "step": step,
        **others,
        **reward_metrics(t, reward_functions),
        "overlong_penalty": ratio(t["overlong_penalty"], t["batch_completions"]),
        "zero_variance_groups": ratio(
            t["zero_variance_groups"], t["groups"] * bool(reward_functions)
        ),
        "completion_length": ratio(t["tokens"], t["completions"]),
        "truncated_share": ratio(t["truncated"], t["completions"]),
        "lag_mean": ratio(t["lag"], t["completions"]),
        "lag_max": t.get("lag_max"),
        "sampled_nll": ratio(t["sampled_nll"], t["written"]),
        "entropy": ratio(t["entropy"], t["active_tokens"]),
        "entropy_p10": low,
        "entropy_p50": median,
        "entropy_p90": high,
        "collision": ratio(t["collision"], t["active_tokens"]),
        **{
            f"{name}_share": ratio(t[name], t["batch_tokens"])
            for name in ("kept", "silenced", "amplified", "candidate", *KINDS)
        },
        **{
            f"{kind}_gradient_share": ratio(t[f"{kind}_mass"], t["gradient_mass"]) for kind in KINDS
        },
        "logit_grad_norm": ratio(t["logit_grad_norm"], t["trained_tokens"]),
        **update_metrics(t, updates),
        "sampler_gap_mean": ratio(t["gap"], t["gap_tokens"]),
        "sampler_gap_k3": ratio(t["gap_k3"], t["gap_tokens"]),
        "sampler_gap_max": t.get("gap_max"),
        "sampler_capped_share": ratio(t["capped"], t["active_tokens"]),
        "tokens_per_second": t["tokens"] / total_seconds,
        **{f"seconds_{name}": value for name, value in seconds.items()},
        "seconds_step": total_seconds,
    }


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator; None without a denominator."""
    return numerator / denominator if denominator else None


def update_metrics(t: Mapping[str, Any], updates: Sequence[Update]) -> dict[str, float | None]:
    """What the step's updates say of themselves, and their shares of clipped tokens."""
    changes = [update for update in updates if update.changed]
    thresholds = [update.tau_h for update in changes if update.tau_h is not None]
    return {
        "updates": len(changes),
        "skipped_updates": sum(update.skipped for update in updates),
        "loss": ratio(t["loss"], len(changes)),
        "grad_norm": ratio(sum(update.grad_norm or 0.0 for update in changes), len(changes)),
        "tau_h": ratio(sum(thresholds), len(thresholds)),
        "kl": ratio(t["kl"], t["kl_tokens"]),
        "clip_low_share": ratio(t["clipped_low"], t["trained_tokens"]),
        "clip_high_share": ratio(t["clipped_high"], t["trained_tokens"]),
    }


def reward_metrics(
    t: Mapping[str, Any], reward_functions: Sequence[str]
) -> dict[str, float | None]:
    """Mean and standard deviation (n - 1, in float64) of the rewards, and of what each function
    gave."""
    metrics: dict[str, float | None] = {}
    for suffix in ("", *(f"/{name}" for name in reward_functions)):
        number, sum_, squares = (
            t[f"reward{suffix} {part}"] for part in ("number", "sum", "squares")
        )
        mean = deviation = None
        if number:
            mean = sum_ / number
        if number > 1:
            deviation = math.sqrt(max(0.0, squares - sum_**2 / number) / (number - 1))
        metrics[f"reward{suffix}"] = mean
        metrics[f"reward_std{suffix}"] = deviation
    return metrics
