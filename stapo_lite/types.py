"""The data of a step, and the one legend of shapes.

Shapes: B completions of a mini-batch (this process's share); N their tokens, all completions put
one after the other; n tokens of a micro-batch; L tokens of its longest prompt + completion; D
hidden size; V vocabulary size.

Every per-token quantity of a mini-batch is a flat [N] tensor on the device; `MiniBatch.rows` says
to which completion a token belongs. A micro-batch is a set of completions, and its tokens an index
into [N]. Only the decoder's input is padded, [B, L], in `Policy.hidden_states`.

Four streams of log-probabilities never share a name: `rollout_logprobs` (the engine, when it
sampled), `old_logprobs` (the trainer, before the step's first update), `logprobs` (the trainer,
now) and `ref_logprobs` (the reference of the KL term). Two masks: `loss_mask` (the model wrote the
token) and `keep` (it stays in the loss and its denominator).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch is slow to import, and sandboxes need none
    from torch import Tensor


def derived_seed(*parts: object) -> int:
    """A seed of 63 bits that follows from its parts. A generator with seeds of 32 bits takes it
    modulo 2**32."""
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
    """One sampled answer. `token_ids` ends with the stop token, unless it was `truncated` or made
    in several turns."""

    prompt: Prompt
    token_ids: list[int]
    rollout_logprobs: list[float]
    truncated: bool
    adapter_version: int
    text: str = ""
    reward: float | None = None
    """None if every reward function abstained."""
    scores: dict[str, float] = field(default_factory=dict)
    """What each reward function gave, before its weight; one that abstained is missing."""
    overlong_penalty: float = 0.0
    """What the soft overlong punishment takes off the reward before the advantage."""
    advantage: float = 0.0
    loss_mask: list[bool] | None = None
    """Which tokens the model wrote; None for all. The others, such as a tool's results, are read
    and never trained; their `rollout_logprobs` are 0."""

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def whole_text(self) -> str:
        """The text with the `<think>` that the prompt has opened: what is inside it is not the
        answer."""
        return f"<think>{self.text}" if self.prompt.opens_thinking else self.text


@dataclass
class Rollouts:
    """A step's groups of completions."""

    batch: list[list[Completion]] = field(default_factory=list)
    """Those to train on, of all processes."""
    sampled: list[list[Completion]] = field(default_factory=list)
    """All that this process sampled."""
    rounds: int = 0
    """Rounds of sampling."""
    drawn: int = 0
    """Prompts, on all processes."""

    @property
    def groups(self) -> list[list[Completion]]:
        """Those to show: the batch, or what was sampled if dynamic sampling has dropped all."""
        return self.batch or self.sampled


class TokenStatistics(NamedTuple):
    """Statistics of the next-token distribution at the sampling temperature, each [N] fp32;
    nats."""

    logprobs: Tensor
    """log pi(y_t)"""
    entropy: Tensor
    """H_t of the full distribution"""
    collision: Tensor
    """sum_v pi(v)^2, the collision probability"""


class Masks(NamedTuple):
    """Which tokens of a mini-batch stay in the loss, and what that was decided by."""

    keep: Tensor
    """[N] bool: the token stays in the loss and its denominator."""
    silenced: Tensor
    """[N] bool: S2T takes it out."""
    amplification: Tensor
    """[N] fp32: STARE multiplies the token's policy loss by it."""
    statistics: TokenStatistics
    """[N], of the tokens that the masks depend on."""
    tau_h: float | None
    """None if its population is empty, or without S2T."""
    population: Tensor
    """[M] fp32: the entropies of this mini-batch, on all processes, that tau_h is the quantile of;
    none without S2T."""


class Gradient(NamedTuple):
    """What was computed together with a mini-batch's gradient, [N] each; 0 for tokens that were in
    no micro-batch."""

    statistics: TokenStatistics
    """Of the policy that the gradient is of."""
    weight: Tensor
    """fp32: minus the derivative of the token's policy loss by its log-probability. It includes the
    sampler's correction and STARE's weight, and is 0 if the token is clipped."""
    ref_logprobs: Tensor
    """fp32; 0 without a KL term."""
    clipped_low: Tensor
    """bool"""
    clipped_high: Tensor
    """bool"""
    capped: Tensor
    """bool: the sampler's correction met a bound of its own."""
    loss: Tensor
    """[] float64, this process's part."""


class TokenDetails(NamedTuple):
    """What an update made of each token, [N] each."""

    statistics: TokenStatistics
    """Those that the token was judged by: the mask's own for A > 0, those of the gradient's policy
    for the rest."""
    gradient_norm: Tensor
    """fp32: norm of the gradient with respect to the token's logits, as if no mask took it out."""
    keep: Tensor
    """bool"""
    candidate: Tensor
    """bool: A > 0 and pi < tau_p."""
    spurious: Tensor
    """bool: a candidate with H < tau_h, whether or not S2T is on."""


class Update(NamedTuple):
    """The outcome of one update."""

    grad_norm: float | None
    """Before clipping, the same in every process. None if no token that is kept has a gradient:
    then nothing changed."""
    tau_h: float | None
    """The same in every process. None if its population is empty."""
    sums: dict[str, Tensor]
    """What this process counted (`training/metrics.py`)."""
    tokens: TokenDetails | None = None
    """None if nothing changed."""
    skipped: bool = False
    """Loss or gradient was not finite: nothing changed, and nothing was counted."""

    @property
    def changed(self) -> bool:
        """Whether the policy is another one now."""
        return self.grad_norm is not None and not self.skipped


class NF4Weight(NamedTuple):
    """The weight of a linear layer in bitsandbytes' 4-bit format."""

    packed: Tensor
    """Two values in a byte, [n, 1] uint8."""
    state: Any
    """bitsandbytes' `QuantState`: shape and scales."""


class FP8Weight(NamedTuple):
    """The weight of a linear layer in 8 bits: values times scale."""

    values: Tensor
    """[out, in] float8_e4m3fn."""
    scale: Tensor
    """[1], or [out, 1] for a scale of each row; fp32."""


BaseWeights = Mapping[str, "Tensor | NF4Weight | FP8Weight"]
"""Frozen weights by the names of transformers' parameters."""
