"""Group advantages: how much better a completion is than the others of its group."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean(R)) / (std(R) + eps) within each group (STAPO sec. 2; verl's GRPO
    estimator).

    Args:
        rewards: [groups, G] float; NaN marks a completion without a verdict, which gets advantage 0
            and does not count in its group's mean and deviation.
        scale: divide by the standard deviation; without it this is Dr. GRPO's advantage (arXiv
            2503.20783).
        eps: keeps rewards that differ only by rounding from being blown up, as in verl.

    Returns:
        [groups, G], the same dtype. The standard deviation is the sample one (G - 1), as in verl
        and TRL. Exactly 0 for every member of a group whose rewards are all equal.
    """
    lowest = rewards.nan_to_num(torch.inf).amin(-1, keepdim=True)
    above = rewards - lowest  # if all are equal, exactly 0, as their mean may not be
    deviation = above - above.nanmean(-1, keepdim=True)
    if scale:
        count = (~rewards.isnan()).sum(-1, keepdim=True)
        squares = deviation.square().nansum(-1, keepdim=True)
        std = (squares / (count - 1)).sqrt()
        deviation = deviation / (std + eps)
    return deviation.nan_to_num(0.0)
