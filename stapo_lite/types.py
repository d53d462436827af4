"""What flows through a step, and the one legend of shapes.

Shapes: B sequences of a micro-batch; L tokens of the longest prompt + completion; C tokens of the
longest completion; N completion tokens without padding; D hidden size; V vocabulary size.

Every per-token tensor is [B, C]; column t belongs to completion token t, the token it scores.
Four streams of log-probabilities never share a name: `rollout_logprobs` (the engine, when it
sampled), `old_logprobs` (the trainer, before the step's first update), `logprobs` (the trainer, now)
and `ref_logprobs` (the base model). Two masks: `completion_mask` (the token exists) and `keep_mask`
(the token trains).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch is slow to import, and sandboxes need none
    from torch import Tensor


def derived_seed(*parts: object) -> int:
    """A seed of 63 bits that follows from its parts. Generators of 32 bits take its remainder."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8]) >> 1


@dataclass
class Prompt:
    """One row of the data set, rendered."""

    prompt: str | list[dict[str, str]]
    """As rewards see it: text, or messages."""
    token_ids: list[int]
    answer: Any
    columns: dict[str, Any] = field(default_factory=dict)
    """Every column of the row but the prompt, passed to user rewards by name."""


@dataclass(eq=False)  # compared and hashed by identity: two samples may be equal token for token
class Completion:
    """One sampled answer. `token_ids` ends with the stop token unless `truncated`."""

    prompt: Prompt
    token_ids: list[int]
    rollout_logprobs: list[float]
    truncated: bool
    adapter_version: int
    text: str = ""
    reward: float | None = None
    """None where every reward function abstained."""
    advantage: float = 0.0


class TokenStatistics(NamedTuple):
    """Of the next-token distribution at the sampling temperature, each fp32; nats.

    Shape [N] where `lm_head.py` makes them, [B, C] after `policy.py` has laid them out.
    """

    logprobs: Tensor
    """log pi(y_t)"""
    entropy: Tensor
    """H_t of the full distribution"""
    collision: Tensor
    """sum_v pi(v)^2, the collision probability"""


class MicroBatch(NamedTuple):
    """Sequences laid out as prompt, completion, padding on the right."""

    input_ids: Tensor
    """[B, L] int64"""
    completion_ids: Tensor
    """[B, C] int64"""
    completion_mask: Tensor
    """[B, C] bool"""
    prompt_lengths: Tensor
    """[B] int64"""
    advantages: Tensor
    """[B] fp32"""
