"""What an update did, as metrics (docs/metrics.md) that add up.

A metric of a step is put together from parts: of mini-batches and of processes. Three small types
say how the parts add up, and what number the sum stands for:

    Mean(6.0, 3) + Mean(0.0, 1)               1.5, the mean of four values
    Deviation(6.0, 14.0, 3)                   1.0, of the values 1, 2 and 3
    Ratio(2.0, 10.0) + Ratio(1.0, 20.0)       0.1, one sum over another
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Self

from torch import Tensor

from stapo_lite.config import Objective
from stapo_lite.method.loss import k3, masked_sum
from stapo_lite.method.tokens import Tokens
from stapo_lite.types import LossOutputs, Masks

Metrics = Mapping[str, "Metric"]


class Metric:
    """Sums, from which the metric's value follows. They are numbers, or [] tensors, which stay on
    the device until the step ends."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, vars(self).values(), vars(other).values()))

    def on_host(self) -> Self:
        """The same with Python's numbers. It waits for the device."""
        return type(self)(*map(float, vars(self).values()))

    @property
    def value(self) -> float | None:
        """The metric's value; None if nothing was counted."""
        raise NotImplementedError


@dataclass
class Ratio(Metric):
    """One sum over another."""

    part: Any
    whole: Any

    @property
    def value(self) -> float | None:
        return self.part / self.whole if self.whole else None


class Mean(Ratio):
    """A mean: the sum of the values over their number."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The mean of some numbers."""
        return cls(sum(values), len(values))

    @classmethod
    def over(cls, mask: Tensor, values: Tensor) -> Self:
        """The mean of the values in a mask; with a mask as values, their share."""
        return cls(masked_sum(values, mask), mask.sum())


@dataclass
class Deviation(Metric):
    """A sample standard deviation (n - 1)."""

    total: Any
    squares: Any
    count: Any

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The deviation of some numbers."""
        return cls(sum(values), sum(value**2 for value in values), len(values))

    @property
    def value(self) -> float | None:
        if self.count < 2:
            return None
        squares = max(0.0, self.squares - self.total**2 / self.count)  # rounding may make it < 0
        return math.sqrt(squares / (self.count - 1))


def mask_metrics(tokens: Tokens, masks: Masks) -> dict[str, Metric]:
    """What the masks did with a mini-batch."""
    return {
        "kept_share": Mean.over(tokens.written, masks.keep),
        "silenced_share": Mean.over(tokens.written, masks.silenced),
        "amplified_share": Mean.over(tokens.written, masks.amplification != 1),
    }


def loss_metrics(
    tokens: Tokens, masks: Masks, outputs: LossOutputs, objective: Objective
) -> dict[str, Metric]:
    """What an update did with the tokens that have an advantage."""
    active = tokens.written & (tokens.advantages != 0)
    trained = active & masks.keep
    logprobs = outputs.statistics.logprobs
    metrics: dict[str, Metric] = {
        "entropy": Mean.over(active, outputs.statistics.entropy),
        "clip_low_share": Mean.over(trained, outputs.clipped_low),
        "clip_high_share": Mean.over(trained, outputs.clipped_high),
        "sampler_capped_share": Mean.over(active, outputs.capped),
    }
    if objective.beta:
        metrics["kl"] = Mean.over(masks.keep, k3(logprobs, outputs.ref_logprobs))
    # How far the engine is from the trainer. In the step's first mini-batch the current policy is
    # the one that sampled; later ones know the old one only if the ratio needs it.
    old_logprobs = logprobs
    if tokens.old is not None:
        if objective.old_logprobs == "rollout":
            return metrics
        old_logprobs = tokens.old.logprobs
    gap = (old_logprobs - tokens.rollout_logprobs).abs()
    metrics["sampler_gap_mean"] = Mean.over(active, gap)
    metrics["sampler_gap_k3"] = Mean.over(active, k3(tokens.rollout_logprobs, old_logprobs))
    return metrics
