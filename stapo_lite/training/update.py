"""One optimiser update: measure, mask, find factors, gradient, step. This is the method; `loop.py`
is the loop around it.

    sum I c min(rho A, clip(rho) A) / sum I    over the tokens of the mini-batch on all processes

is STAPO's objective, with c the sampler correction; other presets change the mask I, the
denominator, the token's loss or its weight, or add terms (`method/masks.py`, `method/loss.py`).

Each process has a share of the mini-batch, and cuts it into micro-batches. The result depends on
neither cut. Within a micro-batch the host never waits for the device (except once in transformers,
before the first layer). An update waits for thresholds, counts and gradient norm, and in float16
for the loss scale.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stapo_lite.method.loss import blank_outputs, find_factors, join, policy_loss
from stapo_lite.method.masks import find_masks
from stapo_lite.method.metrics import Mean, Ratio, loss_metrics, mask_metrics
from stapo_lite.method.tokens import Tokens
from stapo_lite.model.policy import sum_gradients
from stapo_lite.training.learner import Learner
from stapo_lite.types import LossOutputs, Update


def update(learner: Learner, tokens: Tokens) -> Update:
    """Update the policy once on a mini-batch, of which every process has a share.

    Collective: every rank must call it, even with an empty share.
    """
    objective = learner.settings.objective
    # 1. Measure what the masks look at. The loss does not use these numbers: in the step's first
    #    mini-batch its own pass gives the old policy.
    before = tokens.old
    if before is None or objective.s2t.statistics == "current":
        before = learner.measure(tokens, tokens.decisive)
    # 2. Decide which tokens stay in the loss. Thresholds are found over all processes.
    masks = find_masks(before, tokens, objective, learner.gather)
    # 3. Count these tokens, on all processes too: the denominator must be known before the first
    #    micro-batch's gradient, or a token's weight would depend on how the batch was cut.
    longest = learner.settings.max_completion_length
    factor = find_factors(tokens, masks.keep, objective, longest, learner.reduce)
    if factor is None:  # no process has a kept token with a gradient
        return Update(mask_metrics(tokens, masks))
    # 4. Run the model with a gradient, micro-batch by micro-batch.
    outputs = accumulate_gradient(learner, tokens.with_masks(masks, factor))
    # 5. Clip it, and step. An update that is not finite changes nothing.
    grad_norm, finite = clip_gradient(learner, outputs.loss)
    if not finite:
        learner.skip(grad_norm)
        return Update({}, grad_norm, skipped=True)
    learner.step()
    metrics = mask_metrics(tokens, masks) | loss_metrics(tokens, masks, outputs, objective)
    # The loss is a sum over the P processes. Each part counts as 1 / P updates. Therefore the ratio
    # of the sums is the loss of an update.
    metrics["loss"] = Ratio(outputs.loss, 1 / learner.accelerator.num_processes)
    metrics["grad_norm"] = Mean(grad_norm, 1)
    return Update(metrics, grad_norm, masks=masks, outputs=outputs)


def accumulate_gradient(learner: Learner, tokens: Tokens) -> LossOutputs:
    """Add up the gradient of the mini-batch's loss, micro-batch by micro-batch, in the parameters'
    `grad`.

    Args:
        tokens: with `keep`, `amplification` and `factor`.
    """
    assert tokens.factor is not None
    policy = learner.policy
    objective = learner.settings.objective
    scale = gradient_scale(learner, tokens.factor)

    def work(micro_batches: Iterable[list[int]]) -> LossOutputs:
        # If memory runs out, this begins anew with smaller micro-batches: drop what there is.
        learner.optimizer.zero_grad()
        whole = blank_outputs(tokens)
        for numbers in micro_batches:
            part = tokens.part(numbers)
            reference = None
            if objective.beta:
                reference = policy.reference_logprobs(part.completions)
            current = policy.statistics(
                part.completions, differentiable_entropy=objective.entropy_coef > 0
            )
            outputs = policy_loss(part, current, reference, objective)
            # The graph of this micro-batch is freed here, before the next one is built.
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
    """The number that multiplies the loss in float16 and divides its gradient; 1 in any other
    dtype.

    The smallest float16 is 6e-8, and gradients below it would be lost. The scale is the power of
    two with which the token of the least factor counts about 1/128. Few gradients are lost then,
    and sums over a micro-batch stay below float16's largest number.

    Args:
        factor: [N], from `find_factors`.
    """
    if learner.policy.dtype != torch.float16 or not len(factor):
        return 1.0
    exponent = -round(math.log2(factor.min())) - 7
    # After an update that overflowed, the scale is lower for a while.
    return 2.0 ** (exponent - math.ceil(learner.progress.backoff))


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
    max_norm = learner.settings.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), max_norm)
    # Every process must come to the same decision, and the loss differs between them. Norm and
    # decision come to the host together, so that it waits once.
    finite = learner.reduce(loss + norm).isfinite()
    grad_norm, is_finite = torch.stack([norm, finite]).tolist()
    return grad_norm, bool(is_finite)
