"""A mini-batch is a table with a row for each token: flat tensors, one completion after the other.

    completions   "7, since 4 + 3 is 7"   "8"
    owner         0  0  0  0  0  0  0  0   1
    advantages    1  1  1  1  1  1  1  1  -1
    written       T  T  T  T  T  T  T  T   T

`Tokens` is a process's share of a mini-batch, and just as well a micro-batch of it (`part`): the
loss need not know which of the two it gets. Which completions train, and which are measured
beforehand, is decided when they are packed, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stapo_lite.config import Objective
from stapo_lite.types import Completion, Masks, TokenStatistics


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
    """[N] bool: the model wrote the token, and its completion is trained on."""
    rollout_logprobs: Tensor
    """[N] fp32"""
    trained: list[int]
    """Indices of the completions with a gradient."""
    decisive: list[int]
    """Indices of the completions whose statistics the masks depend on."""
    old: TokenStatistics | None = None
    """Statistics of the policy before the step's first update, [N]; 0 for tokens whose statistics
    no update needs. None in the step's first mini-batch: the old policy is then the current one."""
    keep: Tensor | None = None
    """[N] bool: the token stays in the loss (`masks.find_masks`)."""
    amplification: Tensor | None = None
    """[N] fp32: STARE's weight on the token's policy loss (`masks.find_masks`)."""
    factor: Tensor | None = None
    """[N] fp32: the factor on the token's loss, one over a mean's denominator (`loss.weigh`)."""
    places: Tensor | None = None
    """[n] int64, of a part: the places of its tokens in the whole table."""

    def find_places(self, chosen: Sequence[int]) -> Tensor:
        """Indices into [N] of the tokens of some completions, one completion after the other.

        Args:
            chosen: indices of the completions.

        Returns:
            [n] int64.
        """
        parts = [torch.zeros(0, dtype=torch.int64)]
        for number in chosen:
            parts.append(torch.arange(self.starts[number], self.starts[number + 1]))
        return send(torch.cat(parts), self.owner.device)

    def part(self, chosen: Sequence[int]) -> "Tokens":
        """The table of some completions alone, all of them trained.

        Args:
            chosen: indices of the completions.
        """
        completions, places = [self.completions[n] for n in chosen], self.find_places(chosen)
        starts = offsets(completions)
        lengths = torch.tensor([len(completion.token_ids) for completion in completions])
        owner = torch.arange(len(chosen)).repeat_interleave(lengths)
        names = ("advantages", "written", "rollout_logprobs", "keep", "amplification", "factor")
        columns = {name: getattr(self, name) for name in names}
        return Tokens(
            completions,
            starts,
            owner=send(owner, places.device),
            trained=list(range(len(chosen))),
            decisive=[],
            old=self.old and TokenStatistics(*(values[places] for values in self.old)),
            places=places,
            **{name: v[places] for name, v in columns.items() if v is not None},
        )

    def weighed(self, masks: Masks, factor: Tensor | None) -> "Tokens":
        """The table with the columns that the loss needs besides (`masks.find_masks`,
        `loss.weigh`)."""
        return replace(self, keep=masks.keep, amplification=masks.amplification, factor=factor)


def pack(
    completions: Sequence[Completion], device: torch.device | str, objective: Objective
) -> Tokens:
    """Put the tokens of completions one after the other, on the device."""
    owner: list[int] = []
    advantages: list[float] = []
    written: list[bool] = []
    rollout_logprobs: list[float] = []
    for number, completion in enumerate(completions):
        length = len(completion.token_ids)
        owner += [number] * length
        advantages += [completion.advantage] * length
        written += completion.loss_mask or [True] * length
        rollout_logprobs += completion.rollout_logprobs
    return Tokens(
        list(completions),
        offsets(completions),
        owner=send(torch.tensor(owner, dtype=torch.int64), device),
        advantages=send(torch.tensor(advantages, dtype=torch.float32), device),
        written=send(torch.tensor(written, dtype=torch.bool), device),
        rollout_logprobs=send(torch.tensor(rollout_logprobs, dtype=torch.float32), device),
        trained=with_gradient(completions, objective),
        decisive=that_decide_masks(completions, objective),
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


def with_gradient(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Indices of the completions that contribute to the gradient. Those with an advantage of zero
    do so only through a KL or entropy term, or a teacher, who gives each token its own."""
    every = objective.beta > 0 or objective.entropy_coef > 0 or objective.distills
    return [i for i, completion in enumerate(completions) if every or completion.advantage != 0]


def that_decide_masks(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Indices of the completions whose statistics the masks depend on. S2T's candidates have a
    positive advantage; the other masks compare all tokens."""
    s2t = objective.s2t
    if objective.top_entropy_quantile < 1 or objective.stare.enabled:
        return list(range(len(completions)))
    if not s2t.enabled:
        return []
    every = s2t.population == "all" or objective.distills
    return [i for i, completion in enumerate(completions) if every or completion.advantage > 0]


def to_remember(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Indices of the completions for which a later update needs the statistics from before the
    step's first update: for the ratio, and for masks of the old policy."""
    needed: set[int] = set()
    if objective.old_logprobs == "trainer":
        needed.update(with_gradient(completions, objective))
    if objective.s2t.statistics == "old":
        needed.update(that_decide_masks(completions, objective))
    return sorted(needed)


def blank_statistics(tokens: Tokens) -> TokenStatistics:
    """Statistics of zeros, [N], to fill in from micro-batches."""
    return TokenStatistics(*torch.zeros(3, len(tokens.owner), device=tokens.owner.device))


def scatter_into(whole: Sequence[Tensor], places: Tensor, part: Sequence[Tensor]) -> None:
    """Copy a micro-batch's [n] tensors to their places in the [N] ones."""
    for target, values in zip(whole, part, strict=True):
        target[places] = values.detach()
