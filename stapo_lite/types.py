"""The data of a step, and the one legend of shapes.

Shapes: B completions of a mini-batch (this process's share); N their tokens, all completions put one after the other;
n tokens of a micro-batch; L tokens of its longest prompt + completion; D hidden size; V vocabulary size.

Every per-token quantity of a mini-batch is a flat [N] tensor on the device; `MiniBatch.rows` says to which completion
a token belongs. A micro-batch is a set of completions, and its tokens an index into [N]. Only the decoder's input is
padded, [B, L], in `Policy.hidden_states`.

Four streams of log-probabilities never share a name: `rollout_logprobs` (the engine, when it sampled), `old_logprobs`
(the trainer, before the step's first update), `logprobs` (the trainer, now) and `ref_logprobs` (the reference of the
KL term). Two masks: `loss_mask` (the model wrote the token) and `keep` (it stays in the loss and its denominator).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch is slow to import, and sandboxes need none
    from torch import Tensor


def derived_seed(*parts: object) -> int:
    """A seed of 63 bits that follows from its parts. A generator with seeds of 32 bits takes it modulo 2**32."""
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
    opens_thinking: bool = False
    """Whether the chat template ends it with `<think>`, so that a completion begins within."""


@dataclass(eq=False)  # compared and hashed by identity: two samples may be equal token for token
class Completion:
    """One sampled answer. `token_ids` ends with the stop token, unless it was `truncated` or made in several turns."""

    prompt: Prompt
    token_ids: list[int]
    rollout_logprobs: list[float]
    truncated: bool
    adapter_version: int
    text: str = ""
    reward: float | None = None
    """None where every reward function abstained."""
    scores: dict[str, float] = field(default_factory=dict)
    """What each reward function gave, before its weight; one that abstained is missing."""
    advantage: float = 0.0
    loss_mask: list[bool] | None = None
    """Which tokens the model wrote; None for all. The others, such as a tool's results, are read and never trained;
    their `rollout_logprobs` are 0."""

    @property
    def whole_text(self) -> str:
        """The text with the `<think>` that the prompt has opened: what stands within is no answer."""
        return f"<think>{self.text}" if self.prompt.opens_thinking else self.text


class TokenStatistics(NamedTuple):
    """Statistics of the next-token distribution at the sampling temperature, each [N] fp32; nats."""

    logprobs: Tensor
    """log pi(y_t)"""
    entropy: Tensor
    """H_t of the full distribution"""
    collision: Tensor
    """sum_v pi(v)^2, the collision probability"""
