"""S2T, silencing spurious tokens: the keep-mask that is STAPO's one difference from DAPO.

    I = 0  if  A > 0  and  pi < tau_p  and  H < tau_h        (strict inequalities)
    I = 1  otherwise

tau_p is an absolute probability; tau_h is a quantile of the entropy, taken anew over each whole
optimisation mini-batch, across micro-batches and processes. Nothing here depends on how the tokens are
laid out: the functions are elementwise, but for the one quantile.
"""

import math

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


def entropy_threshold(entropies: Tensor, quantile: float) -> float:
    """tau_h: the quantile of the mini-batch's entropies, linear between order statistics.

    The same as `torch.quantile`, which refuses more than 2**24 elements.

    Args:
        entropies: [M] fp32, of the quantile's population in the whole mini-batch.
        quantile: in [0, 1].

    Returns:
        Nats; -inf, below which no entropy lies, where the population is empty.
    """
    if entropies.numel() == 0:
        return -math.inf
    ordered = entropies.double().sort().values
    position = quantile * (len(ordered) - 1)
    low = ordered[math.floor(position)].item()
    high = ordered[math.ceil(position)].item()
    return low + (high - low) * (position - math.floor(position))


def spurious_mask(candidates: Tensor, entropy: Tensor, tau_h: float) -> Tensor:
    """Candidates with H < tau_h: the tokens to silence, where I = 0.

    Args:
        candidates: bool, from `candidate_mask`.
        entropy: fp32 nats, the same shape.
        tau_h: nats, from `entropy_threshold`.

    Returns:
        bool, the same shape.
    """
    # In float64, as tau_h is: rounded to float32 it could rise above an entropy it equals.
    return candidates & (entropy.double() < tau_h)
