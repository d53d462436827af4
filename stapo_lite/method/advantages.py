"""Group advantages: how much better a completion is than the others of its group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stapo_lite.errors import InputError
from stapo_lite.types import Completion


def group_advantages(rewards: Tensor, scale: str = "group", eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean(R)) / (std(R) + eps) within each group (STAPO sec. 2; verl's GRPO
    estimator).

    Args:
        rewards: [groups, G] float; NaN marks a completion without a verdict, which gets advantage 0
            and does not count in means and deviations.
        scale: what the difference is divided by. `group`: the group's standard deviation; `batch`:
            that of all rewards (arXiv 2508.08221, and TRL); `mean`: the group's mean, which is a
            pass rate (MaxRL, arXiv 2602.02710); `none`: nothing (Dr. GRPO, arXiv 2503.20783).
        eps: avoids blowing up differences that are only rounding, as in verl.

    Returns:
        [groups, G], the same dtype. Standard deviations are sample ones (n - 1), as in verl and
        TRL. Exactly 0 for every member of a group whose rewards are all equal.

    Raises:
        InputError: `mean` with a reward below 0 or above 1: a negative mean would reverse the sign
            of the advantages.
    """
    lowest = rewards.nan_to_num(torch.inf).amin(-1, keepdim=True)
    above = rewards - lowest  # equal rewards give exactly 0; minus their mean they may not
    deviation = above - above.nanmean(-1, keepdim=True)
    if scale == "group":
        deviation = deviation / (_std(deviation, -1) + eps)
    elif scale == "batch":
        deviation = deviation / (_std(rewards.flatten() - rewards.nanmean(), 0) + eps)
    elif scale == "mean":
        if ((rewards < 0) | (rewards > 1)).any():
            raise InputError(
                "objective.scale_rewards=mean (maxrl) is for rewards from 0 to 1: change "
                "reward.incorrect, reward.overlong_penalty, reward.weights or the function"
            )
        deviation = deviation / (rewards.nanmean(-1, keepdim=True) + eps)
    return deviation.nan_to_num(0.0)  # NaN: no reward, or the group's only one


def separate_advantages(scores: Tensor, weights: Sequence[float], eps: float = 1e-6) -> Tensor:
    """Advantages of several rewards, none of which drowns another (GDPO, arXiv 2601.05242): each
    reward's group advantages, times its weight, added up and divided by the batch's deviation.

    A group in which the sums of the rewards are equal, but not the rewards, has advantages. The
    paper also takes off the mean of the batch, which is 0 already.

    Args:
        scores: [K, groups, G] of K rewards; NaN if a function gave none.
        weights: of the K rewards.
        eps: as in `group_advantages`.

    Returns:
        [groups, G]
    """
    parts = torch.stack([group_advantages(reward, "group", eps) for reward in scores])
    total = torch.tensordot(parts.new_tensor(weights), parts, 1)
    total = total.masked_fill(scores.isnan().all(0), torch.nan)
    return (total / (_std(total.flatten(), 0) + eps)).nan_to_num(0.0)


def _std(deviation: Tensor, dim: int) -> Tensor:
    """Sample standard deviation of mean-centred values, ignoring NaN; keeps the dimension."""
    count = (~deviation.isnan()).sum(dim, keepdim=True)
    return (deviation.square().nansum(dim, keepdim=True) / (count - 1)).sqrt()


def has_variance(group: Sequence[Completion]) -> bool:
    """Whether the rewards of a group differ. Only then is there something to learn from it.
    Completions without a reward do not count."""
    return len({c.reward for c in group if c.reward is not None}) > 1


def overlong_share(length: int, max_completion_length: int, buffer: float) -> float:
    """The share of DAPO's soft overlong punishment (eq. 13) that a completion gets, from 0 to 1.

    Args:
        length: tokens of the completion, at most `max_completion_length`.
        buffer: the last share of `max_completion_length`, over which the punishment grows linearly.
    """
    width = buffer * max_completion_length
    return max(0.0, length - (max_completion_length - width)) / width
