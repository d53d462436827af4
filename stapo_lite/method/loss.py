"""The loss of every preset, as functions of values: no model, no optimiser.

    sum over kept tokens of  factor * (c * omega * token loss + beta * k3 - entropy_coef * H)

`policy_loss` computes this for a micro-batch. It also returns a surrogate, a sum with the same
gradient. Three numbers scale a token's loss, and a fourth is its derivative:

    factor         one over the denominator of the mean      `find_factors`, before any gradient
    correction     c: what the engine computed differently   `sampler_correction`
    amplification  omega: STARE's, 1 in other methods        `masks.py`
    slope          minus the derivative of the (scaled) token loss by log pi

All log-probabilities are of the distribution at the sampling temperature.

There are sums and factors here, no means: a denominator covers the whole mini-batch, across
micro-batches and processes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stapo_lite.config import Objective
from stapo_lite.method.masks import Collective
from stapo_lite.method.tokens import Tokens, blank_statistics, scatter_into
from stapo_lite.types import LossOutputs, TokenStatistics

LARGEST_LOG_RATIO = 80.0
"""Limit of a log-ratio before `exp`, which is infinite in fp32 from 88.8 on; infinity times a
gradient of 0 would be NaN."""
SAPO_TEMPERATURES = (1.0, 1.05)
"""Temperatures of SAPO's gate, for A > 0 and for the rest (arXiv 2511.20347, and TRL)."""


def policy_loss(
    part: Tokens, current: TokenStatistics, reference: Tensor | None, objective: Objective
) -> LossOutputs:
    """The loss of a micro-batch.

    Args:
        part: with `keep`, `amplification` and `factor`.
        current: statistics of the policy now, [n]; log-probabilities with a gradient, entropies
            with one only if `objective.entropy_coef` is above 0.
        reference: log-probabilities, [n], of the policy that the KL term stays near: the base, or
            the adapter that training started from; None without that term.

    Returns:
        Its `surrogate` has the loss's gradient. It has -slope * log pi in place of c * omega *
        token loss; the slope is a plain number. The metrics' gradient norms need it, too.
    """
    assert part.keep is not None
    assert part.factor is not None
    assert part.amplification is not None
    logprobs = current.logprobs.detach()
    # Three policies: the current one, the one before the step, and the one in the engine that
    # sampled. In the step's first mini-batch nothing has changed since the step began.
    old = logprobs
    if part.old is not None:
        old = part.old.logprobs
    # What the model did not write was not sampled: let engine and trainer agree on it.
    rollout = part.rollout_logprobs.where(part.written, old)
    # The ratio compares the current policy with the old one, and the correction the old one with
    # the engine, which rounds differently and may have had an older adapter. If the ratio already
    # refers to the engine, nothing is left to correct.
    denominator = old
    mode = objective.sampler_correction
    if objective.old_logprobs == "rollout":
        denominator = rollout
        mode = "off"
    correction, capped = sampler_correction(
        old, rollout, part.owner, len(part.completions), mode, objective.sampler_cap
    )
    correction = correction * part.amplification
    token = bounded_loss(part, logprobs, denominator, objective)
    slope = correction * token.slope
    added = penalties(part.keep, current, reference, objective)
    # Sum over the kept tokens. The factor has the denominator of the whole mini-batch. In the
    # backward pass a masked token's log-probability gets 0 times its slope. That is 0 only because
    # the slope is finite (LARGEST_LOG_RATIO).
    value = part.factor * (correction * token.loss + added.detach())
    surrogate = part.factor * (added - slope * current.logprobs)
    if reference is None:
        reference = torch.zeros_like(logprobs)
    return LossOutputs(
        surrogate=masked_sum(surrogate, part.keep),
        loss=masked_sum(value, part.keep),
        statistics=current,
        slope=slope,
        ref_logprobs=reference,
        clipped_low=token.clipped_low,
        clipped_high=token.clipped_high,
        capped=capped,
    )


def penalties(
    keep: Tensor, current: TokenStatistics, reference: Tensor | None, objective: Objective
) -> Tensor:
    """What is added to each token's policy loss, [n]: minus the entropy bonus, and the distance
    from a reference. Both have a gradient of their own."""
    penalty = -objective.entropy_coef * current.entropy
    if reference is None:
        return penalty
    # k3 may be infinite for a masked token, and 0 * infinity is NaN: give these tokens k3 = 0.
    logprobs = current.logprobs.where(keep, reference)
    return penalty + objective.beta * k3(logprobs, reference)


def blank_outputs(tokens: Tokens) -> LossOutputs:
    """A mini-batch's outputs before its first micro-batch: zeros, [N]."""
    numbers = torch.zeros_like(tokens.rollout_logprobs)
    flags = torch.zeros_like(tokens.written)
    total = numbers.new_zeros((), dtype=torch.float64)
    return LossOutputs(
        surrogate=total,
        loss=total.clone(),
        statistics=blank_statistics(tokens),
        slope=numbers,
        ref_logprobs=numbers.clone(),
        clipped_low=flags,
        clipped_high=flags.clone(),
        capped=flags.clone(),
    )


def join(whole: LossOutputs, part: Tokens, outputs: LossOutputs) -> None:
    """Copy a micro-batch's outputs to their places in the mini-batch's, and add its loss."""
    assert part.places is not None
    whole.loss.add_(outputs.loss)
    scatter_into(whole.statistics, part.places, outputs.statistics)
    scatter_into(whole[3:], part.places, outputs[3:])


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


def find_factors(
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
    counted = tokens.written
    if objective.renormalize:  # STAPO's: silenced tokens do not count in the mean
        counted = keep
    counts = segment_sum(counted, tokens.owner, len(tokens.completions))
    kept_and_trained = (keep & tokens.in_gradient).sum()
    sequences = counts.new_full((), len(counts))
    # All that is needed of the other processes comes in one message, for which the host waits once.
    numbers = [counts.sum(), (counts > 0).sum(), sequences, kept_and_trained]
    counted_tokens, nonempty, completions, with_gradient = reduce(torch.stack(numbers)).tolist()
    if with_gradient == 0:
        return None
    if objective.aggregation == "token-mean":  # DAPO, eq. 8
        denominators = torch.full_like(counts, counted_tokens)
    elif objective.aggregation == "sequence-mean":  # GRPO
        denominators = counts.clamp(min=1) * nonempty
    else:  # Dr. GRPO
        denominators = torch.full_like(counts, completions * longest)
    return (1 / denominators).float()[tokens.owner]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over a mask, [] float64; `values[mask]` would wait for the device."""
    return values.where(mask, 0.0).sum(dtype=torch.float64)


class TokenLoss(NamedTuple):
    """The loss of each token and what its bounds did, each [n]."""

    loss: Tensor
    """the value only: the gradient comes from the slope"""
    slope: Tensor
    """minus the derivative of `loss` by the log-probability; for `gspo` as in GSPO-token"""
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
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    low = 1 - epsilon
    high = 1 + epsilon_high
    bounded = ratio.clamp(low, high)
    below = ratio < low
    above = ratio > high
    if kind == "cispo":
        # The bounded ratio is a constant weight: no token loses its gradient.
        slope = bounded.detach() * advantages
        return TokenLoss(-slope * logprobs, slope, below, above)
    if kind == "sapo":
        # A sigmoid of the ratio in place of bounds; its slope fades out instead of ending.
        tau = torch.where(advantages > 0, *SAPO_TEMPERATURES)
        gate = torch.sigmoid(tau * (ratio - 1))
        slope = 4 * gate * (1 - gate) * ratio * advantages
        never = torch.zeros_like(below)
        return TokenLoss(-4 / tau * gate * advantages, slope, never, never)
    if kind == "dppo":
        # The bounds are on the probability itself: a rare token may double, a sure one may not.
        moved = logprobs.exp() - (logprobs - log_ratio).exp()
        below = moved < -epsilon
        above = moved > epsilon_high
        bounded = torch.zeros_like(ratio)
    # PPO's minimum is pessimistic: a bound takes effect only where the token has already moved in
    # the direction in which its advantage pushes it.
    clipped_low = (advantages < 0) & below
    clipped_high = (advantages > 0) & above
    clipped = clipped_low | clipped_high
    value = torch.where(clipped, bounded, ratio) * advantages
    slope = (ratio * advantages).masked_fill(clipped, 0.0)
    return TokenLoss(-value, slope, clipped_low, clipped_high)


def sequence_log_ratio(log_ratio: Tensor, written: Tensor, rows: Tensor, sequences: int) -> Tensor:
    """The sequence's log-ratio at each of its tokens: the mean over the tokens that the model wrote
    (arXiv 2507.18071, eq. 7).

    Each token's loss is differentiated by its own log-probability only (GSPO-token, eq. 14). Masked
    tokens therefore get no gradient. If no token is masked, the sum over the sequence has GSPO's
    gradient.

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
    """Importance weights that correct for the engine, whose probabilities at sampling differ from
    the trainer's before the step: it rounds differently, and its adapter may be older.

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


def logit_gradient_norm(slope: Tensor, logprobs: Tensor, collision: Tensor) -> Tensor:
    """||dJ/da||, where J is minus a token's loss and a its logits (STAPO's gradient-norm identity):

        ||dJ/da||^2 = slope^2 (1 - 2 pi(y) + sum_v pi(v)^2)

    Exact without the logits: the collision probability comes with the entropy. Any shape.

    Args:
        slope: the derivative of J by the token's log-probability, of either sign.
        logprobs: log pi(y).
        collision: sum_v pi(v)^2.
    """
    pi = logprobs.exp()
    rest = torch.expm1(logprobs).square()  # (1 - pi)^2, exact even if pi is near 1
    others = (collision - pi.square()).clamp(min=0.0)
    others = torch.minimum(others, rest)  # rounding could make it larger
    return slope.abs() * (rest + others).sqrt()
