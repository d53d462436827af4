"""One optimiser update: masks, denominators, gradient, step. This is the method; `loop.py` is the loop.

    J = sum I min(rho A, clip(rho) A) / sum I        over the tokens of the mini-batch on all processes

is STAPO's; the other presets change the mask I, the weights, or add terms. Each process has a share of the mini-batch
as packed [N] tensors (`types.py`), and cuts it into micro-batches; nothing depends on either cut. Nothing here waits
for the device within a micro-batch (transformers does once, before the first layer); an update waits for thresholds,
counts and its gradient's norm.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch, TokenBudget
from stapo_lite.algorithm.objective import (
    Totals,
    clipped_token_loss,
    k3,
    logit_gradient_norm,
    loss_scale,
    sampler_correction,
    segment_sum,
    sequence_weights,
)
from stapo_lite.algorithm.s2t import candidate_mask, linear_quantile, spurious_mask, top_entropy_mask
from stapo_lite.config import S2T, Config, Objective
from stapo_lite.errors import RunError
from stapo_lite.model.policy import Policy, sum_gradients
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.metrics import Tally, Update, gather_values
from stapo_lite.training.token_log import TokenLog
from stapo_lite.types import Completion, TokenStatistics

logger = logging.getLogger(__name__)

MAX_SKIPPED = 5
"""Updates in a row, skipped because loss or gradient is not finite, that end the run."""


@dataclass
class Learner:
    """The policy, its optimiser, and the settings and counts of their updates.

    Attributes:
        objective: that of the config, with the tau_p of this step.
        progress: where the run stands; skipped updates are counted there.
        budget: tokens of a micro-batch; where memory runs out, the pass is repeated with half of them.
        tally: what the step's updates count.
        token_log: notes the candidates; None without `log.audit_tokens`.
        on_tokens: told of the completion tokens that have been through both passes.
    """

    config: Config
    policy: Policy
    optimizer: torch.optim.Optimizer
    budget: TokenBudget
    accelerator: Accelerator
    progress: Progress
    token_log: TokenLog | None = None
    on_tokens: Callable[[int], Any] = lambda tokens: None

    def __post_init__(self) -> None:
        self.begin_step(self.config.train.learning_rate)

    def begin_step(self, learning_rate: float) -> None:
        """Set what is the step's own, and forget what was counted."""
        s2t = self.config.objective.s2t.model_copy(update={"tau_p": self.progress.tau_p})
        self.objective: Objective = self.config.objective.model_copy(update={"s2t": s2t})
        self.tally = Tally(self.policy.device, self.config.reward.functions)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate

    def skip(self, grad_norm: float) -> None:
        """Leave an update out.

        Raises:
            RunError: too many in a row.
        """
        self.optimizer.zero_grad()
        if self.accelerator.is_main_process:
            logger.warning("update skipped: loss or gradient is not finite (norm %g)", grad_norm)
        self.progress.skipped_in_a_row += 1
        self.progress.backoff += 4
        if self.progress.skipped_in_a_row >= MAX_SKIPPED:
            raise RunError(
                f"{self.progress.skipped_in_a_row} updates in a row had a loss or gradient that is not finite: "
                "lower train.learning_rate or choose another dtype, delete the newest "
                "checkpoints, and use --resume --force"
            )


class Masks(NamedTuple):
    """Which tokens of a mini-batch stay in the loss, and what that was decided by."""

    keep: Tensor
    """[N] bool: the token stays in the loss and its denominator."""
    silenced: Tensor
    """[N] bool: S2T takes it out."""
    statistics: TokenStatistics
    """[N], of the tokens that the masks depend on."""
    tau_h: float | None
    """None where its population is empty, or without S2T."""


class Weights(NamedTuple):
    """The factor of each token: the mini-batch's loss is the plain sum of factor times token loss."""

    factors: Tensor
    """[N] fp32"""
    scale: float
    """Factor of the whole loss in float16, which the gradient is divided by at the end; else 1."""


class Gradient(NamedTuple):
    """Values computed together with the gradient; 0 for tokens that were in no micro-batch."""

    statistics: TokenStatistics
    """[N], of the policy that the gradient is of."""
    ref_logprobs: Tensor
    """[N] fp32"""
    loss: Tensor
    """[] float64, this process's part."""


def update(learner: Learner, batch: MiniBatch) -> Update | None:
    """Update the policy once on a mini-batch, of which every process has a share.

    Returns:
        None, with nothing changed, where no token that is kept has a gradient.
    """
    masks = find_masks(learner, batch)
    weights = weigh_tokens(learner, batch, masks)
    if weights is None:
        count_tokens(learner, batch, masks)
        return None
    gradient = accumulate_gradient(learner, batch, masks, weights)
    return clip_and_step(learner, batch, masks, gradient)


def find_masks(learner: Learner, batch: MiniBatch) -> Masks:
    """Find the keep-mask of this process's share before any gradient; thresholds are those of the whole mini-batch.

    I = 0 for S2T's spurious tokens, and for those below 20-Entropy's quantile. Every process takes part, with whatever
    it has.
    """
    objective, s2t, accelerator = learner.objective, learner.objective.s2t, learner.accelerator
    statistics = mask_statistics(learner, batch)
    logprobs, entropy = statistics.logprobs, statistics.entropy
    silenced, tau_h = torch.zeros_like(batch.loss_mask), None
    if s2t.enabled:
        candidates = batch.loss_mask & candidate_mask(logprobs, batch.advantages, s2t.tau_p)
        population = candidates if s2t.population == "candidates" else batch.loss_mask
        tau_h = threshold(entropy, population, s2t.quantile, accelerator)
        score = entropy
        if s2t.silence == "high-entropy":
            score = -entropy
        elif s2t.silence == "random":
            score = batch.random_scores([completion.adapter_version for completion in batch.completions])
        below = tau_h if score is entropy else threshold(score, population, s2t.quantile, accelerator)
        silenced = candidates if s2t.silence == "all" else spurious_mask(candidates, score, below)
    keep = batch.loss_mask & ~silenced
    if objective.top_entropy_quantile < 1:
        lowest = threshold(entropy, batch.loss_mask, 1 - objective.top_entropy_quantile, accelerator)
        keep &= top_entropy_mask(entropy, lowest)
    return Masks(keep, silenced, statistics, tau_h)


def mask_statistics(learner: Learner, batch: MiniBatch) -> TokenStatistics:
    """Statistics that the masks are made of, [N]: those from before the step's first update, or of the policy now,
    which takes a forward pass through the completions that the masks depend on."""
    if batch.old is not None and learner.objective.s2t.statistics == "old":
        return batch.old
    rows = mask_inputs(batch.completions, learner.objective)
    return measure(learner.policy, batch, rows, learner.budget)


def weigh_tokens(learner: Learner, batch: MiniBatch, masks: Masks) -> Weights | None:
    """Find the one denominator, of the mini-batch on all processes, before the first gradient: a micro-batch that
    divided by its own count would weigh its tokens by how the batch happened to be cut.

    Returns:
        None where no token that is kept has a gradient.
    """
    objective, longest = learner.objective, learner.config.rollout.max_completion_length
    counts = segment_sum(masks.keep if objective.renormalize else batch.loss_mask, batch.rows, len(batch.completions))
    places = batch.tokens(with_gradient(batch.completions, objective))
    numbers = [counts.sum(), (counts > 0).sum(), counts.new_full((), len(counts)), masks.keep[places].sum()]
    tokens, counted_sequences, sequences, with_a_gradient = (
        int(count) for count in learner.accelerator.reduce(torch.stack(numbers), "sum").tolist()
    )
    if not with_a_gradient:
        return None
    totals = Totals(tokens, counted_sequences, sequences)
    weights = sequence_weights(counts, totals, objective.aggregation, longest)
    scale = 1.0
    if learner.policy.dtype == torch.float16:
        scale = loss_scale(totals, objective.aggregation, longest) / 2.0 ** math.ceil(learner.progress.backoff)
    return Weights(weights[batch.rows], scale)


def accumulate_gradient(learner: Learner, batch: MiniBatch, masks: Masks, weights: Weights) -> Gradient:
    """Add up the gradient of the mini-batch's loss, micro-batch by micro-batch, in the parameters' `grad`."""

    def run(micro_batches: list[list[int]]) -> Gradient:
        learner.optimizer.zero_grad()  # what was begun with too large micro-batches
        if learner.token_log is not None:
            learner.token_log.begin(batch)
        blank = torch.zeros_like(batch.rollout_logprobs)
        done = Gradient(blank_statistics(batch), blank, blank.new_zeros((), dtype=torch.float64))
        for rows in micro_batches:
            add_gradient(learner, batch, rows, masks, weights, done)
        return done

    done = learner.budget.fit(batch, with_gradient(batch.completions, learner.objective), run)
    if weights.scale != 1:
        for parameter in learner.policy.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= weights.scale
    return done


def add_gradient(
    learner: Learner, batch: MiniBatch, rows: list[int], masks: Masks, weights: Weights, done: Gradient
) -> None:
    """Run a micro-batch through both passes, with its part of the loss as a sum:

    sum over kept tokens of  weight * (correction * clipped loss + beta * k3 - entropy_coef * H)
    """
    objective, policy = learner.objective, learner.policy
    completions, tokens = batch.select(rows), batch.tokens(rows)
    keep, advantages = masks.keep[tokens], batch.advantages[tokens]
    ref_logprobs = policy.reference_logprobs(completions) if objective.beta else None
    hidden = policy.hidden_states(completions)
    now = policy.score(completions, hidden, differentiable_entropy=objective.entropy_coef > 0)
    put(done.statistics, tokens, now)
    if learner.token_log is not None:
        judged = deciding(batch, tokens, masks, now, objective.s2t)
        candidates = candidate_mask(judged.logprobs, advantages, objective.s2t.tau_p)
        learner.token_log.see(tokens, hidden.detach(), candidates & batch.loss_mask[tokens])
    del hidden  # not needed for the backward pass
    old_logprobs, correction, _ = ratio_denominator(batch, tokens, now.logprobs.detach(), objective)
    # A masked token's ratio may be infinite, and its gradient 0 times that, which is not 0: it gets a ratio of 1.
    logprobs = now.logprobs.where(keep, old_logprobs)
    token = clipped_token_loss(logprobs, old_logprobs, advantages, objective.epsilon, objective.epsilon_high)
    loss = correction * token.loss - objective.entropy_coef * now.entropy
    if ref_logprobs is not None:
        loss = loss + objective.beta * k3(logprobs, ref_logprobs.where(keep, old_logprobs))
        done.ref_logprobs[tokens] = ref_logprobs
    loss = (weights.factors[tokens] * loss).where(keep, 0.0).sum(dtype=torch.float64)
    (weights.scale * loss).backward()
    done.loss.add_(loss.detach())
    learner.on_tokens(len(tokens))


def clip_and_step(learner: Learner, batch: MiniBatch, masks: Masks, gradient: Gradient) -> Update:
    """Clip the gradient of all processes by its norm and take one step, the same everywhere; count what it was."""
    policy, accelerator = learner.policy, learner.accelerator
    if accelerator.num_processes > 1:
        sum_gradients(policy)
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), learner.config.train.max_grad_norm)
    sound, grad_norm = torch.stack([accelerator.reduce(gradient.loss + norm, "sum").isfinite(), norm]).tolist()
    if not sound:
        learner.skip(grad_norm)
        return Update(grad_norm, skipped=True)
    learner.progress.skipped_in_a_row = 0
    learner.progress.backoff = max(0.0, learner.progress.backoff - 1 / 64)
    count_tokens(learner, batch, masks)
    tau_h = count_gradient(learner, batch, masks, gradient)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    return Update(grad_norm, tau_h)


def count_tokens(learner: Learner, batch: MiniBatch, masks: Masks) -> None:
    """Count the tokens of a mini-batch, whether or not they have a gradient."""
    learner.tally.add(batch_tokens=batch.loss_mask.sum(), kept=masks.keep.sum(), silenced=masks.silenced.sum())


def count_gradient(learner: Learner, batch: MiniBatch, masks: Masks, gradient: Gradient) -> float | None:
    """Count what tokens with an advantage are and do to the gradient, silenced ones included (docs/metrics.md).

    Returns:
        tau_h.
    """
    objective, s2t, tally = learner.objective, learner.objective.s2t, learner.tally
    active = batch.loss_mask & (batch.advantages != 0)
    trains = active & masks.keep
    logprobs, entropy, collision = gradient.statistics
    old_logprobs, correction, capped = ratio_denominator(batch, slice(None), logprobs, objective)
    token = clipped_token_loss(logprobs, old_logprobs, batch.advantages, objective.epsilon, objective.epsilon_high)
    norm = logit_gradient_norm(correction * token.gradient, logprobs, collision)
    tally.add(loss=gradient.loss, active_tokens=active.sum(), trained_tokens=trains.sum())
    tally.add(entropy=total(entropy, active), collision=total(collision, active), capped=(capped & active).sum())
    tally.add(logit_grad_norm=total(norm, trains), gradient_mass=total(norm, active))
    tally.add(clipped_low=(token.clipped_low & trains).sum(), clipped_high=(token.clipped_high & trains).sum())
    tally.entropies.append(entropy[active])
    if objective.beta:
        kl = k3(logprobs, gradient.ref_logprobs)
        tally.add(kl=total(kl, masks.keep), kl_tokens=masks.keep.sum())
    if batch.old is None or objective.old_logprobs == "trainer":
        trainer_logprobs = logprobs if batch.old is None else batch.old.logprobs
        gap = (trainer_logprobs - batch.rollout_logprobs).abs()
        tally.add(gap=total(gap, active), gap_tokens=active.sum())
        tally.add(gap_k3=total(k3(batch.rollout_logprobs, trainer_logprobs), active))
        tally.raise_to(gap_max=gap.where(active, -torch.inf))

    # Candidates and spurious tokens are counted where S2T is off, too.
    judged = deciding(batch, slice(None), masks, gradient.statistics, s2t)
    candidates = active & candidate_mask(judged.logprobs, batch.advantages, s2t.tau_p)
    tau_h = masks.tau_h
    if not s2t.enabled:
        population = candidates if s2t.population == "candidates" else active
        tau_h = threshold(judged.entropy, population, s2t.quantile, learner.accelerator)
    spurious = spurious_mask(candidates, judged.entropy, tau_h)
    # The same test for incorrect responses (A < 0), whose tokens are never silenced for it, and its mirror case, their
    # tokens that were almost certain.
    rare = active & candidate_mask(judged.logprobs, -batch.advantages, s2t.tau_p)
    rare = spurious_mask(rare, judged.entropy, tau_h)
    sure = active & (batch.advantages < 0) & (-torch.expm1(judged.logprobs) < s2t.tau_p)
    tally.add(candidate=candidates.sum(), spurious=spurious.sum(), spurious_mass=total(norm, spurious))
    tally.add(negative_rare=rare.sum(), negative_rare_mass=total(norm, rare))
    tally.add(negative_sure=sure.sum(), negative_sure_mass=total(norm, sure))
    if learner.token_log is not None:
        learner.token_log.note(judged, norm, masks.keep, spurious, s2t.tau_p, tau_h)
    return tau_h


@torch.no_grad()
def measure(policy: Policy, batch: MiniBatch, rows: Sequence[int], budget: TokenBudget) -> TokenStatistics:
    """Statistics of the current policy, [N]; 0 for the tokens of completions that are not among the rows."""
    statistics = blank_statistics(batch)

    def run(micro_batches: list[list[int]]) -> None:
        for part in micro_batches:
            put(statistics, batch.tokens(part), policy.statistics(batch.select(part)))

    budget.fit(batch, rows, run)
    return statistics


def blank_statistics(batch: MiniBatch) -> TokenStatistics:
    """Statistics to put those of micro-batches into, [N] zeros."""
    return TokenStatistics(*torch.zeros(3, len(batch.rows), device=batch.rows.device))


def put(statistics: TokenStatistics, tokens: Tensor, values: TokenStatistics) -> None:
    """Copy a micro-batch's [n] statistics to their places in [N]."""
    for whole, part in zip(statistics, values, strict=True):
        whole[tokens] = part.detach()


def ratio_denominator(
    batch: MiniBatch, tokens: Tensor | slice, logprobs: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the ratio's denominator, and the correction for its not being the policy that sampled: the
    engine rounds differently, and with `rollout.max_lag` had an older adapter.

    The denominator is the trainer's policy before the step. The correction weighs each token, or sequence, by its
    probability there over that in the engine, up to a cap (truncated importance sampling). With
    `objective.old_logprobs=rollout` the denominator is the engine's, and nothing is left to correct.

    Args:
        tokens: places in [N].
        logprobs: [n] of the policy now, without gradient.

    Returns:
        Denominator and correction, [n] fp32; where the correction met its cap, [n] bool.
    """
    old_logprobs = logprobs if batch.old is None else batch.old.logprobs[tokens]
    # Tokens that the model did not write were not sampled: there both take the same value.
    rollout_logprobs = batch.rollout_logprobs[tokens].where(batch.loss_mask[tokens], old_logprobs)
    by_rollout = objective.old_logprobs == "rollout"
    denominator, mode = (rollout_logprobs, "off") if by_rollout else (old_logprobs, objective.sampler_correction)
    rows, sequences, cap = batch.rows[tokens], len(batch.completions), objective.sampler_cap
    return denominator, *sampler_correction(denominator, rollout_logprobs, rows, sequences, mode, cap)


def deciding(batch: MiniBatch, tokens: Tensor | slice, masks: Masks, now: TokenStatistics, s2t: S2T) -> TokenStatistics:
    """Statistics that say which tokens are candidates and spurious: the mask's own for A > 0, those of now for the
    rest, and for all where S2T is off. Each [n]."""
    by_mask = (batch.advantages[tokens] > 0) & s2t.enabled
    pairs = zip(masks.statistics, now, strict=True)
    return TokenStatistics(*(torch.where(by_mask, mask[tokens], value.detach()) for mask, value in pairs))


def with_gradient(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows that add to the gradient; one of zero advantage does only if there is a KL or entropy term."""
    every = objective.beta > 0 or objective.entropy_coef > 0
    return [row for row, completion in enumerate(completions) if every or completion.advantage != 0]


def old_inputs(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows for which a later update needs the statistics from before the step's first update."""
    ratios = with_gradient(completions, objective) if objective.old_logprobs == "trainer" else []
    masks = mask_inputs(completions, objective) if objective.s2t.statistics == "old" else []
    return list(dict.fromkeys(ratios + masks))


def mask_inputs(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows whose statistics the masks depend on."""
    s2t = objective.s2t
    every = objective.top_entropy_quantile < 1 or (s2t.enabled and s2t.population == "all")
    return [row for row, completion in enumerate(completions) if every or (s2t.enabled and completion.advantage > 0)]


def threshold(score: Tensor, population: Tensor, quantile: float, accelerator: Accelerator) -> float | None:
    """The quantile of a score over a population of tokens on all processes; tau_h, where the score is the entropy.

    It is one number for the whole mini-batch, so the scores are gathered, not the quantiles: the mean of the processes'
    own would depend on who got which completions.
    """
    return linear_quantile(gather_values(score[population], accelerator), quantile)


def total(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over a mask, [] float64; `values[mask]` would wait for the device."""
    return values.where(mask, 0.0).sum(dtype=torch.float64)
