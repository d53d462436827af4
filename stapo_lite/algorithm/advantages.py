"""Group advantages: how much better a completion is than the others of its group."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean(R)) / (std(R) + eps) within each group (STAPO sec. 2; verl's GRPO estimator).

    Args:
        rewards: [groups, G] float; NaN marks a completion without a verdict, which gets advantage 0
            and does not count in its group's mean and deviation.
        scale: divide by the standard deviation; without it this is Dr. GRPO's advantage (arXiv 2503.20783).
        eps: keeps rewards that differ by rounding only from being blown up, as in verl.

    Returns:
        [groups, G], the same dtype. The standard deviation is the sample one (G - 1), as in verl and
        TRL. Exactly 0 for every member of a group whose rewards are all equal.
    """
    count = (~rewards.isnan()).sum(-1, keepdim=True)
    deviation = (rewards - rewards.nanmean(-1, keepdim=True)).nan_to_num(0.0)
    std = (deviation.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    lowest = rewards.nan_to_num(torch.inf).amin(-1, keepdim=True)
    highest = rewards.nan_to_num(-torch.inf).amax(-1, keepdim=True)
    return torch.where(highest > lowest, deviation / (std + eps) if scale else deviation, torch.zeros_like(rewards))
