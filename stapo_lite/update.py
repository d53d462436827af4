"""One optimiser update: keep-mask, denominators, micro-batches, step. This is the method; `train.py` is the loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from stapo_lite.batching import collate, pad_rows, split_by_tokens
from stapo_lite.config import S2T, Objective
from stapo_lite.objective import (
    Totals,
    clipped_token_loss,
    k3,
    logit_gradient_norm,
    sampler_correction,
    sequence_weights,
)
from stapo_lite.policy import Policy, sum_gradients
from stapo_lite.s2t import candidate_mask, linear_quantile, random_scores, spurious_mask, top_entropy_mask
from stapo_lite.tracking import Tally, gather_values
from stapo_lite.types import Completion, TokenStatistics

Statistics = dict[Completion, TokenStatistics]
"""Of each completion, [length] fp32, without gradient."""

SUMS = (
    "batch_tokens", "kept", "active_tokens", "trained_tokens", "loss", "kl", "kl_tokens", "entropy", "collision",
    "logit_grad_norm", "clipped_low", "clipped_high", "silenced", "candidate", "gradient_mass",
    "spurious", "spurious_mass", "negative_rare", "negative_rare_mass", "negative_sure", "negative_sure_mass",
    "gap_tokens", "gap", "gap_k3", "capped",
)  # fmt: skip
MAXIMA = ("gap_max",)
VALUES = ("entropies",)


class Update(NamedTuple):
    """The same on every process."""

    grad_norm: float
    """Before clipping."""
    tau_h: float | None
    """None without candidates, or where S2T does not go by a threshold of the entropy."""


class Masks(NamedTuple):
    """Of the completions they depend on, each [length] bool; every token of the others is kept."""

    keep: dict[Completion, Tensor]
    silenced: dict[Completion, Tensor]
    statistics: Statistics
    """What the masks were made from."""
    tau_h: float | None


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    mini_batch: Sequence[Completion],
    old: Statistics | None,
    objective: Objective,
    *,
    max_completion_length: int,
    max_tokens: int,
    max_grad_norm: float,
    accelerator: Accelerator,
    tally: Tally,
    on_tokens: Callable[[int], Any] = lambda tokens: None,
) -> Update | None:
    """One optimiser update on this process's share of a mini-batch.

    STAPO: J = sum I min(rho A, clip(rho) A) / sum I, over the tokens of the mini-batch on all processes; the
    other presets change the mask I, the weights, or add terms.

    Args:
        old: statistics of the policy before the step's first update; None where it is this one, so
            that the ratio is 1 and its gradient that of the log-probability.
        max_completion_length: the denominator of `aggregation: constant`.
        max_tokens: of a micro-batch.
        on_tokens: told of the completion tokens done.

    Returns:
        None, with nothing changed, where no token that is kept has a gradient.
    """
    # The keep-mask and the denominators, from the whole mini-batch before any gradient.
    masks = find_masks(policy, mini_batch, old, objective, max_tokens, accelerator)
    lengths = {completion: len(completion.token_ids) for completion in mini_batch}
    kept = lengths | count_true(masks.keep)
    running = with_gradient(mini_batch, objective)
    counts = [sum(kept.values()), sum(n > 0 for n in kept.values()), len(kept), sum(kept[c] for c in running)]
    *counts, trained = accelerator.reduce(torch.tensor(counts, device=policy.device), "sum").tolist()
    totals = Totals(*counts)
    silenced = sum(count_true(masks.silenced).values())
    tally.add(batch_tokens=sum(lengths.values()), kept=sum(kept.values()), silenced=silenced)
    if trained == 0:
        return None

    # Micro-batches: forward, loss as a sum, backward.
    current: Statistics = {}
    norms: dict[Completion, Tensor] = {}
    for rows in split_by_tokens(running, max_tokens):
        batch = collate(rows, policy.pad_token_id, policy.device)
        active = batch.completion_mask & (batch.advantages != 0)[:, None]
        rollout_logprobs = pad_rows([torch.tensor(c.rollout_logprobs) for c in rows]).to(policy.device)
        ref_logprobs = policy.reference_logprobs(batch) if objective.beta else None
        now = policy.statistics(batch, differentiable_entropy=objective.entropy_coef > 0)
        logprobs, entropy, collision = (values.detach() for values in now)

        # The policy that sampled, as the trainer and as the engine see it: any difference is numerical.
        old_logprobs, correction = rollout_logprobs, torch.ones_like(rollout_logprobs)
        if old is None or objective.old_logprobs == "trainer":
            trainer_logprobs = logprobs if old is None else pad_rows([old[c].logprobs for c in rows])
            gap = (trainer_logprobs - rollout_logprobs).abs().where(active, 0.0)
            gap_k3 = k3(rollout_logprobs, trainer_logprobs).where(active, 0.0)
            tally.add(gap=gap.sum(), gap_k3=gap_k3.sum(), gap_tokens=active.sum())
            tally.raise_to(gap_max=gap.max())
        if objective.old_logprobs == "trainer":
            old_logprobs = trainer_logprobs
            correction, capped = sampler_correction(
                old_logprobs, rollout_logprobs, objective.sampler_correction, objective.sampler_cap
            )
            tally.add(capped=(capped & active).sum())

        # sum over kept tokens of  weight * (correction * clipped loss + beta * k3 - entropy_coef * H)
        keep_mask = batch.completion_mask & pad_rows([masks.keep.get(c, ones(lengths[c], policy.device)) for c in rows])
        token = clipped_token_loss(
            now.logprobs, old_logprobs, batch.advantages, objective.epsilon, objective.epsilon_high
        )
        loss = correction * token.loss - objective.entropy_coef * now.entropy
        if ref_logprobs is not None:
            kl = k3(now.logprobs, ref_logprobs)
            loss = loss + objective.beta * kl
            tally.add(kl=kl.detach().where(keep_mask, 0.0).sum(), kl_tokens=keep_mask.sum())
        kept_of_rows = torch.tensor([kept[c] for c in rows], device=policy.device)
        weights = sequence_weights(kept_of_rows, totals, objective.aggregation, max_completion_length)
        loss = (weights[:, None] * loss).where(keep_mask, 0.0).sum(dtype=torch.float64)
        loss.backward()

        trains = active & keep_mask
        norm = logit_gradient_norm(correction * token.gradient, logprobs, collision)
        tally.add(
            loss=loss.detach(),
            active_tokens=active.sum(),
            trained_tokens=trains.sum(),
            entropy=entropy.where(active, 0.0).sum(),
            collision=collision.where(active, 0.0).sum(),
            logit_grad_norm=norm.where(trains, 0.0).sum(),
            clipped_low=(token.clipped_low & trains).sum(),
            clipped_high=(token.clipped_high & trains).sum(),
        )
        current |= {c: TokenStatistics(*cut) for c, *cut in unpad(rows, logprobs, entropy, collision)}
        norms |= dict(unpad(rows, norm))
        on_tokens(sum(lengths[c] for c in rows))
    tau_h = tally_spurious(current, norms, masks, objective.s2t, accelerator, tally, policy.device)

    # One clip, one step, the same on every process.
    if accelerator.num_processes > 1:
        sum_gradients(policy, lambda gradient: accelerator.reduce(gradient, "sum"))
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), max_grad_norm, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    return Update(float(grad_norm), tau_h)


@torch.no_grad()
def measure(policy: Policy, completions: Sequence[Completion], max_tokens: int) -> Statistics:
    """Statistics of the current policy for each completion."""
    statistics: Statistics = {}
    for rows in split_by_tokens(completions, max_tokens):
        batch = policy.statistics(collate(rows, policy.pad_token_id, policy.device))
        statistics |= {c: TokenStatistics(*cut) for c, *cut in unpad(rows, *batch)}
    return statistics


def unpad(rows: Sequence[Completion], *values: Tensor) -> Iterator[tuple[Any, ...]]:
    """(completion, its part of each of the [B, C] values) for each row."""
    for row, completion in enumerate(rows):
        yield completion, *(value[row, : len(completion.token_ids)] for value in values)


def with_gradient(mini_batch: Sequence[Completion], objective: Objective) -> list[Completion]:
    """The completions that add to the gradient: those of zero advantage by KL or entropy term only."""
    every = objective.beta > 0 or objective.entropy_coef > 0
    return [completion for completion in mini_batch if every or completion.advantage != 0]


def mask_inputs(mini_batch: Sequence[Completion], objective: Objective) -> list[Completion]:
    """The completions whose statistics the keep-mask depends on."""
    s2t = objective.s2t
    if objective.top_entropy_quantile < 1 or (s2t.enabled and s2t.population == "all"):
        return list(mini_batch)
    return [completion for completion in mini_batch if s2t.enabled and completion.advantage > 0]


def find_masks(
    policy: Policy,
    mini_batch: Sequence[Completion],
    old: Statistics | None,
    objective: Objective,
    max_tokens: int,
    accelerator: Accelerator,
) -> Masks:
    """The masks of this process's share of a mini-batch; thresholds are those of the whole.

    Every process takes part, with whatever it has.
    """
    s2t, device = objective.s2t, policy.device
    inputs = mask_inputs(mini_batch, objective)
    statistics = old if old is not None and s2t.statistics == "old" else measure(policy, inputs, max_tokens)
    lengths = [len(completion.token_ids) for completion in inputs]
    none = torch.zeros(0, device=device)
    logprobs = torch.cat([none] + [statistics[c].logprobs for c in inputs])
    entropy = torch.cat([none] + [statistics[c].entropy for c in inputs])
    advantages = token_advantages(inputs, device)
    silenced, tau_h = torch.zeros_like(entropy, dtype=torch.bool), None
    if s2t.enabled:
        candidates = candidate_mask(logprobs, advantages, s2t.tau_p)
        tau_h = threshold(entropy, candidates, s2t, accelerator)
        if s2t.silence == "low-entropy":
            silenced = spurious_mask(candidates, entropy, tau_h)
        elif s2t.silence == "all":
            silenced = candidates
        else:
            score = -entropy
            if s2t.silence == "random":
                score = torch.cat([none.cpu()] + [random_scores(c.token_ids, c.adapter_version) for c in inputs]).to(
                    device
                )
            silenced = spurious_mask(candidates, score, threshold(score, candidates, s2t, accelerator))
    keep = ~silenced
    if objective.top_entropy_quantile < 1:
        lowest = linear_quantile(gather_values(entropy, accelerator), 1 - objective.top_entropy_quantile)
        keep &= top_entropy_mask(entropy, lowest)
    keep_of, silenced_of = (dict(zip(inputs, mask.split(lengths), strict=True)) for mask in (keep, silenced))
    return Masks(keep_of, silenced_of, {c: statistics[c] for c in inputs}, tau_h)


def threshold(score: Tensor, candidates: Tensor, s2t: S2T, accelerator: Accelerator) -> float | None:
    """The quantile of the score over its population on all processes; tau_h, where the score is the entropy."""
    population = score[candidates] if s2t.population == "candidates" else score
    return linear_quantile(gather_values(population, accelerator), s2t.quantile)


def tally_spurious(
    current: Statistics,
    norms: dict[Completion, Tensor],
    masks: Masks,
    s2t: S2T,
    accelerator: Accelerator,
    tally: Tally,
    device: torch.device,
) -> float | None:
    """Count the spurious tokens and their gradients among the completions with an advantage, silenced or not.

    Args:
        current: statistics of the completions that ran.
        norms: norm of the logit gradient of each token, silenced ones included.
        masks: their statistics and tau_h decide; where S2T is off, `current` and its own tau_h.

    Returns:
        tau_h.
    """
    active = [completion for completion in current if completion.advantage != 0]
    judged = current | masks.statistics if s2t.enabled else current
    none = torch.zeros(0, device=device)
    logprobs = torch.cat([none] + [judged[c].logprobs for c in active])
    entropy = torch.cat([none] + [judged[c].entropy for c in active])
    norm = torch.cat([none] + [norms[c] for c in active]).double()
    advantages = token_advantages(active, device)
    candidates = candidate_mask(logprobs, advantages, s2t.tau_p)
    tau_h = masks.tau_h if s2t.enabled else threshold(entropy, candidates, s2t, accelerator)
    spurious = spurious_mask(candidates, entropy, tau_h)
    # Incorrect responses, measured only: the same test, and its mirror case, tokens that were all but certain.
    rare = spurious_mask(candidate_mask(logprobs, -advantages, s2t.tau_p), entropy, tau_h)
    sure = (advantages < 0) & (-torch.expm1(logprobs) < s2t.tau_p)
    tally.add(candidate=candidates.sum(), gradient_mass=norm.sum())
    tally.add(spurious=spurious.sum(), spurious_mass=norm[spurious].sum())
    tally.add(negative_rare=rare.sum(), negative_rare_mass=norm[rare].sum())
    tally.add(negative_sure=sure.sum(), negative_sure_mass=norm[sure].sum())
    tally.collect(entropies=torch.cat([none] + [current[c].entropy for c in active]))
    return tau_h


def token_advantages(completions: Sequence[Completion], device: torch.device) -> Tensor:
    """The advantage of each token of the completions, one after the other; fp32."""
    advantages = torch.tensor([c.advantage for c in completions], dtype=torch.float32, device=device)
    return advantages.repeat_interleave(torch.tensor([len(c.token_ids) for c in completions], device=device).long())


def count_true(masks: dict[Completion, Tensor]) -> dict[Completion, int]:
    counts = torch.stack([mask.sum() for mask in masks.values()]).tolist() if masks else []
    return dict(zip(masks, counts, strict=True))


def ones(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, dtype=torch.bool, device=device)
