"""The token loss. Sums only: the one denominator belongs to the whole mini-batch, see `train.py`."""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """Each [B, C]."""

    loss: Tensor
    """-min(rho A, clip(rho) A), with gradient"""
    clipped_low: Tensor
    """bool: A < 0 and rho < 1 - epsilon, so no gradient"""
    clipped_high: Tensor
    """bool: A > 0 and rho > 1 + epsilon_high, so no gradient"""


def clipped_token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float
) -> TokenLoss:
    """-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) for each token (PPO with DAPO's clip-higher).

    Args:
        logprobs: [B, C] fp32 with gradient.
        old_logprobs: [B, C] fp32. At the first update after a rollout pass `logprobs.detach()`.
        advantages: [B].
    """
    advantages = advantages[:, None]
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return TokenLoss(
        loss,
        clipped_low=(advantages < 0) & (ratio < 1 - epsilon),
        clipped_high=(advantages > 0) & (ratio > 1 + epsilon_high),
    )
