"""A mini-batch is a table with a row for each token: flat tensors, one completion after the other.

    completions   "7, since 4 + 3 is 7"   "8"
    owner         0  0  0  0  0  0  0  0   1
    advantages    1  1  1  1  1  1  1  1  -1
    written       T  T  T  T  T  T  T  T   T

`Tokens` is a process's share of a mini-batch, and just as well a micro-batch of it (`part`): the
loss need not know which of the two it gets. `pack` decides which completions train, and which are
measured beforehand. A teacher changes advantages only later, and with one all completions train.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stapo_lite.config import Objective
from stapo_lite.types import Completion, Masks, TokenStatistics

COLUMNS = (
    "advantages",
    "written",
    "rollout_logprobs",
    "in_gradient",
    "keep",
    "amplification",
    "factor",
)
"""Columns that `Tokens.part` picks as they are."""


@dataclass
class Tokens:
    """Completions, and what is known of their N tokens before an update."""

    completions: list[Completion]
    starts: list[int]
    """B + 1 offsets into [N]: where each completion's tokens start, and N."""
    owner: Tensor
    """[N] int64: the index of the completion that each token belongs to."""
    advantages: Tensor
    """[N] fp32: the advantage of the token's completion, plus what a teacher adds."""
    written: Tensor
    """[N] bool: the model wrote the token, and its completion was not left out as truncated. Such
    tokens count in the denominator, even if their completion has no gradient."""
    rollout_logprobs: Tensor
    """[N] fp32"""
    in_gradient: Tensor
    """[N] bool: the token's completion is one of `trained`."""
    trained: list[int]
    """Indices of the completions with a gradient."""
    decisive: list[int]
    """Indices of the completions whose statistics the masks depend on."""
    remembered: list[int]
    """Indices of the completions whose statistics from before the step a later update needs."""
    old: TokenStatistics | None = None
    """Statistics of the policy before the step's first update, [N]; 0 for tokens whose statistics
    no update needs. In a run it is None in the step's first mini-batch, where the old policy is the
    current one."""
    keep: Tensor | None = None
    """[N] bool: the token stays in the loss (`masks.find_masks`)."""
    amplification: Tensor | None = None
    """[N] fp32: STARE's weight on the token's policy loss (`masks.find_masks`)."""
    factor: Tensor | None = None
    """[N] fp32: one over the denominator of the token's mean (`loss.find_factors`)."""
    places: Tensor | None = None
    """[n] int64, of a part: the places of its tokens in the whole table."""

    def find_places(self, chosen: Sequence[int]) -> Tensor:
        """Indices into [N] of the tokens of some completions, one completion after the other.

        Args:
            chosen: indices of the completions.

        Returns:
            [n] int64.
        """
        parts = [torch.zeros(0, dtype=torch.int64)]  # so that there is something to concatenate
        for number in chosen:
            parts.append(torch.arange(self.starts[number], self.starts[number + 1]))
        return send(torch.cat(parts), self.owner.device)

    def part(self, chosen: Sequence[int]) -> "Tokens":
        """The table of some of the trained completions alone.

        Args:
            chosen: indices of the completions.
        """
        completions = [self.completions[number] for number in chosen]
        # In the part, completions are numbered anew; all other columns are picked from the table.
        places = self.find_places(chosen)
        lengths = torch.tensor([len(completion.token_ids) for completion in completions])
        owner = torch.arange(len(chosen)).repeat_interleave(lengths)
        old = None
        if self.old is not None:
            old = TokenStatistics(*(values[places] for values in self.old))
        columns = {name: getattr(self, name) for name in COLUMNS}
        return Tokens(
            completions,
            offsets(completions),
            owner=send(owner, places.device),
            trained=list(range(len(chosen))),
            decisive=[],
            remembered=[],
            old=old,
            places=places,
            **{name: column[places] for name, column in columns.items() if column is not None},
        )

    def with_masks(self, masks: Masks, factor: Tensor | None) -> "Tokens":
        """The table with the columns that the loss needs besides (`masks.find_masks`,
        `loss.find_factors`)."""
        return replace(self, keep=masks.keep, amplification=masks.amplification, factor=factor)


def pack(
    completions: Sequence[Completion], device: torch.device | str, objective: Objective
) -> Tokens:
    """Put the tokens of completions one after the other, on the device."""
    owner: list[int] = []
    advantages: list[float] = []
    written: list[bool] = []
    rollout_logprobs: list[float] = []
    in_gradient: list[bool] = []
    trained: list[int] = []
    # Python lists first, and one copy to the device for each column.
    for number, completion in enumerate(completions):
        length = len(completion.token_ids)
        owner += [number] * length
        advantages += [completion.advantage] * length
        written += completion.loss_mask or [True] * length
        rollout_logprobs += completion.rollout_logprobs
        trains = is_trained(completion, objective)
        in_gradient += [trains] * length
        if trains:
            trained.append(number)
    return Tokens(
        list(completions),
        offsets(completions),
        owner=send(torch.tensor(owner, dtype=torch.int64), device),
        advantages=send(torch.tensor(advantages, dtype=torch.float32), device),
        written=send(torch.tensor(written, dtype=torch.bool), device),
        rollout_logprobs=send(torch.tensor(rollout_logprobs, dtype=torch.float32), device),
        in_gradient=send(torch.tensor(in_gradient, dtype=torch.bool), device),
        trained=trained,
        decisive=[i for i, c in enumerate(completions) if decides_masks(c, objective)],
        remembered=[i for i, c in enumerate(completions) if is_remembered(c, objective)],
    )


def offsets(completions: Sequence[Completion]) -> list[int]:
    """Where the tokens of each completion start, and their number: [3, 1] tokens -> [0, 3, 4]."""
    starts = [0]
    for completion in completions:
        starts.append(starts[-1] + len(completion.token_ids))
    return starts


def send(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy from host to device; for a GPU from pinned memory, so that the host does not wait."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def is_trained(completion: Completion, objective: Objective) -> bool:
    """Whether a completion contributes to the gradient. With an advantage of 0 it counts in the
    denominator, and skips the model. Only a KL or entropy term, or a teacher, who gives each token
    an advantage of its own, gives it a gradient."""
    if not completion.written:
        return False
    without_advantage = objective.beta > 0 or objective.entropy_coef > 0 or objective.distills
    return without_advantage or completion.advantage != 0


def decides_masks(completion: Completion, objective: Objective) -> bool:
    """Whether the masks depend on a completion's statistics. S2T's candidates have a positive
    advantage; the other masks compare all tokens that the model wrote."""
    s2t = objective.s2t
    if not completion.written:
        return False
    if objective.top_entropy_quantile < 1 or objective.stare.enabled:
        return True
    # A teacher may give any token a positive advantage.
    without_advantage = s2t.population == "all" or objective.distills
    return s2t.enabled and (without_advantage or completion.advantage > 0)


def is_remembered(completion: Completion, objective: Objective) -> bool:
    """Whether a later update needs a completion's statistics from before the step's first update:
    for the ratio, or for masks of the old policy. (`s2t.statistics` decides for every mask.)"""
    for_ratio = objective.old_logprobs == "trainer" and is_trained(completion, objective)
    for_masks = objective.s2t.statistics == "old" and decides_masks(completion, objective)
    return for_ratio or for_masks


def blank_statistics(tokens: Tokens) -> TokenStatistics:
    """Statistics of zeros, [N], to fill in from micro-batches."""
    return TokenStatistics(*torch.zeros(3, len(tokens.owner), device=tokens.owner.device))


def scatter_into(whole: Sequence[Tensor], places: Tensor, part: Sequence[Tensor]) -> None:
    """Copy a micro-batch's [n] tensors to their places in the [N] ones."""
    for target, values in zip(whole, part, strict=True):
        target[places] = values.detach()
