"""One optimiser update: measure, mask, weigh, gradient, step. This is the method; `loop.py` is the
loop around it.

    sum I c min(rho A, clip(rho) A) / sum I    over the tokens of the mini-batch on all processes

is STAPO's objective, with c the sampler correction; other presets change the mask I, the
denominator, the token's loss or its weight, or add terms (`method/masks.py`, `method/loss.py`).

Each process has a share of the mini-batch, and cuts it into micro-batches. The result depends on
neither cut. Within a micro-batch the host never waits for the device (except once in transformers,
before the first layer); an update waits for thresholds, counts and gradient norm.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stapo_lite.method.loss import policy_loss, weigh
from stapo_lite.method.masks import find_masks
from stapo_lite.method.tokens import Tokens, blank_statistics, scatter_into
from stapo_lite.model.policy import sum_gradients
from stapo_lite.training.learner import Learner
from stapo_lite.training.metrics import token_means, update_means
from stapo_lite.types import LossOutputs, Update


def update(learner: Learner, tokens: Tokens) -> Update:
    """Update the policy once on a mini-batch, of which every process has a share.

    Collective: every rank must call it, even with an empty share.
    """
    config, objective = learner.config, learner.config.objective
    # 1. Measure what the masks look at. In the step's first mini-batch, this is also the policy
    #    that the ratios refer to.
    before = tokens.old
    if before is None or objective.s2t.statistics == "current":
        before = learner.measure(tokens, tokens.decisive)
    # 2. Decide which tokens stay in the loss. Thresholds are found over all processes.
    masks = find_masks(before, tokens, objective, learner.gather)
    # 3. Count these tokens, on all processes too: the denominator must be known before the first
    #    micro-batch's gradient, or a token's weight would depend on how the batch was cut.
    longest = config.rollout.max_completion_length
    factor = weigh(tokens, masks.keep, objective, longest, learner.reduce)
    if factor is None:  # nothing to learn from, on no process
        return Update(token_means(tokens, masks))
    # 4. Add up the gradient, micro-batch by micro-batch.
    outputs = accumulate_gradient(learner, tokens.weighed(masks, factor))
    # 5. Clip it, and step. An update that is not finite changes nothing.
    grad_norm, finite = clip_gradient(learner, outputs.loss)
    if not finite:
        learner.skip(grad_norm)
        return Update({}, grad_norm, skipped=True)
    learner.step()
    means = token_means(tokens, masks) | update_means(tokens, masks, outputs, objective)
    # Each process holds a part of one loss. Counting each as 1 / P makes the gathered mean their
    # sum.
    means["loss"] = (outputs.loss, 1 / learner.accelerator.num_processes)
    means["grad_norm"] = (grad_norm, 1)
    return Update(means, grad_norm, masks=masks, outputs=outputs)


def accumulate_gradient(learner: Learner, tokens: Tokens) -> LossOutputs:
    """Add up the gradient of the mini-batch's loss, micro-batch by micro-batch, in the parameters'
    `grad`.

    Args:
        tokens: with `keep`, `amplification` and `factor`.
    """
    assert tokens.factor is not None
    policy, objective = learner.policy, learner.config.objective
    scale = gradient_scale(learner, tokens.factor)

    def work(micro_batches: Iterable[list[int]]) -> LossOutputs:
        learner.optimizer.zero_grad()  # left by a try with too large micro-batches
        whole = blank_outputs(tokens)
        for chosen in micro_batches:
            part = tokens.part(chosen)
            reference = policy.reference_logprobs(part.completions) if objective.beta else None
            now = policy.statistics(
                part.completions, differentiable_entropy=objective.entropy_coef > 0
            )
            outputs = policy_loss(part, now, reference, objective)
            (scale * outputs.surrogate).backward()
            join(whole, part, outputs)
        return whole

    whole = learner.budget.fit(tokens, tokens.trained, work)
    if scale != 1:
        for parameter in policy.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= scale
    return whole


def gradient_scale(learner: Learner, factor: Tensor) -> float:
    """The loss scale for float16, whose smallest number is 6e-8: a power of two that multiplies the
    loss and divides the gradient. The token of the least weight then weighs about 1/128: none
    underflows, and sums over a micro-batch do not overflow. 1 in any other dtype.

    Args:
        factor: [N], from `weigh`.
    """
    if learner.policy.dtype != torch.float16 or not len(factor):
        return 1.0
    least = math.log2(factor.min())
    return 2.0 ** (-round(least) - 7 - math.ceil(learner.progress.backoff))


def clip_gradient(learner: Learner, loss: Tensor) -> tuple[float, bool]:
    """Sum the gradient over the processes and clip it by its norm.

    Args:
        loss: [], this process's part.

    Returns:
        The norm before clipping, and whether norm and loss are finite; the same in every process.
    """
    policy = learner.policy
    if learner.accelerator.num_processes > 1:
        sum_gradients(policy)
    largest = learner.config.train.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), largest)
    finite = learner.reduce(loss + norm).isfinite()
    grad_norm, is_finite = torch.stack([norm, finite]).tolist()
    return grad_norm, bool(is_finite)


def blank_outputs(tokens: Tokens) -> LossOutputs:
    """Outputs of zeros, [N], to join those of micro-batches in."""
    number, flag = tokens.rollout_logprobs, tokens.written
    nothing = number.new_zeros((), dtype=torch.float64)
    return LossOutputs(
        surrogate=nothing,
        loss=nothing.clone(),
        statistics=blank_statistics(tokens),
        weight=torch.zeros_like(number),
        ref_logprobs=torch.zeros_like(number),
        clipped_low=torch.zeros_like(flag),
        clipped_high=torch.zeros_like(flag),
        capped=torch.zeros_like(flag),
    )


def join(whole: LossOutputs, part: Tokens, outputs: LossOutputs) -> None:
    """Copy a micro-batch's outputs to their places in the mini-batch's, and add its loss."""
    assert part.places is not None
    whole.loss.add_(outputs.loss)
    scatter_into(whole.statistics, part.places, outputs.statistics)
    scatter_into(whole[3:], part.places, outputs[3:])
