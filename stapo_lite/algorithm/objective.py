"""The token loss of every preset, from the same few functions. Tokens are flat [n].

There are only sums and weights here, never means: the denominators belong to the whole mini-batch,
across micro-batches and processes. `update.add_micro_batch` puts them together.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """The clipped loss of each token and what clipping did, each [n]."""

    loss: Tensor
    """-min(rho A, clip(rho) A), with gradient"""
    gradient: Tensor
    """w = rho A, 0 if clipped: minus the derivative of `loss` by the log-probability"""
    clipped_low: Tensor
    """bool: A < 0 and rho < 1 - epsilon, so no gradient"""
    clipped_high: Tensor
    """bool: A > 0 and rho > 1 + epsilon_high, so no gradient"""


def clipped_token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float
) -> TokenLoss:
    """-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) for each token (PPO with DAPO's
    clip-higher).

    Args:
        logprobs: [n] fp32 with gradient.
        old_logprobs: [n] fp32. For the first update after a rollout pass `logprobs.detach()`.
        advantages: [n] fp32.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    clipped_low = (advantages < 0) & (ratio < 1 - epsilon)
    clipped_high = (advantages > 0) & (ratio > 1 + epsilon_high)
    gradient = (ratio.detach() * advantages).masked_fill(clipped_low | clipped_high, 0.0)
    return TokenLoss(loss, gradient, clipped_low, clipped_high)


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """q/p - 1 - ln(q/p) >= 0: for tokens sampled from p, an unbiased estimate of KL(p || q) with
    little variance (J. Schulman, "Approximating KL divergence"; eq. 4 of DeepSeekMath).

    Args:
        logprobs: log p of the tokens, any shape.
        other_logprobs: log q, the same shape.
    """
    log_ratio = other_logprobs - logprobs
    # exp(x) - x - 1 would be nothing but rounding if the policies are nearly equal.
    return torch.expm1(log_ratio) - log_ratio


def sampler_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    rows: Tensor,
    sequences: int,
    mode: str,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Importance weights that correct for the engine: it sampled the tokens with slightly other
    probabilities than the trainer computes.

    Args:
        old_logprobs, rollout_logprobs: [n] fp32.
        rows: [n] int64 below `sequences`: the sequence of each token.
        mode: `token-truncate`: min(pi_old / pi_rollout, cap) of each token (truncated importance
            sampling, TRL's `token_truncate`); `sequence-mask`: the product of the ratios of a
            sequence, 0 if it is above the cap (TRL's `sequence_mask`); `off`: 1.
        cap: the largest weight.

    Returns:
        weights [n] fp32, and whether the cap took effect, [n] bool.
    """
    log_ratio = old_logprobs - rollout_logprobs
    if mode == "off":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if mode == "sequence-mask":
        log_ratio = segment_sum(log_ratio, rows, sequences)[rows].float()
    ratio = log_ratio.exp()
    capped = ratio > cap
    if mode == "token-truncate":
        return ratio.clamp(max=cap), capped
    return ratio.masked_fill(capped, 0.0), capped


def segment_sum(values: Tensor, rows: Tensor, sequences: int) -> Tensor:
    """Sum of each sequence's values, [sequences] float64."""
    sums = torch.zeros(sequences, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, rows, values.double())


class Totals(NamedTuple):
    """Counts over a whole mini-batch, on all processes. Tokens are the kept ones, or with
    `renormalize: false` all that the model wrote."""

    tokens: int
    counted_sequences: int
    """Sequences with at least one such token."""
    sequences: int


def sequence_weights(
    counts: Tensor, totals: Totals, aggregation: str, max_completion_length: int
) -> Tensor:
    """The factor of each sequence's kept tokens. The mini-batch's loss is the plain sum of factor
    times token loss.

    Args:
        counts: [B], the tokens of each sequence, counted as in `Totals`.
        aggregation: `token-mean` (DAPO, eq. 8), `sequence-mean` (GRPO), `constant` (Dr. GRPO:
            completions x `max_completion_length`).

    Returns:
        [B] fp32.
    """
    if aggregation == "sequence-mean":
        return (1 / (counts.clamp(min=1) * totals.counted_sequences)).float()
    factor = 1 / _denominator(totals, aggregation, max_completion_length)
    return torch.full_like(counts, factor, dtype=torch.float32)


def loss_scale(totals: Totals, aggregation: str, max_completion_length: int) -> float:
    """A power of two for training in float16, whose smallest number is 6e-8. The loss is multiplied
    by it, and the gradient divided. A kept token then weighs about 1/128, so that sums over a
    micro-batch do not overflow."""
    denominator = _denominator(totals, aggregation, max_completion_length)
    return 2.0 ** (round(math.log2(denominator)) - 7)


def _denominator(totals: Totals, aggregation: str, max_completion_length: int) -> int:
    if aggregation == "constant":
        return totals.sequences * max_completion_length
    return totals.tokens


def logit_gradient_norm(gradient: Tensor, logprobs: Tensor, collision: Tensor) -> Tensor:
    """||dJ/da|| of each token with respect to its logits a (STAPO's gradient-norm identity):

        ||dJ/da||^2 = w^2 (1 - 2 pi(y) + sum_v pi(v)^2)

    Exact, but needs no logits: the collision probability comes with the entropy. Any shape.

    Args:
        gradient: w, the derivative of J by the token's log-probability.
        logprobs: log pi(y).
        collision: sum_v pi(v)^2.
    """
    pi = logprobs.exp()
    rest = torch.expm1(logprobs).square()  # (1 - pi)^2, exact even if pi is near 1
    others = (collision - pi.square()).clamp(min=0.0)
    others = torch.minimum(others, rest)  # rounding could make it larger
    return gradient.abs() * (rest + others).sqrt()
