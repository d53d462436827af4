"""Statistics of a mini-batch's tokens without a gradient, and which completions need them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.config import Objective
from stapo_lite.training.learner import Learner
from stapo_lite.types import Completion, TokenStatistics


def mask_statistics(learner: Learner, batch: MiniBatch) -> TokenStatistics:
    """Statistics that the masks are computed from, [N]: those from before the step's first update,
    if they are stored; else the current policy's (in the step's first mini-batch the same), by a
    forward pass over the completions in `rows_for_masks`."""
    if batch.old is not None and learner.config.objective.s2t.statistics == "old":
        return batch.old
    rows = rows_for_masks(batch.completions, learner.config.objective)
    return measure(learner, batch, rows)


@torch.no_grad()
def measure(learner: Learner, batch: MiniBatch, rows: Sequence[int]) -> TokenStatistics:
    """Statistics of the current policy, [N]; 0 for the tokens of completions that are not among the
    rows."""
    statistics = blank_statistics(batch)

    def work(micro_batches: Iterable[list[int]]) -> None:
        for part in micro_batches:
            now = learner.policy.statistics(batch.select(part))
            scatter_into(statistics, batch.places(part), now)

    learner.budget.fit(batch, rows, work)
    return statistics


def blank_statistics(batch: MiniBatch) -> TokenStatistics:
    """Statistics of zeros, [N], to fill in from micro-batches."""
    return TokenStatistics(*torch.zeros(3, len(batch.rows), device=batch.rows.device))


def scatter_into(whole: Sequence[Tensor], tokens: Tensor, part: Sequence[Tensor]) -> None:
    """Copy a micro-batch's [n] tensors to their places in the [N] ones."""
    for target, values in zip(whole, part, strict=True):
        target[tokens] = values.detach()


def rows_with_gradient(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows that contribute to the gradient; those with zero advantage only if there is a KL or
    entropy term, or a teacher."""
    every = objective.beta > 0 or objective.entropy_coef > 0 or objective.distills
    return [row for row, completion in enumerate(completions) if every or completion.advantage != 0]


def rows_for_old(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows for which a later update needs the statistics from before the step's first update."""
    needed: set[int] = set()
    if objective.old_logprobs == "trainer":
        needed.update(rows_with_gradient(completions, objective))
    if objective.s2t.statistics == "old":
        needed.update(rows_for_masks(completions, objective))
    return sorted(needed)


def rows_for_masks(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows whose statistics the masks depend on."""
    s2t, rows = objective.s2t, range(len(completions))
    every = objective.top_entropy_quantile < 1 or objective.stare.enabled
    if every or (s2t.enabled and (s2t.population == "all" or objective.distills)):
        return list(rows)
    return [row for row in rows if s2t.enabled and completions[row].advantage > 0]
