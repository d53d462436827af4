"""The loss of every preset, as functions of values: no model, no optimiser.

    sum over kept tokens of  factor * (c * token loss + beta * k3 - entropy_coef * H)

`policy_loss` computes this for a micro-batch, and its gradient's surrogate. Four numbers of a token
make its part of the loss:

    factor         one over the denominator of the mean      `weigh`, before any gradient
    correction     c: what the engine computed differently   `sampler_correction`
    amplification  STARE's omega, 1 in other methods         `masks.py`
    weight         w: minus the derivative of c * omega * token loss by log pi

There are sums and factors here, no means: a denominator covers the whole mini-batch, across
micro-batches and processes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stapo_lite.config import Objective
from stapo_lite.method.masks import Collective
from stapo_lite.method.tokens import Tokens
from stapo_lite.types import LossOutputs, TokenStatistics

LARGEST_LOG_RATIO = 80.0
"""Limit of a log-ratio before `exp`, which is infinite in fp32 from 88.8 on; infinity times a
gradient of 0 would be NaN."""
SAPO_TEMPERATURES = (1.0, 1.05)
"""Temperatures of SAPO's gate, for A > 0 and for the rest (arXiv 2511.20347, and TRL)."""


def policy_loss(
    part: Tokens, now: TokenStatistics, reference: Tensor | None, objective: Objective
) -> LossOutputs:
    """The loss of a micro-batch.

    Args:
        part: with `keep`, `amplification` and `factor`.
        now: of the current policy, [n]; log-probabilities with a gradient, entropies only if
            `objective.entropy_coef` is not 0.
        reference: log-probabilities of the KL term's reference, [n]; None without that term.

    Returns:
        Its `surrogate` has the gradient: -w log pi in place of c * token loss, where the number w
        is minus the latter's derivative by log pi. (The metrics' gradient norms need w, too.)
    """
    assert part.keep is not None
    assert part.factor is not None
    assert part.amplification is not None
    logprobs = now.logprobs.detach()
    # The policy before the step. In the step's first mini-batch nothing has changed since.
    old = logprobs if part.old is None else part.old.logprobs
    # What the model did not write was not sampled: engine and trainer agree on it.
    rollout = part.rollout_logprobs.where(part.written, old)
    # The correction weighs each token by its probability under the policy before the step over
    # that in the engine, which rounds differently and may have had an older adapter. If the ratio
    # is to the engine's probability itself, nothing is left to correct.
    denominator, mode = old, objective.sampler_correction
    if objective.old_logprobs == "rollout":
        denominator, mode = rollout, "off"
    correction, capped = sampler_correction(
        old, rollout, part.owner, len(part.completions), mode, objective.sampler_cap
    )
    correction = correction * part.amplification
    token = bounded_loss(part, logprobs, denominator, objective)
    weight = correction * token.weight
    penalties = -objective.entropy_coef * now.entropy
    if reference is not None:
        # k3 may be infinite for a masked token, and 0 * infinity is NaN: give these tokens k3 = 0.
        kept = now.logprobs.where(part.keep, reference)
        penalties = penalties + objective.beta * k3(kept, reference)
    # Masked tokens get 0 * w; w is finite (LARGEST_LOG_RATIO).
    value = part.factor * (correction * token.loss + penalties.detach())
    surrogate = part.factor * (penalties - weight * now.logprobs)
    return LossOutputs(
        surrogate=masked_sum(surrogate, part.keep),
        loss=masked_sum(value, part.keep),
        statistics=now,
        weight=weight,
        ref_logprobs=torch.zeros_like(logprobs) if reference is None else reference,
        clipped_low=token.clipped_low,
        clipped_high=token.clipped_high,
        capped=capped,
    )


def bounded_loss(
    part: Tokens, logprobs: Tensor, denominator: Tensor, objective: Objective
) -> "TokenLoss":
    """The token loss of the config's method, from the ratio of each token or of its sequence.

    Args:
        logprobs: [n] of the policy now, without gradient.
        denominator: log-probabilities of the ratio's denominator, [n].
    """
    log_ratio = logprobs - denominator
    if objective.token_loss == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, part.written, part.owner, len(part.completions))
    return token_loss(
        objective.token_loss,
        logprobs,
        log_ratio,
        part.advantages,
        objective.epsilon,
        objective.epsilon_high,
    )


def weigh(
    tokens: Tokens, keep: Tensor, objective: Objective, longest: int, reduce: Collective
) -> Tensor | None:
    """Find the denominator, over the mini-batch on all processes, before the first gradient: if
    micro-batches divided by their own counts, a token's weight would depend on the cut.

    Args:
        keep: [N] bool, from `find_masks`.
        longest: `rollout.max_completion_length`, Dr. GRPO's constant.

    Returns:
        The factor on each token's loss, [N] fp32, so that the mini-batch's loss is a plain sum;
        None if no kept token has a gradient.
    """
    counted = keep if objective.renormalize else tokens.written
    counts = segment_sum(counted, tokens.owner, len(tokens.completions))
    kept_and_trained = keep[tokens.find_places(tokens.trained)].sum()
    sequences = counts.new_full((), len(counts))
    numbers = [counts.sum(), (counts > 0).sum(), sequences, kept_and_trained]
    *totals, with_a_gradient = map(int, reduce(torch.stack(numbers)).tolist())
    if not with_a_gradient:
        return None
    factors = sequence_weights(counts, Totals(*totals), objective.aggregation, longest)
    return factors[tokens.owner]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over a mask, [] float64; `values[mask]` would wait for the device."""
    return values.where(mask, 0.0).sum(dtype=torch.float64)


class TokenLoss(NamedTuple):
    """The loss of each token and what its bounds did, each [n]."""

    loss: Tensor
    """updates do not differentiate it: they use w"""
    weight: Tensor
    """w: minus the derivative of `loss` by the log-probability; for `gspo` as in GSPO-token"""
    clipped_low: Tensor
    """bool: the lower bound took effect"""
    clipped_high: Tensor
    """bool: the upper bound took effect"""


def token_loss(
    kind: str,
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float,
) -> TokenLoss:
    """The policy loss of each token. With the ratio rho = pi / pi_old and the bounds
    low = 1 - epsilon and high = 1 + epsilon_high it is minus

        clip   min(rho A, clip(rho, low, high) A)       PPO with DAPO's clip-higher
        gspo   the same; rho is the sequence's          arXiv 2507.18071, `sequence_log_ratio`
        cispo  clip(rho, low, high) A log pi            arXiv 2506.13585, eq. 4; only log pi has a
                                                        gradient
        dppo   rho A, or 0 beyond the bounds            arXiv 2602.04879, total variation: the
                                                        bounds -epsilon and epsilon_high are
                                                        on pi - pi_old
        sapo   (4 / tau) sigmoid(tau (rho - 1)) A       arXiv 2511.20347; no bounds

    Except with `cispo`, a bound takes effect only if the token has moved in the direction of A:
    the lower for A < 0, the upper for A > 0. The token then has no gradient.

    Args:
        logprobs: log pi, [n] fp32.
        log_ratio: log rho, [n] fp32.
        advantages: [n] fp32.
    """
    ratio, low, high = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp(), 1 - epsilon, 1 + epsilon_high
    bounded = ratio.clamp(low, high)
    below, above = ratio < low, ratio > high
    if kind == "cispo":
        weight = bounded.detach() * advantages
        return TokenLoss(-weight * logprobs, weight, below, above)
    if kind == "sapo":
        tau = torch.where(advantages > 0, *SAPO_TEMPERATURES)
        gate = torch.sigmoid(tau * (ratio - 1))
        weight = 4 * gate * (1 - gate) * ratio * advantages
        never = torch.zeros_like(below)
        return TokenLoss(-4 / tau * gate * advantages, weight, never, never)
    if kind == "dppo":
        moved = logprobs.exp() - (logprobs - log_ratio).exp()
        below, above = moved < -epsilon, moved > epsilon_high
        bounded = torch.zeros_like(ratio)
    clipped_low, clipped_high = (advantages < 0) & below, (advantages > 0) & above
    clipped = clipped_low | clipped_high
    value = torch.where(clipped, bounded, ratio) * advantages
    weight = (ratio * advantages).masked_fill(clipped, 0.0)
    return TokenLoss(-value, weight, clipped_low, clipped_high)


def sequence_log_ratio(log_ratio: Tensor, written: Tensor, rows: Tensor, sequences: int) -> Tensor:
    """The sequence's log-ratio at each of its tokens: the mean over the tokens that the model wrote
    (arXiv 2507.18071, eq. 7). A token's loss is differentiated by its own log-probability only
    (GSPO-token, eq. 14), so that masked tokens get no gradient; without a mask, the sum over the
    sequence has GSPO's gradient.

    Args:
        log_ratio: [n] fp32.
        written: [n] bool.
        rows: [n] int64 below `sequences`: the sequence of each token.

    Returns:
        [n] fp32.
    """
    sums = segment_sum(log_ratio.where(written, 0.0), rows, sequences)
    means = sums / segment_sum(written, rows, sequences).clamp(min=1)
    return means[rows].float()


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """q/p - 1 - ln(q/p) >= 0: for tokens sampled from p, an unbiased estimate of KL(p || q) with
    little variance (J. Schulman, "Approximating KL divergence"; eq. 4 of DeepSeekMath).

    Args:
        logprobs: log p of the tokens, any shape.
        other_logprobs: log q, the same shape.
    """
    log_ratio = other_logprobs - logprobs
    # exp(x) - x - 1 would be pure rounding error for nearly equal policies.
    return torch.expm1(log_ratio) - log_ratio


def sampler_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    rows: Tensor,
    sequences: int,
    mode: str,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Importance weights that correct for the engine, whose probabilities at sampling differ
    slightly from the trainer's.

    Args:
        old_logprobs, rollout_logprobs: [n] fp32.
        rows: [n] int64 below `sequences`: the sequence of each token.
        mode: `token-truncate`: min(pi_old / pi_rollout, cap) of each token (truncated importance
            sampling, TRL's `token_truncate`); `icepop`: the ratio, or 0 if it is not between 1 /
            cap and cap (Ring-1T, arXiv 2510.18855; TRL's `token_mask`); `sequence-mask`: the
            product of the ratios of a sequence, 0 if it is above the cap (TRL's `sequence_mask`);
            `off`: 1.
        cap: the largest weight.

    Returns:
        weights [n] fp32, and whether a bound took effect, [n] bool.
    """
    log_ratio = old_logprobs - rollout_logprobs
    if mode == "off":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if mode == "sequence-mask":
        log_ratio = segment_sum(log_ratio, rows, sequences)[rows].float()
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    capped = ratio > cap
    if mode == "token-truncate":
        return ratio.clamp(max=cap), capped
    if mode == "icepop":
        capped |= ratio < 1 / cap
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
    """The factor on each sequence's kept tokens: the mini-batch's loss is the plain sum of factor *
    token loss.

    Args:
        counts: [B], the tokens of each sequence, counted as in `Totals`.
        aggregation: `token-mean` (DAPO, eq. 8), `sequence-mean` (GRPO), `constant` (Dr. GRPO:
            divide by completions x `max_completion_length`).

    Returns:
        [B] fp32.
    """
    if aggregation == "sequence-mean":
        return (1 / (counts.clamp(min=1) * totals.counted_sequences)).float()
    constant = totals.sequences * max_completion_length
    denominator = constant if aggregation == "constant" else totals.tokens
    return torch.full_like(counts, 1 / denominator, dtype=torch.float32)


def logit_gradient_norm(weight: Tensor, logprobs: Tensor, collision: Tensor) -> Tensor:
    """||dJ/da||, where J is minus a token's loss and a its logits (STAPO's gradient-norm identity):

        ||dJ/da||^2 = w^2 (1 - 2 pi(y) + sum_v pi(v)^2)

    Exact without the logits: the collision probability comes with the entropy. Any shape.

    Args:
        weight: w, the derivative of J by the token's log-probability.
        logprobs: log pi(y).
        collision: sum_v pi(v)^2.
    """
    pi = logprobs.exp()
    rest = torch.expm1(logprobs).square()  # (1 - pi)^2, exact even if pi is near 1
    others = (collision - pi.square()).clamp(min=0.0)
    others = torch.minimum(others, rest)  # rounding could make it larger
    return weight.abs() * (rest + others).sqrt()
