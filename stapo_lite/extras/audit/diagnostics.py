"""Metrics of the kinds of tokens that S2T looks at: their shares of the tokens and of the gradient
(docs/metrics.md). They are measured whether or not S2T is on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stapo_lite.method.loss import logit_gradient_norm, masked_sum
from stapo_lite.method.masks import candidate_mask, linear_quantile, spurious_mask
from stapo_lite.method.metrics import Mean, Metric, Metrics, Ratio
from stapo_lite.method.tokens import Tokens
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.learner import Learner
from stapo_lite.training.metrics import gather_metrics
from stapo_lite.training.run import Run
from stapo_lite.types import LossOutputs, Masks, Rollouts, Update

KINDS = ("candidate", "spurious", "negative_rare", "negative_sure")


class Diagnostics(Callback):
    """Adds these metrics to those of each step."""

    phase = Phase.MEASURE

    def __init__(self) -> None:
        self._parts: list[Metrics] = []
        self._entropies: list[Tensor] = []
        self._mini_batch = 0
        """Of the step, from 1 on; those without a gradient do not count."""

    def on_update(self, run: Run, tokens: Tokens, update: Update) -> None:
        if update.masks is None or update.outputs is None:
            if not update.skipped:  # no token has an advantage, which every kind requires
                none = Mean(0, tokens.written.sum())
                self._parts.append({f"{kind}_share": none for kind in KINDS})
            return
        active = tokens.written & (tokens.advantages != 0)
        statistics = update.outputs.statistics
        details = describe_tokens(run.learner, tokens, update.masks, update.outputs)
        norm = details.gradient_norm
        whole = masked_sum(norm, active)
        metrics: dict[str, Metric] = {
            "logit_grad_norm": Mean.over(active & update.masks.keep, norm),
            "collision": Mean.over(active, statistics.collision),
        }
        if details.tau_h is not None:
            metrics["tau_h"] = Mean(details.tau_h, 1)
        for kind, mask in details.kinds.items():
            metrics[f"{kind}_share"] = Mean(mask.sum(), tokens.written.sum())
            metrics[f"{kind}_gradient_share"] = Ratio(masked_sum(norm, mask), whole)
        self._mini_batch += 1
        by_trainer = run.learner.settings.objective.old_logprobs == "trainer"
        if self._mini_batch == 2 and tokens.old is not None and by_trainer:
            # How far the step's first update has moved the policy, by samples of the old one.
            moved = statistics.logprobs - tokens.old.logprobs
            metrics["update_kl"] = Mean.over(active, moved.expm1() - moved)
        self._parts.append(metrics)
        self._entropies.append(statistics.entropy[active])

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        # `cat` needs a tensor even if this process had no update.
        entropies = torch.cat([torch.zeros(0, device=run.policy.device), *self._entropies])
        entropies = run.learner.gather(entropies)
        for percent in (10, 50, 90):
            metrics[f"entropy_p{percent}"] = linear_quantile(entropies, percent / 100)
        metrics |= gather_metrics(self._parts)
        self._parts = []
        self._entropies = []
        self._mini_batch = 0


class TokenDetails(NamedTuple):
    """How S2T sees the tokens of a mini-batch, or would see them if it is off."""

    logprobs: Tensor
    """[N] fp32"""
    entropy: Tensor
    """[N] fp32"""
    gradient_norm: Tensor
    """[N] fp32, with respect to the token's logits."""
    tau_h: float | None
    kinds: dict[str, Tensor]
    """Masks by the names in `KINDS`, [N] bool: candidates; spurious tokens; tokens of incorrect
    responses (A < 0) with the pi and H of spurious ones, which S2T never silences; and tokens of
    incorrect responses of which the model was almost certain."""


def describe_tokens(
    learner: Learner, tokens: Tokens, masks: Masks, outputs: LossOutputs
) -> TokenDetails:
    """Sort a mini-batch's tokens.

    Collective: every rank must call it.
    """
    s2t = learner.settings.objective.s2t
    policy = outputs.statistics
    norm = logit_gradient_norm(outputs.slope, policy.logprobs, policy.collision)
    # Tokens that S2T judged keep the values that it saw. All others have the policy's.
    judged = (tokens.advantages > 0) & s2t.enabled
    logprobs = torch.where(judged, masks.statistics.logprobs, policy.logprobs)
    entropy = torch.where(judged, masks.statistics.entropy, policy.entropy)
    candidate = tokens.written & candidate_mask(logprobs, tokens.advantages, s2t.tau_p)
    # If S2T is off, find the threshold that it would use.
    tau_h = masks.tau_h
    if not s2t.enabled:
        population = candidate
        if s2t.population != "candidates":
            population = tokens.written & (tokens.advantages != 0)
        tau_h = linear_quantile(learner.gather(entropy[population]), s2t.quantile)
    # In incorrect responses the sign of A is turned, so that the same functions find them.
    negative = tokens.written & (tokens.advantages < 0)
    rare = negative & candidate_mask(logprobs, -tokens.advantages, s2t.tau_p)
    kinds = {
        "candidate": candidate,
        "spurious": spurious_mask(candidate, entropy, tau_h),
        "negative_rare": spurious_mask(rare, entropy, tau_h),
        "negative_sure": negative & (-torch.expm1(logprobs) < s2t.tau_p),
    }
    return TokenDetails(logprobs, entropy, norm, tau_h, kinds)
