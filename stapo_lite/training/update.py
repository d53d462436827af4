"""One optimiser update: masks, denominators, gradient, step. This is the method; `loop.py` is the
loop.

    sum I c min(rho A, clip(rho) A) / sum I    over the tokens of the mini-batch on all processes

is STAPO's objective, with c the sampler correction; other presets change the mask I, the
denominator, the token's loss or its weight, or add terms. Each process has a share of the
mini-batch as packed [N] tensors (`types.py`), and cuts it into micro-batches; the result depends on
neither cut. Within a micro-batch the host never waits for the device (except once in
transformers, before the first layer); an update waits for thresholds, counts and gradient norm.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stapo_lite.algorithm.masks import Collective, find_masks
from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.algorithm.objective import (
    TokenLoss,
    Totals,
    k3,
    sampler_correction,
    segment_sum,
    sequence_log_ratio,
    sequence_weights,
    token_loss,
)
from stapo_lite.config import Objective
from stapo_lite.model.policy import Policy, sum_gradients
from stapo_lite.training.learner import Learner
from stapo_lite.training.metrics import masked_sum, token_means, update_means
from stapo_lite.training.statistics import (
    blank_statistics,
    mask_statistics,
    rows_with_gradient,
    scatter_into,
)
from stapo_lite.types import Gradient, Masks, Update


def update(learner: Learner, batch: MiniBatch) -> Update:
    """Update the policy once on a mini-batch, of which every process has a share.

    Collective: every rank must call it, even with an empty share.
    """
    config, objective = learner.config, learner.config.objective
    masks = find_masks(mask_statistics(learner, batch), batch, objective, learner.gather)
    longest = config.rollout.max_completion_length
    factors = weigh_tokens(masks, batch, objective, longest, learner.reduce)
    if factors is None:
        return Update(token_means(batch, masks))
    gradient = accumulate_gradient(learner, batch, masks, factors)
    grad_norm, finite = clip_gradient(learner, gradient)
    if not finite:
        learner.skip(grad_norm)
        return Update({}, grad_norm, skipped=True)
    learner.step()
    means = token_means(batch, masks) | update_means(batch, masks, gradient, objective)
    # The processes' parts add up to one loss, so that together they count 1.
    means["loss"] = (gradient.loss, 1 / learner.accelerator.num_processes)
    means["grad_norm"] = (grad_norm, 1)
    return Update(means, grad_norm, masks=masks, gradient=gradient)


def weigh_tokens(
    masks: Masks, batch: MiniBatch, objective: Objective, longest: int, reduce: Collective
) -> Tensor | None:
    """Find the denominator, over the mini-batch on all processes, before the first gradient: if
    micro-batches divided by their own counts, a token's weight would depend on the cut.

    Args:
        longest: `rollout.max_completion_length`, Dr. GRPO's constant.

    Returns:
        The factor on each token's loss, [N] fp32, so that the mini-batch's loss is a plain sum;
        None if no kept token has a gradient.
    """
    counted = masks.keep if objective.renormalize else batch.loss_mask
    counts = segment_sum(counted, batch.rows, len(batch.completions))
    places = batch.places(rows_with_gradient(batch.completions, objective))
    sequences = counts.new_full((), len(counts))
    numbers = [counts.sum(), (counts > 0).sum(), sequences, masks.keep[places].sum()]
    *totals, with_a_gradient = map(int, reduce(torch.stack(numbers)).tolist())
    if not with_a_gradient:
        return None
    return sequence_weights(counts, Totals(*totals), objective.aggregation, longest)[batch.rows]


def accumulate_gradient(
    learner: Learner, batch: MiniBatch, masks: Masks, factors: Tensor
) -> Gradient:
    """Add up the gradient of the mini-batch's loss, micro-batch by micro-batch, in the parameters'
    `grad`."""
    objective, scale = learner.config.objective, gradient_scale(learner, factors)

    def work(micro_batches: Iterable[list[int]]) -> Gradient:
        learner.optimizer.zero_grad()  # left by a try with too large micro-batches
        done = blank_gradient(batch)
        for rows in micro_batches:
            loss = micro_batch_loss(learner.policy, batch, rows, masks, factors, objective, done)
            (scale * loss).backward()
        return done

    done = learner.budget.fit(batch, rows_with_gradient(batch.completions, objective), work)
    if scale != 1:
        for parameter in learner.policy.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= scale
    return done


def gradient_scale(learner: Learner, factors: Tensor) -> float:
    """The loss scale for float16, whose smallest number is 6e-8: a power of two that multiplies the
    loss and divides the gradient. The token of the least weight then weighs about 1/128: none
    underflows, and sums over a micro-batch do not overflow. 1 in any other dtype.

    Args:
        factors: [N], from `weigh_tokens`.
    """
    if learner.policy.dtype != torch.float16 or not len(factors):
        return 1.0
    least = math.log2(factors.min())
    return 2.0 ** (-round(least) - 7 - math.ceil(learner.progress.backoff))


def micro_batch_loss(
    policy: Policy,
    batch: MiniBatch,
    rows: list[int],
    masks: Masks,
    factors: Tensor,
    objective: Objective,
    done: Gradient,
) -> Tensor:
    """Run a micro-batch's forward pass and record its values in `done`. Its part of the loss is

    sum over kept tokens of  factor * (c * token loss + beta * k3 - entropy_coef * H)

    where c is the sampler correction times STARE's weight.

    Returns:
        [] float64, a surrogate with the gradient of that loss: -w log pi in place of c * token
        loss, where the number w is minus the latter's derivative by log pi. (The gradient norms of
        the metrics need w, too.) Masked tokens get 0 * w; w is finite (`LARGEST_LOG_RATIO`).
    """
    completions, places = batch.select(rows), batch.places(rows)
    keep, factors = masks.keep[places], factors[places]
    ref_logprobs = policy.reference_logprobs(completions) if objective.beta else None
    now = policy.statistics(completions, differentiable_entropy=objective.entropy_coef > 0)
    logprobs = now.logprobs.detach()
    denominator, correction, capped = denominator_and_correction(batch, places, logprobs, objective)
    correction = correction * masks.amplification[places]
    token = bounded_loss(batch, places, logprobs, denominator, objective)
    weight = correction * token.weight
    penalties = -objective.entropy_coef * now.entropy
    if ref_logprobs is not None:
        # Masked tokens get k3 = 0: it may be infinite there, and 0 * infinity is NaN.
        logprobs_kept = now.logprobs.where(keep, ref_logprobs)
        penalties = penalties + objective.beta * k3(logprobs_kept, ref_logprobs)
        done.ref_logprobs[places] = ref_logprobs
    scatter_into(done.statistics, places, now)
    scatter_into(
        (done.weight, done.clipped_low, done.clipped_high, done.capped),
        places,
        (weight, token.clipped_low, token.clipped_high, capped),
    )
    done.loss.add_(masked_sum(factors * (correction * token.loss + penalties.detach()), keep))
    return masked_sum(factors * (penalties - weight * now.logprobs), keep)


def denominator_and_correction(
    batch: MiniBatch, places: Tensor, logprobs: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the ratio's denominator, and the correction for the engine, which
    sampled from another policy: it rounds differently, and with `rollout.max_lag` had an older
    adapter.

    The denominator is the trainer's policy before the step. The correction weighs each token or
    sequence by its probability under that policy over that in the engine, within bounds
    (`sampler_correction`). With `objective.old_logprobs=rollout` the denominator is the engine's,
    and nothing is left to correct.

    Args:
        places: of its tokens in [N].
        logprobs: [n] of the policy now, without gradient.

    Returns:
        Denominator and correction, [n] fp32; and whether the correction met its cap, [n] bool.
    """
    old_logprobs = logprobs if batch.old is None else batch.old.logprobs[places]
    # Tokens that the model did not write were not sampled: for them both are the same.
    rollout_logprobs = batch.rollout_logprobs[places].where(batch.loss_mask[places], old_logprobs)
    denominator, mode = old_logprobs, objective.sampler_correction
    if objective.old_logprobs == "rollout":
        denominator, mode = rollout_logprobs, "off"
    rows, sequences, cap = batch.rows[places], len(batch.completions), objective.sampler_cap
    correction, capped = sampler_correction(
        old_logprobs, rollout_logprobs, rows, sequences, mode, cap
    )
    return denominator, correction, capped


def bounded_loss(
    batch: MiniBatch, places: Tensor, logprobs: Tensor, denominator: Tensor, objective: Objective
) -> TokenLoss:
    """The token loss of the config's method, from the ratio of each token or of its sequence.

    Args:
        places: of its tokens in [N].
        logprobs: [n] of the policy now, without gradient.
        denominator: log-probabilities of the ratio's denominator, [n].
    """
    log_ratio = logprobs - denominator
    if objective.token_loss == "gspo":
        log_ratio = sequence_log_ratio(
            log_ratio, batch.loss_mask[places], batch.rows[places], len(batch.completions)
        )
    return token_loss(
        objective.token_loss,
        logprobs,
        log_ratio,
        batch.advantages[places],
        objective.epsilon,
        objective.epsilon_high,
    )


def clip_gradient(learner: Learner, gradient: Gradient) -> tuple[float, bool]:
    """Sum the gradient over the processes and clip it by its norm.

    Returns:
        The norm before clipping, and whether norm and loss are finite; the same in every process.
    """
    policy = learner.policy
    if learner.accelerator.num_processes > 1:
        sum_gradients(policy)
    largest = learner.config.train.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), largest)
    finite = learner.reduce(gradient.loss + norm).isfinite()
    grad_norm, is_finite = torch.stack([norm, finite]).tolist()
    return grad_norm, bool(is_finite)


def blank_gradient(batch: MiniBatch) -> Gradient:
    """A `Gradient` of zeros, to fill in from micro-batches."""
    number, flag = batch.rollout_logprobs, batch.loss_mask
    return Gradient(
        statistics=blank_statistics(batch),
        weight=torch.zeros_like(number),
        ref_logprobs=torch.zeros_like(number),
        clipped_low=torch.zeros_like(flag),
        clipped_high=torch.zeros_like(flag),
        capped=torch.zeros_like(flag),
        loss=number.new_zeros((), dtype=torch.float64),
    )
