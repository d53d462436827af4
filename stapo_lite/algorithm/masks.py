"""Which tokens of a mini-batch stay in the loss: the keep-mask of S2T and 20-Entropy, and STARE's
weights.

Every threshold is one number for the mini-batch on all processes. Scores are gathered rather than
thresholds: a mean of per-process thresholds would depend on which process got which completions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.algorithm.s2t import (
    candidate_mask,
    linear_quantile,
    spurious_mask,
    top_entropy_mask,
)
from stapo_lite.algorithm.stare import highest_of_lowest
from stapo_lite.config import S2T, Objective, Stare
from stapo_lite.types import Masks, TokenStatistics

Collective = Callable[[Tensor], Tensor]
"""`gather` concatenates 1-D tensors of any length from all processes in host memory; `reduce` sums
tensors over all processes. Every rank must call them, even with an empty share."""


def find_masks(
    statistics: TokenStatistics, batch: MiniBatch, objective: Objective, gather: Collective
) -> Masks:
    """Find the masks of this process's share of a mini-batch.

    Collective: every rank must call it.

    Args:
        statistics: [N] each, of the policy that decides.
    """
    entropy = statistics.entropy
    silenced, tau_h = torch.zeros_like(batch.loss_mask), None
    if objective.s2t.enabled:
        silenced, tau_h = silence(statistics, batch, objective.s2t, gather)
    keep = batch.loss_mask & ~silenced
    if objective.top_entropy_quantile < 1:
        every = gather(entropy[batch.loss_mask])
        lowest = linear_quantile(every, 1 - objective.top_entropy_quantile)
        keep &= top_entropy_mask(entropy, lowest)
    amplification = torch.ones_like(batch.advantages)
    if objective.stare.enabled:
        amplification = amplify(statistics, batch, objective.stare, gather)
    return Masks(keep, silenced, amplification, statistics, tau_h)


def silence(
    statistics: TokenStatistics, batch: MiniBatch, s2t: S2T, gather: Collective
) -> tuple[Tensor, float | None]:
    """Find the tokens that S2T takes out of the loss: their mask, [N] bool, and tau_h."""
    entropy = statistics.entropy
    candidates = candidate_mask(statistics.logprobs, batch.advantages, s2t.tau_p)
    candidates &= batch.loss_mask
    population = candidates if s2t.population == "candidates" else batch.loss_mask
    tau_h = linear_quantile(gather(entropy[population]), s2t.quantile)
    if s2t.silence == "low-entropy":
        return spurious_mask(candidates, entropy, tau_h), tau_h
    if s2t.silence == "all":
        return candidates, tau_h
    score = -entropy  # the paper's ablations replace the entropy by another score
    if s2t.silence == "random":
        # As salts, so that equal completions of two steps get different numbers.
        versions = [completion.adapter_version for completion in batch.completions]
        score = batch.random_scores(versions)
    threshold = linear_quantile(gather(score[population]), s2t.quantile)
    return spurious_mask(candidates, score, threshold), tau_h


def amplify(
    statistics: TokenStatistics, batch: MiniBatch, stare: Stare, gather: Collective
) -> Tensor:
    """STARE's omega, [N] fp32."""
    amplification, logprobs = torch.ones_like(batch.advantages), statistics.logprobs
    entropies = gather(statistics.entropy[batch.loss_mask]).double()
    if entropies.mean() < stare.target_entropy:
        for sign, weight in ((1, stare.weight), (-1, stare.negative_weight)):
            population = batch.loss_mask & (sign * batch.advantages > 0)
            most = highest_of_lowest(gather(logprobs[population]), stare.share)
            amplification.masked_fill_(population & (logprobs <= most), weight)
    return amplification
