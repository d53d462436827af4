"""The data of a step, and the one legend of shapes.

Shapes: G: completions of a group; B: completions in this process's share of a mini-batch; N: their
tokens, without prompts, concatenated; n: the same of a micro-batch; L: tokens of its longest prompt
+ completion; D: hidden size; V: vocabulary size.

Per-token quantities of a mini-batch are flat [N] tensors on the device, the columns of a table
(`method/tokens.py`); `Tokens.owner` maps each token to its completion. A micro-batch is a part of
that table. Only the decoder's input is padded, [completions, L], in `Policy.hidden_states`.

There are four kinds of log-probabilities, all at the sampling temperature: `rollout_logprobs` (the
engine, at sampling), `old` (the trainer, before the step's first update), `current` (the trainer,
at this update) and `reference` (what the KL term stays near). There are two masks: `written` (the
model wrote the token, and its completion was not left out as truncated) and `keep` (the token stays
in the loss).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch is slow to import, and sandboxes need none
    from torch import Tensor

    from stapo_lite.method.metrics import Metric


def derived_seed(*parts: object) -> int:
    """A 63-bit seed derived from the parts. Generators with 32-bit seeds take it modulo 2**32."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8]) >> 1


def copied(value: Any, keep_none: bool = True) -> Any:
    """Copy lists and dictionaries, also nested ones; anything else stays the same object.

    Args:
        keep_none: whether the copies of dictionaries have the fields that are None.
    """
    if isinstance(value, dict):
        parts = value.items()
        return {k: copied(part, keep_none) for k, part in parts if keep_none or part is not None}
    if isinstance(value, list):
        return [copied(part, keep_none) for part in value]
    return value


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
    """Whether the chat template ends it with `<think>`, so that completions start inside it."""
    live: dict[str, Any] = field(default_factory=dict)
    """Objects for the caller's reward functions by name, such as a completion's environment. They
    stay in this process."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"live": {}}


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
    """As rewards see it."""
    whole_text: str = ""
    """As graders see it: with special tokens, and with a `<think>` that the prompt opened, so that
    they can skip the thinking."""
    reward: float | None = None
    """None if every reward function abstained."""
    scores: dict[str, float] = field(default_factory=dict)
    """What each reward function gave, before its weight; one that abstained is missing."""
    overlong_penalty: float = 0.0
    """What the soft overlong punishment subtracts from the reward, before the advantage."""
    advantage: float = 0.0
    loss_mask: list[bool] | None = None
    """Which tokens the model wrote; None for all. The others, such as a tool's results, are context
    and never trained on; their `rollout_logprobs` are 0."""
    messages: list[dict[str, Any]] | None = None
    """The turns of a chat: the model's, with `tool_calls`, and tools' results; None without one."""

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass
class Rollouts:
    """A step's groups of completions."""

    batch: list[list[Completion]] = field(default_factory=list)
    """Groups to train on, from all processes."""
    sampled: list[list[Completion]] = field(default_factory=list)
    """All that this process sampled."""
    rounds: int = 0
    """Rounds of sampling."""
    drawn: int = 0
    """Prompts drawn so far, by all processes."""

    @property
    def groups(self) -> list[list[Completion]]:
        """Groups to show: the batch, or all sampled ones if dynamic sampling dropped them all."""
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
    """Which tokens of a mini-batch stay in the loss, and the numbers behind that decision."""

    keep: Tensor
    """[N] bool: the token stays in the loss. The denominator counts these tokens, or without
    `renormalize` all in `Tokens.written` (`loss.find_factors`)."""
    silenced: Tensor
    """[N] bool: S2T takes it out."""
    amplification: Tensor
    """[N] fp32: STARE multiplies the token's policy loss by it."""
    statistics: TokenStatistics
    """[N]; 0 for tokens that were not measured."""
    tau_h: float | None
    """None if its population is empty, or without S2T."""


class LossOutputs(NamedTuple):
    """The loss of a micro-batch, and the values behind it, [n] each; or those of a mini-batch, [N],
    joined, with 0 for tokens that were in no micro-batch."""

    surrogate: Tensor
    """[] float64: its gradient is the loss's."""
    loss: Tensor
    """[] float64: this process's part."""
    statistics: TokenStatistics
    """Of the current policy, before this update."""
    slope: Tensor
    """fp32: minus the derivative of the token's policy loss by its log-probability, with sampler
    correction and amplification. Tokens that the masks take out have theirs, too. It is 0 if
    clipping (except `cispo`'s) or the correction takes the gradient away."""
    ref_logprobs: Tensor
    """fp32; 0 without a KL term."""
    clipped_low: Tensor
    """bool"""
    clipped_high: Tensor
    """bool"""
    capped: Tensor
    """bool: the sampler correction hit its bound."""


class Update(NamedTuple):
    """The outcome of one update."""

    metrics: dict[str, Metric]
    """This process's part of them (`method/metrics.py`)."""
    grad_norm: float | None = None
    """Before clipping, the same in every process. None if no kept token has a gradient: then
    nothing changed."""
    skipped: bool = False
    """Loss or gradient was not finite: nothing changed, and nothing was counted."""
    masks: Masks | None = None
    outputs: LossOutputs | None = None

    @property
    def changed(self) -> bool:
        """Whether the policy changed."""
        return self.grad_norm is not None and not self.skipped


class NF4Weight(NamedTuple):
    """The weight of a linear layer in bitsandbytes' 4-bit format."""

    packed: Tensor
    """Two values in a byte, [n, 1] uint8."""
    state: Any
    """bitsandbytes' `QuantState`: shape and scales."""


BaseWeights = Mapping[str, "Tensor | NF4Weight"]
"""Frozen weights by the names of transformers' parameters."""
