"""One optimiser update: masks, denominators, gradient, step. This is the method; `loop.py` is the
loop.

    J = sum I min(rho A, clip(rho) A) / sum I    over the tokens of the mini-batch on all processes

is STAPO's; the other presets change the mask I, the weights, or add terms. Each process has a share
of the mini-batch as packed [N] tensors (`types.py`), and cuts it into micro-batches; the result
depends on neither cut. Within a micro-batch the host never waits for the device (except once in
transformers, before the first layer); an update waits for thresholds, counts and gradient norm.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch, pack
from stapo_lite.algorithm.objective import (
    TokenLoss,
    Totals,
    k3,
    logit_gradient_norm,
    loss_scale,
    sampler_correction,
    segment_sum,
    sequence_log_ratio,
    sequence_weights,
    token_loss,
)
from stapo_lite.algorithm.s2t import (
    candidate_mask,
    linear_quantile,
    spurious_mask,
    top_entropy_mask,
)
from stapo_lite.algorithm.stare import highest_of_lowest
from stapo_lite.config import S2T, Config, Objective, Stare
from stapo_lite.errors import RunError
from stapo_lite.model.loading import default_stream
from stapo_lite.model.policy import Policy, sum_gradients
from stapo_lite.training.budget import TokenBudget
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.metrics import count_gradient, count_tokens, gather_values, masked_sum
from stapo_lite.types import (
    Completion,
    Gradient,
    Masks,
    Prompt,
    TokenDetails,
    TokenStatistics,
    Update,
)

logger = logging.getLogger(__name__)

Collective = Callable[[Tensor], Tensor]
"""`gather` concatenates 1-D tensors of any length from all processes; `reduce` sums tensors over
all processes. Every rank must call them, even with an empty share."""
MAX_SKIPPED = 5
"""The run ends after this many consecutive updates with a non-finite loss or gradient."""


@dataclass
class Learner:
    """The policy, its optimiser, and where their updates stand.

    Attributes:
        progress: of the run; skipped updates are counted there.
        budget: tokens of a micro-batch; if memory runs out, the pass is repeated with half of them.
    """

    config: Config
    policy: Policy
    optimizer: torch.optim.Optimizer
    budget: TokenBudget
    accelerator: Accelerator
    progress: Progress

    def __post_init__(self) -> None:
        self.gather: Collective = partial(gather_values, accelerator=self.accelerator)
        self.reduce: Collective = partial(self.accelerator.reduce, reduction="sum")

    @property
    def objective(self) -> Objective:
        """The config's objective, with this step's tau_p."""
        s2t = self.config.objective.s2t.model_copy(update={"tau_p": self.progress.tau_p})
        return self.config.objective.model_copy(update={"s2t": s2t})

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the updates to come."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate

    def remember(self, entropies: Tensor) -> None:
        """Note the entropies of a mini-batch's candidates for S2T's `window`."""
        if window := self.config.objective.s2t.window:
            recent = [entropies.tolist(), *self.progress.recent]
            self.progress.recent = recent[:window]

    def step(self) -> None:
        """Take the optimiser's step."""
        self.progress.skipped_in_a_row = 0
        self.progress.backoff = max(0.0, self.progress.backoff - 1 / 64)
        eight_bits = self.config.train.optim == "paged_adamw_8bit"
        # bitsandbytes' kernels run in the default stream, whichever one the gradient is made in.
        with default_stream(self.policy.device) if eight_bits else nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self, grad_norm: float) -> None:
        """Drop the gradient, count the skipped update and lower float16's loss scale.

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
                f"{self.progress.skipped_in_a_row} updates in a row had a loss or gradient that is "
                "not finite: lower train.learning_rate or choose another dtype, delete the newest "
                "checkpoints, and use --resume --force"
            )


class Weights(NamedTuple):
    """What makes the mini-batch's loss the plain sum of factor times token loss."""

    factors: Tensor
    """[N] fp32"""
    totals: Totals


def update(learner: Learner, batch: MiniBatch) -> Update:
    """Update the policy once on a mini-batch, of which every process has a share.

    Collective: every rank must call it, even with an empty share.
    """
    objective, config = learner.objective, learner.config
    statistics, recent = mask_statistics(learner, batch), learner.progress.recent
    masks = find_masks(statistics, batch, objective, learner.gather, recent)
    learner.remember(masks.population)
    sums = count_tokens(batch, masks)
    longest = config.rollout.max_completion_length
    weights = weigh_tokens(masks, batch, objective, longest, learner.reduce)
    if weights is None:
        return Update(grad_norm=None, tau_h=None, sums=sums)
    gradient = accumulate_gradient(learner, batch, masks, weights)
    grad_norm, finite = clip_gradient(learner, gradient)
    if not finite:
        learner.skip(grad_norm)
        return Update(grad_norm, tau_h=None, sums={}, skipped=True)
    tau_h = masks.tau_h
    judged = statistics_behind_masks(batch, masks, gradient.statistics, objective.s2t)
    if not objective.s2t.enabled:  # what it would have silenced is counted all the same
        tau_h = entropy_threshold(judged, batch, objective.s2t, learner.gather)
    tokens = describe_tokens(batch, masks, gradient, judged, tau_h, objective.s2t)
    sums |= count_gradient(batch, gradient, tokens, tau_h, objective)
    learner.step()
    return Update(grad_norm, tau_h, sums, tokens)


def mask_statistics(learner: Learner, batch: MiniBatch) -> TokenStatistics:
    """Statistics that the masks are computed from, [N]: those from before the step's first update,
    or the current policy's, which take a forward pass over the completions in `mask_inputs`."""
    if batch.old is not None and learner.objective.s2t.statistics == "old":
        return batch.old
    rows = mask_inputs(batch.completions, learner.objective)
    return measure(learner.policy, batch, rows, learner.budget)


def find_masks(
    statistics: TokenStatistics,
    batch: MiniBatch,
    objective: Objective,
    gather: Collective,
    recent: Sequence[Sequence[float]] = (),
) -> Masks:
    """Find the keep-mask of this process's share, with the thresholds of the whole mini-batch.

    I = 0 for S2T's spurious tokens, and for those below 20-Entropy's quantile. STARE's weights come
    from the same statistics.

    Args:
        recent: candidates' entropies from earlier mini-batches, which also count for tau_h.
    """
    s2t, entropy = objective.s2t, statistics.entropy
    silenced, tau_h, entropies = torch.zeros_like(batch.loss_mask), None, entropy[:0]
    if s2t.enabled:
        candidates = batch.loss_mask & candidate_mask(
            statistics.logprobs, batch.advantages, s2t.tau_p
        )
        population = candidates if s2t.population == "candidates" else batch.loss_mask
        entropies = collect(entropy, population, gather)
        counted = entropies
        if recent:
            earlier = entropies.new_tensor(list(itertools.chain(*recent)))
            counted = torch.cat([entropies, earlier])
        tau_h = linear_quantile(counted, s2t.quantile)
        if s2t.silence == "low-entropy":
            silenced = spurious_mask(candidates, entropy, tau_h)
        elif s2t.silence == "all":
            silenced = candidates
        else:
            score = ablation_score(entropy, batch, s2t)
            below = linear_quantile(collect(score, population, gather), s2t.quantile)
            silenced = spurious_mask(candidates, score, below)
    keep = batch.loss_mask & ~silenced
    if objective.top_entropy_quantile < 1:
        every = collect(entropy, batch.loss_mask, gather)
        lowest = linear_quantile(every, 1 - objective.top_entropy_quantile)
        keep &= top_entropy_mask(entropy, lowest)
    amplification = torch.ones_like(batch.advantages)
    if objective.stare.enabled:
        amplification = amplify(statistics, batch, objective.stare, gather)
    return Masks(keep, silenced, amplification, statistics, tau_h, entropies)


def amplify(
    statistics: TokenStatistics, batch: MiniBatch, stare: Stare, gather: Collective
) -> Tensor:
    """STARE's omega, [N] fp32."""
    amplification, logprobs = torch.ones_like(batch.advantages), statistics.logprobs
    entropies = collect(statistics.entropy, batch.loss_mask, gather).double()
    if entropies.mean() < stare.target_entropy:
        for sign, weight in ((1, stare.weight), (-1, stare.negative_weight)):
            population = batch.loss_mask & (sign * batch.advantages > 0)
            most = highest_of_lowest(collect(logprobs, population, gather), stare.share)
            amplification.masked_fill_(population & (logprobs <= most), weight)
    return amplification


def ablation_score(entropy: Tensor, batch: MiniBatch, s2t: S2T) -> Tensor:
    """The score that replaces the entropy in the paper's ablations, [N] fp32."""
    if s2t.silence == "high-entropy":
        return -entropy
    return batch.random_scores([completion.adapter_version for completion in batch.completions])


def collect(score: Tensor, population: Tensor, gather: Collective) -> Tensor:
    """The scores of a population of tokens on all processes, [M].

    Scores are gathered rather than thresholds: a mean of per-process thresholds would depend on
    which process got which completions.
    """
    return gather(score[population])


def weigh_tokens(
    masks: Masks, batch: MiniBatch, objective: Objective, longest: int, reduce: Collective
) -> Weights | None:
    """Find the denominator, over the mini-batch on all processes, before the first gradient: if
    micro-batches divided by their own counts, a token's weight would depend on the cut.

    Args:
        longest: `rollout.max_completion_length`, Dr. GRPO's constant.

    Returns:
        None if no kept token has a gradient.
    """
    counted = masks.keep if objective.renormalize else batch.loss_mask
    counts = segment_sum(counted, batch.rows, len(batch.completions))
    places = batch.tokens(with_gradient(batch.completions, objective))
    sequences = counts.new_full((), len(counts))
    numbers = [counts.sum(), (counts > 0).sum(), sequences, masks.keep[places].sum()]
    *totals, with_a_gradient = map(int, reduce(torch.stack(numbers)).tolist())
    if not with_a_gradient:
        return None
    per_sequence = sequence_weights(counts, Totals(*totals), objective.aggregation, longest)
    return Weights(per_sequence[batch.rows], Totals(*totals))


def accumulate_gradient(
    learner: Learner, batch: MiniBatch, masks: Masks, weights: Weights
) -> Gradient:
    """Add up the gradient of the mini-batch's loss, micro-batch by micro-batch, in the parameters'
    `grad`."""
    objective, scale = learner.objective, gradient_scale(learner, weights.totals)

    def run(micro_batches: list[list[int]]) -> Gradient:
        learner.optimizer.zero_grad()  # left by a try with too large micro-batches
        done = blank_gradient(batch)
        for rows in micro_batches:
            loss = add_micro_batch(learner.policy, batch, rows, masks, weights, objective, done)
            (scale * loss).backward()
        return done

    done = learner.budget.fit(batch, with_gradient(batch.completions, objective), run)
    if scale != 1:
        for parameter in learner.policy.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= scale
    return done


def rehearse(learner: Learner) -> None:
    """Run the largest possible micro-batch forward and backward, without an optimiser step: if
    memory runs out, it does so, and halves the budget, before the first rollouts.

    Collective: every rank must call it.
    """
    config, policy = learner.config, learner.policy
    tokens, longest = learner.budget.tokens, config.max_sequence_length
    rows = math.ceil(tokens / longest)
    row = longest if rows == 1 else tokens // rows
    prompt = Prompt("", [0] * min(config.data.max_prompt_length, row - 1), None)
    length = row - len(prompt.token_ids)
    completion = Completion(prompt, [0] * length, [0.0] * length, True, 0, advantage=1.0)
    batch = pack([completion] * rows, policy.device)
    every, ones = batch.loss_mask, torch.ones_like(batch.advantages)
    masks = Masks(every, ~every, ones, blank_statistics(batch), tau_h=None, population=ones[:0])
    weights = weigh_tokens(masks, batch, learner.objective, length, learner.reduce)
    assert weights is not None
    states = []  # stand-ins for the optimiser's, which its first step allocates
    if not learner.optimizer.state and config.train.optim == "adamw":
        states = [torch.empty_like(p) for p in policy.parameters.values() for _ in range(2)]
    accumulate_gradient(learner, batch, masks, weights)
    learner.optimizer.zero_grad()
    del states


def gradient_scale(learner: Learner, totals: Totals) -> float:
    """The loss scale in float16, a power of two; 1 in any other dtype."""
    if learner.policy.dtype != torch.float16:
        return 1.0
    longest = learner.config.rollout.max_completion_length
    scale = loss_scale(totals, learner.objective.aggregation, longest)
    return scale / 2.0 ** math.ceil(learner.progress.backoff)


def add_micro_batch(
    policy: Policy,
    batch: MiniBatch,
    rows: list[int],
    masks: Masks,
    weights: Weights,
    objective: Objective,
    done: Gradient,
) -> Tensor:
    """Run a micro-batch's forward pass and record its values in `done`. Its part of the loss is

    sum over kept tokens of  factor * (correction * token loss + beta * k3 - entropy_coef * H)

    Returns:
        [] float64, a surrogate with the gradient of that loss: -w log pi replaces the token loss.
        Its derivative is the same, and 0 for a masked token even if w is infinite.
    """
    completions, tokens = batch.select(rows), batch.tokens(rows)
    keep, factors = masks.keep[tokens], weights.factors[tokens]
    ref_logprobs = policy.reference_logprobs(completions) if objective.beta else None
    hidden = policy.hidden_states(completions)
    now = policy.score(completions, hidden, differentiable_entropy=objective.entropy_coef > 0)
    logprobs = now.logprobs.detach()
    old_logprobs, correction, capped = ratio_denominator(batch, tokens, logprobs, objective)
    correction = correction * masks.amplification[tokens]
    token = bounded_loss(batch, tokens, logprobs, old_logprobs, objective)
    weight = correction * token.gradient
    others = -objective.entropy_coef * now.entropy
    if ref_logprobs is not None:
        others = others + objective.beta * k3(now.logprobs.where(keep, ref_logprobs), ref_logprobs)
        done.ref_logprobs[tokens] = ref_logprobs
    scatter_into(done.statistics, tokens, now)
    scatter_into(
        (done.weight, done.clipped_low, done.clipped_high, done.capped),
        tokens,
        (weight, token.clipped_low, token.clipped_high, capped),
    )
    done.loss.add_(masked_sum(factors * (correction * token.loss + others.detach()), keep))
    return masked_sum(factors * (others - weight.where(keep, 0.0) * now.logprobs), keep)


def bounded_loss(
    batch: MiniBatch,
    tokens: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    objective: Objective,
) -> TokenLoss:
    """The token loss of the config's method, from the ratio of each token or of its sequence.

    Args:
        tokens: places in [N].
        logprobs: [n] of the policy now, without gradient.
        old_logprobs: [n], of the ratio's denominator.
    """
    log_ratio = logprobs - old_logprobs
    if objective.token_loss == "gspo":
        log_ratio = sequence_log_ratio(
            log_ratio, batch.loss_mask[tokens], batch.rows[tokens], len(batch.completions)
        )
    return token_loss(
        objective.token_loss,
        logprobs,
        log_ratio,
        batch.advantages[tokens],
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


def statistics_behind_masks(
    batch: MiniBatch, masks: Masks, now: TokenStatistics, s2t: S2T
) -> TokenStatistics:
    """Statistics that decide which tokens are candidates and spurious, [N]: the mask's own for
    A > 0, the current policy's for the rest, or for all if S2T is off."""
    by_mask = (batch.advantages > 0) & s2t.enabled
    pairs = zip(masks.statistics, now, strict=True)
    return TokenStatistics(*(torch.where(by_mask, mask, value) for mask, value in pairs))


def entropy_threshold(
    judged: TokenStatistics, batch: MiniBatch, s2t: S2T, gather: Collective
) -> float | None:
    """The tau_h that S2T would use if it were on, taken over the tokens with an advantage."""
    population = batch.loss_mask & (batch.advantages != 0)
    if s2t.population == "candidates":
        population &= candidate_mask(judged.logprobs, batch.advantages, s2t.tau_p)
    return linear_quantile(collect(judged.entropy, population, gather), s2t.quantile)


def describe_tokens(
    batch: MiniBatch,
    masks: Masks,
    gradient: Gradient,
    judged: TokenStatistics,
    tau_h: float | None,
    s2t: S2T,
) -> TokenDetails:
    """Tell what an update made of each token."""
    norm = logit_gradient_norm(
        gradient.weight, gradient.statistics.logprobs, gradient.statistics.collision
    )
    candidate = candidate_mask(judged.logprobs, batch.advantages, s2t.tau_p) & batch.loss_mask
    spurious = spurious_mask(candidate, judged.entropy, tau_h)
    return TokenDetails(judged, norm, masks.keep, candidate, spurious)


@torch.no_grad()
def measure(
    policy: Policy, batch: MiniBatch, rows: Sequence[int], budget: TokenBudget
) -> TokenStatistics:
    """Statistics of the current policy, [N]; 0 for the tokens of completions that are not among the
    rows."""
    statistics = blank_statistics(batch)

    def run(micro_batches: list[list[int]]) -> None:
        for part in micro_batches:
            scatter_into(statistics, batch.tokens(part), policy.statistics(batch.select(part)))

    budget.fit(batch, rows, run)
    return statistics


def blank_statistics(batch: MiniBatch) -> TokenStatistics:
    """Statistics of zeros, [N], to fill in from micro-batches."""
    return TokenStatistics(*torch.zeros(3, len(batch.rows), device=batch.rows.device))


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


def scatter_into(whole: Sequence[Tensor], tokens: Tensor, part: Sequence[Tensor]) -> None:
    """Copy a micro-batch's [n] tensors to their places in the [N] ones."""
    for target, values in zip(whole, part, strict=True):
        target[tokens] = values.detach()


def ratio_denominator(
    batch: MiniBatch, tokens: Tensor, logprobs: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the ratio's denominator, and the correction for the engine, which
    sampled from another policy: it rounds differently, and with `rollout.max_lag` had an older
    adapter.

    The denominator is the trainer's policy before the step. The correction weighs each token or
    sequence by its probability under that policy over that in the engine, within bounds
    (`sampler_correction`). With `objective.old_logprobs=rollout` the denominator is the engine's,
    and nothing is left to correct.

    Args:
        tokens: places in [N].
        logprobs: [n] of the policy now, without gradient.

    Returns:
        Denominator and correction, [n] fp32; and whether the correction met its cap, [n] bool.
    """
    old_logprobs = logprobs if batch.old is None else batch.old.logprobs[tokens]
    # Tokens that the model did not write were not sampled: for them both are the same.
    rollout_logprobs = batch.rollout_logprobs[tokens].where(batch.loss_mask[tokens], old_logprobs)
    denominator, mode = old_logprobs, objective.sampler_correction
    if objective.old_logprobs == "rollout":
        denominator, mode = rollout_logprobs, "off"
    rows, sequences, cap = batch.rows[tokens], len(batch.completions), objective.sampler_cap
    correction, capped = sampler_correction(
        denominator, rollout_logprobs, rows, sequences, mode, cap
    )
    return denominator, correction, capped


def with_gradient(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows that contribute to the gradient; those with zero advantage only if there is a KL or
    entropy term, or a teacher."""
    every = objective.beta > 0 or objective.entropy_coef > 0 or objective.distills
    return [row for row, completion in enumerate(completions) if every or completion.advantage != 0]


def old_inputs(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows for which a later update needs the statistics from before the step's first update."""
    needed: set[int] = set()
    if objective.old_logprobs == "trainer":
        needed.update(with_gradient(completions, objective))
    if objective.s2t.statistics == "old":
        needed.update(mask_inputs(completions, objective))
    return sorted(needed)


def mask_inputs(completions: Sequence[Completion], objective: Objective) -> list[int]:
    """Rows whose statistics the masks depend on."""
    s2t, rows = objective.s2t, range(len(completions))
    every = objective.top_entropy_quantile < 1 or objective.stare.enabled
    if every or (s2t.enabled and (s2t.population == "all" or objective.distills)):
        return list(rows)
    return [row for row in rows if s2t.enabled and completions[row].advantage > 0]
