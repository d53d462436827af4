"""Metrics of S2T's kinds of tokens, whether or not it is on: their shares of the tokens and of the
gradient (docs/metrics.md)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stapo_lite.method.loss import logit_gradient_norm, masked_sum
from stapo_lite.method.masks import candidate_mask, linear_quantile, spurious_mask
from stapo_lite.method.tokens import Tokens
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.learner import Learner
from stapo_lite.training.metrics import Means, gather_means, sum_and_number
from stapo_lite.training.run import Run
from stapo_lite.types import LossOutputs, Masks, Rollouts, Update

KINDS = ("candidate", "spurious", "negative_rare", "negative_sure")


class Diagnostics(Callback):
    """Adds these metrics to those of each step; goes before `RunLog`."""

    def __init__(self) -> None:
        self._parts: list[Means] = []
        self._entropies: list[Tensor] = []

    def on_update(self, run: Run, tokens: Tokens, update: Update) -> None:
        if update.masks is None or update.outputs is None:
            if not update.skipped:  # no token has an advantage, as each kind must
                none = 0, tokens.written.sum()
                self._parts.append({f"{kind}_share": none for kind in KINDS})
            return
        active = tokens.written & (tokens.advantages != 0)
        _, entropy, collision = update.outputs.statistics
        details = describe_tokens(run.learner, tokens, update.masks, update.outputs)
        norm, mass = details.gradient_norm, masked_sum(details.gradient_norm, active)
        means: dict[str, tuple[Any, Any]] = {
            "logit_grad_norm": sum_and_number(norm, active & update.masks.keep),
            "collision": sum_and_number(collision, active),
        }
        if details.tau_h is not None:
            means["tau_h"] = details.tau_h, 1
        for kind, mask in details.kinds.items():
            means[f"{kind}_share"] = mask.sum(), tokens.written.sum()
            means[f"{kind}_gradient_share"] = masked_sum(norm, mask), mass
        self._parts.append(means)
        self._entropies.append(entropy[active])

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        entropies = torch.cat([torch.zeros(0, device=run.policy.device), *self._entropies])
        every = run.learner.gather(entropies)
        for percent in (10, 50, 90):
            metrics[f"entropy_p{percent}"] = linear_quantile(every, percent / 100)
        metrics |= gather_means(self._parts)
        self._parts, self._entropies = [], []


class TokenDetails(NamedTuple):
    """What S2T says of a mini-batch's tokens, or would say if it is off."""

    logprobs: Tensor
    """[N] fp32"""
    entropy: Tensor
    """[N] fp32"""
    gradient_norm: Tensor
    """[N] fp32, with respect to the token's logits."""
    tau_h: float | None
    kinds: dict[str, Tensor]
    """Masks, [N] bool: candidates and spurious tokens; tokens with the same low pi and H in
    incorrect responses (A < 0), which S2T never silences; and the mirror case, almost certain
    tokens of incorrect responses."""


def describe_tokens(
    learner: Learner, tokens: Tokens, masks: Masks, outputs: LossOutputs
) -> TokenDetails:
    """Sort a mini-batch's tokens.

    Collective: every rank must call it.
    """
    s2t, now = learner.config.objective.s2t, outputs.statistics
    norm = logit_gradient_norm(outputs.weight, now.logprobs, now.collision)
    # What the mask was computed from, or else the policy now.
    by_mask = (tokens.advantages > 0) & s2t.enabled
    logprobs = torch.where(by_mask, masks.statistics.logprobs, now.logprobs)
    entropy = torch.where(by_mask, masks.statistics.entropy, now.entropy)
    candidate = tokens.written & candidate_mask(logprobs, tokens.advantages, s2t.tau_p)
    tau_h = masks.tau_h
    if not s2t.enabled:
        active = tokens.written & (tokens.advantages != 0)
        population = candidate if s2t.population == "candidates" else active
        tau_h = linear_quantile(learner.gather(entropy[population]), s2t.quantile)
    negative = tokens.written & (tokens.advantages < 0)
    rare = negative & candidate_mask(logprobs, -tokens.advantages, s2t.tau_p)
    spurious = spurious_mask(candidate, entropy, tau_h)
    rare = spurious_mask(rare, entropy, tau_h)
    sure = negative & (-torch.expm1(logprobs) < s2t.tau_p)
    kinds = dict(zip(KINDS, (candidate, spurious, rare, sure), strict=True))
    return TokenDetails(logprobs, entropy, norm, tau_h, kinds)
