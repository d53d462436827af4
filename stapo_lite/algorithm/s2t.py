"""S2T, silencing spurious tokens: the keep-mask, all that sets STAPO apart from DAPO's token loss.

    I = 0  if  A > 0  and  pi < tau_p  and  H < tau_h        (strict inequalities)
    I = 1  otherwise

pi and H are by default those of the policy before the step (`objective.s2t.statistics`). tau_p is
an absolute probability; tau_h is a quantile of the entropy over the whole optimisation
mini-batch, across micro-batches and processes. Apart from that quantile, everything here is
elementwise, so the layout of the tokens does not matter.
"""

import array
import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


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


def random_scores(token_ids: Sequence[int], salt: int) -> Tensor:
    """Uniform numbers in [0, 1) for the `random` ablation, [len(token_ids)] fp32.

    They depend only on the tokens and the salt, not on the order of the completions or the process
    that has them.
    """
    seed = zlib.crc32(array.array("q", [salt, *token_ids]).tobytes())
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(token_ids), generator=generator)
