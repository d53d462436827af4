"""Which tokens of a mini-batch stay in the loss, and with which weight.

S2T, silencing spurious tokens, is all that sets STAPO apart from DAPO's token loss:

    keep = 0  if  A > 0  and  pi < tau_p  and  H < tau_h        (strict inequalities)
    keep = 1  otherwise

pi and H are by default those of the policy before the step (`objective.s2t.statistics`). tau_p is
an absolute probability. tau_h is a quantile of the candidates' entropies (A > 0 and pi < tau_p), or
with `population: all` of all tokens'.

20-Entropy keeps the tokens of highest entropy instead. STARE (arXiv 2606.19236) is S2T's
counterpart: it drops nothing, and multiplies the policy loss of surprising tokens by omega.

    omega = weight           if  A > 0  and  log pi is in the lowest `share` of tokens with A > 0
    omega = negative_weight  if  A < 0  and  log pi is in the lowest `share` of tokens with A < 0
    omega = 1                otherwise, and everywhere unless the mean entropy is below
                             `target_entropy`

Every threshold is one number for the mini-batch on all processes. Scores are gathered rather than
thresholds: a mean of per-process thresholds would depend on which process got which completions.
"""

import array
import math
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from stapo_lite.config import S2T, Objective, Stare
from stapo_lite.method.tokens import Tokens
from stapo_lite.types import Masks, TokenStatistics

Collective = Callable[[Tensor], Tensor]
"""`gather` concatenates 1-D tensors of any length from all processes in host memory; `reduce` sums
tensors over all processes. Every rank must call them, even with an empty share."""


def find_masks(
    statistics: TokenStatistics, tokens: Tokens, objective: Objective, gather: Collective
) -> Masks:
    """Find the masks of this process's share of a mini-batch.

    Collective: every rank must call it.

    Args:
        statistics: [N] each, of the policy before the step, or with `s2t.statistics: current` of
            the present one.
    """
    entropy = statistics.entropy
    silenced = torch.zeros_like(tokens.written)
    tau_h = None
    # STAPO: leave out the spurious tokens.
    if objective.s2t.enabled:
        silenced, tau_h = silence(statistics, tokens, objective.s2t, gather)
    keep = tokens.written & ~silenced
    # 20-Entropy: leave out all but the tokens where the model was undecided.
    if objective.top_entropy_quantile < 1:
        entropies = gather(entropy[tokens.written])
        lowest = linear_quantile(entropies, 1 - objective.top_entropy_quantile)
        keep &= top_entropy_mask(entropy, lowest)
    # STARE: leave out nothing, and weigh surprising tokens differently.
    amplification = torch.ones_like(tokens.advantages)
    if objective.stare.enabled:
        amplification = amplify(statistics, tokens, objective.stare, gather)
    return Masks(keep, silenced, amplification, statistics, tau_h)


def silence(
    statistics: TokenStatistics, tokens: Tokens, s2t: S2T, gather: Collective
) -> tuple[Tensor, float | None]:
    """Find the tokens that S2T takes out of the loss: their mask, [N] bool, and tau_h."""
    entropy = statistics.entropy
    # A candidate is a token that its completion's success would make more probable, although the
    # model hardly ever writes it there.
    candidates = candidate_mask(statistics.logprobs, tokens.advantages, s2t.tau_p)
    candidates &= tokens.written
    population = tokens.written
    if s2t.population == "candidates":
        population = candidates
    tau_h = linear_quantile(gather(entropy[population]), s2t.quantile)
    # A candidate is spurious if the entropy is low: the model was sure of another token. Where the
    # entropy is high, many tokens are possible, and the rare one may have made the answer right.
    if s2t.silence == "low-entropy":
        return spurious_mask(candidates, entropy, tau_h), tau_h
    if s2t.silence == "all":
        return candidates, tau_h
    # The ablations `high-entropy` and `random` are left: the same quantile of another score.
    score = -entropy
    if s2t.silence == "random":
        # The version is the salt: equal completions of two steps get different numbers.
        score = random_column(tokens, [c.adapter_version for c in tokens.completions])
    threshold = linear_quantile(gather(score[population]), s2t.quantile)
    return spurious_mask(candidates, score, threshold), tau_h


def amplify(
    statistics: TokenStatistics, tokens: Tokens, stare: Stare, gather: Collective
) -> Tensor:
    """STARE's omega, [N] fp32."""
    amplification = torch.ones_like(tokens.advantages)
    logprobs = statistics.logprobs
    entropies = gather(statistics.entropy[tokens.written]).double()
    # While the policy is undecided enough, every token counts the same.
    if entropies.mean() < stare.target_entropy:
        for sign, weight in ((1, stare.weight), (-1, stare.negative_weight)):
            population = tokens.written & (sign * tokens.advantages > 0)
            limit = highest_of_lowest(gather(logprobs[population]), stare.share)
            amplification.masked_fill_(population & (logprobs <= limit), weight)
    return amplification


def candidate_mask(logprobs: Tensor, advantages: Tensor, tau_p: float) -> Tensor:
    """Tokens with A > 0 and pi < tau_p.

    Args:
        logprobs: log pi(y_t), fp32, any shape.
        advantages: of each token's completion, broadcastable to `logprobs`.
        tau_p: probability in (0, 1].

    Returns:
        bool, the shape of `logprobs`.
    """
    return (advantages > 0) & (logprobs < math.log(tau_p))


def linear_quantile(values: Tensor, quantile: float) -> float | None:
    """The quantile of the values, interpolated linearly.

    Args:
        values: [M] fp32.
        quantile: in [0, 1].

    Returns:
        None if there are no values.
    """
    # numpy in float64: `torch.quantile` refuses more than 2**24 values.
    return np.quantile(values.double().cpu().numpy(), quantile).item() if len(values) else None


def spurious_mask(candidates: Tensor, score: Tensor, threshold: float | None) -> Tensor:
    """Candidates whose score is below the threshold: the tokens to silence (I = 0).

    Args:
        candidates: bool, from `candidate_mask`.
        score: fp32, the same shape: the entropy, or for the paper's ablations its negative
            (`high-entropy`) or `random_scores`.
        threshold: quantile of the score from `linear_quantile`: tau_h if the score is the entropy.
            None silences nothing.

    Returns:
        bool, the same shape.
    """
    # Compare in float64: rounded to float32, the threshold could rise above a score it equals.
    return candidates & (score.double() < (-math.inf if threshold is None else threshold))


def top_entropy_mask(entropy: Tensor, threshold: float | None) -> Tensor:
    """20-Entropy's keep-mask (arXiv 2506.01939, eq. 5): tokens with H >= the threshold.

    Args:
        entropy: fp32 nats, any shape.
        threshold: quantile of the mini-batch's entropies, above which the share to train on lies.
            None keeps everything.

    Returns:
        bool, the same shape.
    """
    # Not >=: a NaN is kept, so that the loss shows it.
    return ~(entropy.double() < (-math.inf if threshold is None else threshold))


def random_column(tokens: Tokens, salts: Sequence[int]) -> Tensor:
    """Random numbers in [0, 1) for all tokens, [N] fp32.

    Args:
        salts: one for each completion.
    """
    pairs = zip(tokens.completions, salts, strict=True)
    scores = [random_scores(completion.token_ids, salt) for completion, salt in pairs]
    return torch.cat([torch.zeros(0), *scores]).to(tokens.owner.device)


def random_scores(token_ids: Sequence[int], salt: int) -> Tensor:
    """Uniform numbers in [0, 1) for the `random` ablation, [len(token_ids)] fp32.

    They depend only on the tokens and the salt, not on the order of the completions or the process
    that has them.
    """
    seed = zlib.crc32(array.array("q", [salt, *token_ids]).tobytes())
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(token_ids), generator=generator)


def highest_of_lowest(values: Tensor, share: float) -> float:
    """The k-th lowest value, where k is `share` times the number of values, rounded up.

    Args:
        values: [M] fp32.
        share: in (0, 1].

    Returns:
        -inf if there are no values.
    """
    if values.numel() == 0:
        return -math.inf
    # In floating point 0.07 * 100 is 7.000000000000001, which would round up to 8.
    count = math.ceil(Fraction(str(share)) * values.numel())
    return values.kthvalue(count).values.item()
