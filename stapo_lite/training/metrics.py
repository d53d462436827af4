"""Counts of a step, and the metrics that are computed from them."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from stapo_lite.algorithm.s2t import linear_quantiles
from stapo_lite.types import Completion

SUMS = (
    "groups", "zero_variance_groups", "completions", "truncated", "tokens", "written", "sampled_nll",
    "batch_completions", "overlong_penalty", "lag",
    "batch_tokens", "kept", "active_tokens", "trained_tokens", "loss", "kl", "kl_tokens", "entropy", "collision",
    "logit_grad_norm", "clipped_low", "clipped_high", "silenced", "candidate", "gradient_mass",
    "spurious", "spurious_mass", "negative_rare", "negative_rare_mass", "negative_sure", "negative_sure_mass",
    "gap_tokens", "gap", "gap_k3", "capped",
)  # fmt: skip
MAXIMA = ("lag_max", "gap_max")


class Update(NamedTuple):
    """The outcome of an update; the same on every process."""

    grad_norm: float
    """Before clipping."""
    tau_h: float | None = None
    """None where its population is empty."""
    skipped: bool = False
    """Loss or gradient was not finite: nothing changed, and nothing was tallied."""


class Tally:
    """Sums and maxima of a step, kept on the device and reduced over the processes once.

    Every process has all the names, whatever work it got. A maximum without a value is None.

    Args:
        reward_functions: each has its own mean and spread.

    Attributes:
        entropies: 1-D tensors, to be put one after the other.
    """

    def __init__(self, device: torch.device, reward_functions: Sequence[str]):
        rewards = ["reward", *(f"reward/{name}" for name in reward_functions)]
        names = [*SUMS, *(f"{name} {part}" for name in rewards for part in ("number", "sum", "squares"))]
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        self._maxima = {name: torch.full((), -math.inf, dtype=torch.float32, device=device) for name in MAXIMA}
        self.entropies = [torch.zeros(0, device=device)]

    def add(self, **values: Tensor | float) -> None:
        """Add to sums."""
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value

    def raise_to(self, **values: Tensor | float) -> None:
        """Raise maxima to the largest of the given values."""
        for name, value in values.items():
            before = self._maxima[name]
            given = torch.as_tensor(value, dtype=before.dtype, device=before.device).flatten()
            self._maxima[name] = torch.cat([before[None], given]).max()

    def reduce(self, accelerator: Accelerator) -> dict[str, Any]:
        """Bring the numbers of all processes together."""
        sums = accelerator.reduce(torch.stack(list(self._sums.values())), "sum")
        result: dict[str, Any] = dict(zip(self._sums, sums.tolist(), strict=True))
        maxima = accelerator.gather(torch.stack(list(self._maxima.values()))[None]).amax(0).tolist()
        result |= {n: None if v == -math.inf else v for n, v in zip(self._maxima, maxima, strict=True)}
        return result | {"entropies": gather_values(torch.cat(self.entropies), accelerator)}


def gather_values(values: Tensor, accelerator: Accelerator) -> Tensor:
    """Concatenate 1-D tensors of different lengths over the processes."""
    if accelerator.num_processes == 1:
        return values
    padded = accelerator.pad_across_processes(values, pad_index=math.nan)
    gathered = accelerator.gather(padded)
    return gathered[~gathered.isnan()]


def has_variance(group: Sequence[Completion]) -> bool:
    """Whether its rewards differ, those that no reward function judged left out."""
    return len({c.reward for c in group if c.reward is not None}) > 1


def count_rollouts(tally: Tally, groups: Sequence[Sequence[Completion]], step: int) -> None:
    """Count what this process sampled for a step."""
    completions = [completion for group in groups for completion in group]
    lags = [step - c.adapter_version for c in completions]
    tally.add(
        **reward_sums(completions),
        groups=len(groups),
        zero_variance_groups=sum(not has_variance(group) for group in groups),
        completions=len(completions),
        truncated=sum(c.truncated for c in completions),
        tokens=sum(len(c.token_ids) for c in completions),
        written=sum(len(c.token_ids) if c.loss_mask is None else sum(c.loss_mask) for c in completions),
        sampled_nll=-sum(sum(c.rollout_logprobs) for c in completions),
        lag=sum(lags),
    )
    tally.raise_to(lag_max=max(lags, default=-math.inf))


def step_metrics(
    step: int,
    t: dict[str, Any],
    updates: Sequence[Update],
    seconds: dict[str, float],
    **others: float | None,
) -> dict[str, Any]:
    """The step's metrics as docs/metrics.md defines them; None where one has no value."""

    def ratio(numerator: float, denominator: float) -> float | None:
        return numerator / denominator if denominator else None

    thresholds = [u.tau_h for u in updates if u.tau_h is not None]
    quantiles = zip(("p10", "p50", "p90"), linear_quantiles(t["entropies"], (0.1, 0.5, 0.9)), strict=True)
    kinds = ("spurious", "negative_rare", "negative_sure")
    total_seconds = sum(seconds.values())
    return {
        "step": step,
        "updates": len(updates),
        **others,
        **reward_metrics(t),
        "overlong_penalty": ratio(t["overlong_penalty"], t["batch_completions"]),
        "zero_variance_groups": ratio(t["zero_variance_groups"], t["groups"]),
        "completion_length": ratio(t["tokens"], t["completions"]),
        "truncated_share": ratio(t["truncated"], t["completions"]),
        "lag_mean": ratio(t["lag"], t["completions"]),
        "lag_max": t["lag_max"],
        "sampled_nll": ratio(t["sampled_nll"], t["written"]),
        "entropy": ratio(t["entropy"], t["active_tokens"]),
        **{f"entropy_{name}": value for name, value in quantiles},
        "collision": ratio(t["collision"], t["active_tokens"]),
        "tau_h": ratio(sum(thresholds), len(thresholds)),
        **{f"{name}_share": ratio(t[name], t["batch_tokens"]) for name in ("kept", "silenced", "candidate", *kinds)},
        **{f"{name}_gradient_share": ratio(t[f"{name}_mass"], t["gradient_mass"]) for name in kinds},
        "clip_low_share": ratio(t["clipped_low"], t["trained_tokens"]),
        "clip_high_share": ratio(t["clipped_high"], t["trained_tokens"]),
        "loss": ratio(t["loss"], len(updates)),
        "kl": ratio(t["kl"], t["kl_tokens"]),
        "logit_grad_norm": ratio(t["logit_grad_norm"], t["trained_tokens"]),
        "grad_norm": ratio(sum(u.grad_norm for u in updates), len(updates)),
        "sampler_gap_mean": ratio(t["gap"], t["gap_tokens"]),
        "sampler_gap_k3": ratio(t["gap_k3"], t["gap_tokens"]),
        "sampler_gap_max": t["gap_max"],
        "sampler_capped_share": ratio(t["capped"], t["active_tokens"]),
        "tokens_per_second": t["tokens"] / total_seconds,
        **{f"seconds_{name}": value for name, value in seconds.items()},
        "seconds_step": total_seconds,
    }


def reward_sums(completions: Sequence[Completion]) -> Counter[str]:
    """Number, sum and sum of squares of the rewards, and of what each function gave."""
    sums: Counter[str] = Counter()
    for completion in completions:
        rewards = {f"reward/{name}": score for name, score in completion.scores.items()}
        if completion.reward is not None:
            rewards["reward"] = completion.reward
        for name, reward in rewards.items():
            sums.update({f"{name} number": 1, f"{name} sum": reward, f"{name} squares": reward**2})
    return sums


def reward_metrics(t: dict[str, Any]) -> dict[str, float | None]:
    """Mean and standard deviation (n - 1, in float64) of the rewards, and of what each function gave."""
    metrics: dict[str, float | None] = {}
    for name in [name.removesuffix(" number") for name in t if name.endswith(" number")]:
        number, total, squares = (t[f"{name} {part}"] for part in ("number", "sum", "squares"))
        metrics[name] = total / number if number else None
        variance = max(0.0, squares - total**2 / number) / (number - 1) if number > 1 else None
        metrics[name.replace("reward", "reward_std", 1)] = None if variance is None else math.sqrt(variance)
    return metrics
