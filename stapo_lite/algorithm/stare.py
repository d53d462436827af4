"""STARE, the amplification of surprising tokens (arXiv 2606.19236): the counterpart of S2T.

    omega = weight           if  A > 0  and  log pi is in the lowest `share` of tokens with A > 0
    omega = negative_weight  if  A < 0  and  log pi is in the lowest `share` of tokens with A < 0
    omega = 1                otherwise

omega multiplies the token's policy loss, not its denominator. It is 1 everywhere unless the mean
entropy is below `target_entropy`. Share and mean are taken over the whole mini-batch, across
micro-batches and processes.
"""

import math
from fractions import Fraction

from torch import Tensor


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
