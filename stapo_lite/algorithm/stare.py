"""STARE, the amplification of surprising tokens (arXiv 2606.19236): the counterpart of S2T.

    omega = weight           if  A > 0  and  log pi <= that of the lowest share of those tokens
    omega = negative_weight  if  A < 0  and  log pi <= that of the lowest share of those tokens
    omega = 1                otherwise, and everywhere unless the mean entropy is below its target

omega multiplies the token's policy loss; the denominator stays. Share and mean are those of the
whole mini-batch, across micro-batches and processes.
"""

import math

from torch import Tensor


def highest_of_lowest(values: Tensor, share: float) -> float:
    """The largest of the lowest share of the values. The share is rounded up to whole values.

    Args:
        values: [M] fp32.
        share: in (0, 1].

    Returns:
        -inf if there are no values.
    """
    if values.numel() == 0:
        return -math.inf
    return values.kthvalue(math.ceil(share * values.numel())).values.item()
