"""One optimiser update: keep-mask, denominators, micro-batches, step. This is the method; `train.py` is the loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from stapo_lite.batching import TokenBudget, collate, pad_rows
from stapo_lite.config import S2T, Objective
from stapo_lite.objective import (
    Totals,
    clipped_token_loss,
    k3,
    logit_gradient_norm,
    loss_scale,
    sampler_correction,
    sequence_weights,
)
from stapo_lite.policy import Policy, sum_gradients
from stapo_lite.s2t import candidate_mask, linear_quantile, random_scores, spurious_mask, top_entropy_mask
from stapo_lite.token_log import TokenLog
from stapo_lite.tracking import Tally, gather_values
from stapo_lite.types import Completion, MicroBatch, TokenStatistics

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
    tau_h: float | None = None
    """None without candidates."""
    skipped: bool = False
    """Loss or gradient was not finite: nothing changed, and nothing was tallied."""


class Masks(NamedTuple):
    """Of this process's share of a mini-batch."""

    keep: dict[Completion, Tensor]
    """Of each completion, [length] bool."""
    silenced: int
    """Tokens that S2T takes out."""
    statistics: Statistics
    """Of the completions that the masks depend on."""
    tau_h: float | None
    """None without candidates, or without S2T."""


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    mini_batch: Sequence[Completion],
    old: Statistics | None,
    objective: Objective,
    *,
    max_completion_length: int,
    budget: TokenBudget,
    max_grad_norm: float,
    accelerator: Accelerator,
    tally: Tally,
    on_tokens: Callable[[int], Any] = lambda tokens: None,
    token_log: TokenLog | None = None,
) -> Update | None:
    """One optimiser update on this process's share of a mini-batch.

    STAPO: J = sum I min(rho A, clip(rho) A) / sum I, over the tokens of the mini-batch on all processes; the
    other presets change the mask I, the weights, or add terms.

    Args:
        old: statistics of the policy before the step's first update; None where it is this one, so
            that the ratio is 1 and its gradient that of the log-probability.
        max_completion_length: the denominator of `aggregation: constant`.
        budget: of a micro-batch; where memory runs out the gradient is begun anew with less.
        on_tokens: told of the completion tokens done.
        token_log: notes the candidates.

    Returns:
        None, with nothing changed, where no token that is kept has a gradient.
    """
    trained = with_gradient(mini_batch, objective)

    def forward(batch: MicroBatch) -> tuple[Tensor | None, TokenStatistics]:
        hidden = policy.hidden_states(batch)
        now = policy.score(batch, hidden, differentiable_entropy=objective.entropy_coef > 0)
        return hidden.detach() if token_log else None, now

    # The keep-mask and the denominators, from the whole mini-batch before any gradient. Where the mask depends on
    # the policy as it is now, the first micro-batch's forward pass serves both.
    first: tuple[list[Completion], tuple[Tensor | None, TokenStatistics]] | None = None
    given: Statistics = {}
    if old is not None and objective.s2t.statistics == "old":
        given = old
    elif mask_inputs(mini_batch, objective) and trained and not policy.sharded:
        first = budget.fit(
            trained, lambda parts: (parts[0], forward(collate(parts[0], policy.pad_token_id, policy.device)))
        )
        given = by_completion(first[0], first[1][1])
    masks = find_masks(policy, mini_batch, given, objective, budget, accelerator)
    kept_counts = torch.stack([masks.keep[c].sum() for c in mini_batch]).tolist() if mini_batch else []
    kept = dict(zip(mini_batch, kept_counts, strict=True))
    divisors = kept if objective.renormalize else {c: len(c.token_ids) for c in mini_batch}
    counts = [sum(divisors.values()), sum(n > 0 for n in divisors.values()), len(divisors)]
    counts += [sum(kept[completion] for completion in trained)]
    *counts, kept_of_trained = accelerator.reduce(torch.tensor(counts, device=policy.device), "sum").tolist()
    totals = Totals(*counts)
    whole = Tally(SUMS, MAXIMA, VALUES, policy.device)
    tokens = sum(len(completion.token_ids) for completion in mini_batch)
    whole.add(batch_tokens=tokens, kept=sum(kept.values()), silenced=masks.silenced)
    if kept_of_trained == 0:
        tally.merge(whole)
        return None

    # Micro-batches: forward, loss as a sum, backward.
    in_float16 = policy.dtype == torch.float16
    scale = loss_scale(totals, objective.aggregation, max_completion_length) if in_float16 else 1.0

    def backward(micro_batches: list[list[Completion]]) -> tuple[Tally, Statistics, dict[Completion, Tensor]]:
        """Add up the gradient; its tally, the statistics now, and the norm of each token's logit gradient."""
        nonlocal first
        known, first = first, None  # its graph serves once, and not at all in other micro-batches
        if known is not None and known[0] not in micro_batches[:1]:
            known = None
        optimizer.zero_grad()
        if token_log is not None:
            token_log.forget()
        sums = Tally(SUMS, MAXIMA, VALUES, policy.device)
        current: Statistics = {}
        norms: dict[Completion, Tensor] = {}
        for rows in micro_batches:
            if not rows:
                if objective.beta:
                    with torch.no_grad():
                        policy.take_part()
                policy.take_part()
                continue
            batch = collate(rows, policy.pad_token_id, policy.device)
            active = batch.completion_mask & (batch.advantages != 0)[:, None]
            rollout_logprobs = pad_rows([torch.tensor(c.rollout_logprobs) for c in rows]).to(policy.device)
            ref_logprobs = policy.reference_logprobs(batch) if objective.beta else None
            hidden, now = forward(batch) if known is None else known[1]
            known = None
            logprobs, entropy, collision = (values.detach() for values in now)
            statistics = by_completion(rows, now)
            if token_log is not None and hidden is not None:
                judged = concatenate(rows, deciding(statistics, masks, objective.s2t), policy.device)
                token_log.see(rows, hidden, candidate_mask(judged[0], judged[2], objective.s2t.tau_p))
            del hidden

            # The policy that sampled, as the trainer and as the engine see it: any difference is numerical.
            old_logprobs, correction = rollout_logprobs, torch.ones_like(rollout_logprobs)
            if old is None or objective.old_logprobs == "trainer":
                trainer_logprobs = logprobs if old is None else pad_rows([old[c].logprobs for c in rows])
                gap = (trainer_logprobs - rollout_logprobs).abs()
                gap_k3 = k3(rollout_logprobs, trainer_logprobs)
                sums.add(gap=total(gap, active), gap_k3=total(gap_k3, active), gap_tokens=active.sum())
                sums.raise_to(gap_max=gap.masked_fill(~active, -torch.inf).max())
            if objective.old_logprobs == "trainer":
                old_logprobs = trainer_logprobs
                correction, capped = sampler_correction(
                    old_logprobs, rollout_logprobs, objective.sampler_correction, objective.sampler_cap
                )
                sums.add(capped=(capped & active).sum())

            # sum over kept tokens of  weight * (correction * clipped loss + beta * k3 - entropy_coef * H)
            keep_mask = pad_rows([masks.keep[c] for c in rows])
            token = clipped_token_loss(
                now.logprobs, old_logprobs, batch.advantages, objective.epsilon, objective.epsilon_high
            )
            loss = correction * token.loss - objective.entropy_coef * now.entropy
            if ref_logprobs is not None:
                kl = k3(now.logprobs, ref_logprobs)
                loss = loss + objective.beta * kl
                sums.add(kl=total(kl.detach(), keep_mask), kl_tokens=keep_mask.sum())
            divisor = torch.tensor([divisors[c] for c in rows], device=policy.device)
            weights = sequence_weights(divisor, totals, objective.aggregation, max_completion_length)
            loss = (weights[:, None] * loss).where(keep_mask, 0.0).sum(dtype=torch.float64)
            (scale * loss).backward()

            trains = active & keep_mask
            norm = logit_gradient_norm(correction * token.gradient, logprobs, collision)
            sums.add(
                loss=loss.detach(),
                active_tokens=active.sum(),
                trained_tokens=trains.sum(),
                entropy=total(entropy, active),
                collision=total(collision, active),
                logit_grad_norm=total(norm, trains),
                clipped_low=(token.clipped_low & trains).sum(),
                clipped_high=(token.clipped_high & trains).sum(),
            )
            current |= statistics
            norms |= dict(unpad(rows, norm))
            on_tokens(sum(len(c.token_ids) for c in rows))
        return sums, current, norms

    sums, current, norms = budget.fit(trained, backward)
    whole.merge(sums)

    # One clip, one step, the same on every process.
    for parameter in policy.parameters.values() if in_float16 else ():
        if parameter.grad is not None:
            parameter.grad /= scale
    if accelerator.num_processes > 1:
        sum_gradients(policy, lambda gradient: accelerator.reduce(gradient, "sum"))
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), max_grad_norm)
    if not accelerator.reduce(whole.sum("loss") + grad_norm, "sum").isfinite():
        optimizer.zero_grad()
        return Update(float(grad_norm), skipped=True)
    tau_h = tally_spurious(current, norms, masks, objective.s2t, accelerator, whole, policy.device, token_log)
    tally.merge(whole)
    optimizer.step()
    optimizer.zero_grad()
    return Update(float(grad_norm), tau_h)


@torch.no_grad()
def measure(policy: Policy, completions: Sequence[Completion], budget: TokenBudget) -> Statistics:
    """Statistics of the current policy for each completion."""
    statistics: Statistics = {}

    def run(micro_batches: list[list[Completion]]) -> None:
        for rows in micro_batches:
            if not rows:
                policy.take_part()
                continue
            statistics.update(by_completion(rows, policy.statistics(collate(rows, policy.pad_token_id, policy.device))))

    budget.fit(completions, run)
    return statistics


def by_completion(rows: Sequence[Completion], statistics: TokenStatistics) -> Statistics:
    """Cut [B, C] statistics into those of each completion, detached."""
    return {c: TokenStatistics(*cut) for c, *cut in unpad(rows, *(values.detach() for values in statistics))}


def unpad(rows: Sequence[Completion], *values: Tensor) -> Iterator[tuple[Any, ...]]:
    """(completion, its part of each of the [B, C] values) for each row."""
    for row, completion in enumerate(rows):
        yield completion, *(value[row, : len(completion.token_ids)] for value in values)


def with_gradient(mini_batch: Sequence[Completion], objective: Objective) -> list[Completion]:
    """The completions that add to the gradient: those of zero advantage by KL or entropy term only."""
    every = objective.beta > 0 or objective.entropy_coef > 0
    return [completion for completion in mini_batch if every or completion.advantage != 0]


def old_inputs(mini_batch: Sequence[Completion], objective: Objective) -> list[Completion]:
    """The completions whose statistics before the step's first update a later update needs."""
    ratios = with_gradient(mini_batch, objective) if objective.old_logprobs == "trainer" else []
    masks = mask_inputs(mini_batch, objective) if objective.s2t.statistics == "old" else []
    return list(dict.fromkeys(ratios + masks))


def mask_inputs(mini_batch: Sequence[Completion], objective: Objective) -> list[Completion]:
    """The completions whose statistics the keep-mask depends on."""
    s2t = objective.s2t
    if objective.top_entropy_quantile < 1 or (s2t.enabled and s2t.population == "all"):
        return list(mini_batch)
    return [completion for completion in mini_batch if s2t.enabled and completion.advantage > 0]


def find_masks(
    policy: Policy,
    mini_batch: Sequence[Completion],
    given: Statistics,
    objective: Objective,
    budget: TokenBudget,
    accelerator: Accelerator,
) -> Masks:
    """The masks of this process's share of a mini-batch; thresholds are those of the whole.

    Every process takes part, with whatever it has.

    Args:
        given: statistics to make them from; of the policy now where one is missing.
    """
    s2t, device = objective.s2t, policy.device
    inputs = mask_inputs(mini_batch, objective)
    statistics = given | measure(policy, [c for c in inputs if c not in given], budget)
    logprobs, entropy, advantages = concatenate(inputs, statistics, device)
    silenced, tau_h = torch.zeros_like(entropy, dtype=torch.bool), None
    if s2t.enabled:
        candidates = candidate_mask(logprobs, advantages, s2t.tau_p)
        tau_h = threshold(entropy, candidates, s2t, accelerator)
        if s2t.silence == "all":
            silenced = candidates
        elif s2t.silence == "low-entropy":
            silenced = spurious_mask(candidates, entropy, tau_h)
        else:
            random = [random_scores(c.token_ids, c.adapter_version).to(device) for c in inputs]
            score = -entropy if s2t.silence == "high-entropy" else torch.cat([entropy[:0], *random])
            silenced = spurious_mask(candidates, score, threshold(score, candidates, s2t, accelerator))
    keep = ~silenced
    if objective.top_entropy_quantile < 1:
        lowest = linear_quantile(gather_values(entropy, accelerator), 1 - objective.top_entropy_quantile)
        keep &= top_entropy_mask(entropy, lowest)
    everything = {c: torch.ones(len(c.token_ids), dtype=torch.bool, device=device) for c in mini_batch}
    return Masks(
        keep=everything | dict(zip(inputs, keep.split([len(c.token_ids) for c in inputs]), strict=True)),
        silenced=int(silenced.sum()),
        statistics={c: statistics[c] for c in inputs},
        tau_h=tau_h,
    )


def total(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over a mask, without the wait for a GPU that `values[mask]` would be."""
    return values.where(mask, 0.0).sum()


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
    token_log: TokenLog | None,
) -> float | None:
    """Count the spurious tokens and their gradients among the completions with an advantage, silenced or not.

    Args:
        current: statistics of the completions that ran.
        norms: norm of the logit gradient of each token, silenced ones included.
        masks: their tau_h decides; where S2T is off, that of `current`.

    Returns:
        tau_h.
    """
    active = [completion for completion in current if completion.advantage != 0]
    logprobs, entropy, advantages = concatenate(active, deciding(current, masks, s2t), device)
    norm = torch.cat([entropy[:0]] + [norms[c] for c in active]).double()
    candidates = candidate_mask(logprobs, advantages, s2t.tau_p)
    tau_h = masks.tau_h if s2t.enabled else threshold(entropy, candidates, s2t, accelerator)
    spurious = spurious_mask(candidates, entropy, tau_h)
    # Incorrect responses, measured only: the same test, and its mirror case, tokens that were all but certain.
    rare = spurious_mask(candidate_mask(logprobs, -advantages, s2t.tau_p), entropy, tau_h)
    sure = (advantages < 0) & (-torch.expm1(logprobs) < s2t.tau_p)
    tally.add(candidate=candidates.sum(), gradient_mass=norm.sum())
    tally.add(spurious=spurious.sum(), spurious_mass=total(norm, spurious))
    tally.add(negative_rare=rare.sum(), negative_rare_mass=total(norm, rare))
    tally.add(negative_sure=sure.sum(), negative_sure_mass=total(norm, sure))
    tally.collect(entropies=concatenate(active, current, device)[1])
    if token_log is not None:
        kept = torch.cat([candidates[:0]] + [masks.keep[c] for c in active])
        token_log.note(active, logprobs, entropy, advantages, norm, kept, spurious, s2t.tau_p, tau_h)
    return tau_h


def deciding(current: Statistics, masks: Masks, s2t: S2T) -> Statistics:
    """The statistics that say which tokens are candidates and spurious: the mask's own for A > 0, `current` for the
    rest, and for all where S2T is off."""
    return {c: masks.statistics[c] if s2t.enabled and c.advantage > 0 else s for c, s in current.items()}


def concatenate(
    completions: Sequence[Completion], statistics: Statistics, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and advantage of every token of the completions, one after the other; [n] fp32."""
    none = torch.zeros(0, device=device)
    return (
        torch.cat([none] + [statistics[c].logprobs for c in completions]),
        torch.cat([none] + [statistics[c].entropy for c in completions]),
        torch.cat([none] + [torch.full_like(statistics[c].entropy, c.advantage) for c in completions]),
    )
