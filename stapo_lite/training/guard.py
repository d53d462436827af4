"""Symptoms: signs in a run's metrics that something is wrong, with the likely cause and the key to change.

A symptom is a function of the metrics alone, which are the same on every process and, after `--resume`, in the file.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

from stapo_lite.config import Symptom

Metrics = Sequence[dict[str, Any]]
SHORT, LONG = 10, 50
"""Numbers of steps: means over the first ones are compared with means over the last ones."""


class Rule(NamedTuple):
    holds: Callable[[Metrics], bool]
    cause: str
    """The likely origin, and the keys to change."""


def _is(*names: str, when: Callable[[float, float], bool]) -> Callable[[Metrics], bool]:
    """A condition on the sum of some metrics: on its means over the first and the last SHORT steps that have them."""

    def holds(history: Metrics) -> bool:
        known = [sum(m[name] for name in names) for m in history if None not in [m[name] for name in names]]
        return len(known) >= 2 * SHORT and when(fmean(known[:SHORT]), fmean(known[-SHORT:]))

    return holds


def _not_rising(history: Metrics) -> bool:
    """The mean reward of the last LONG steps is not above that of the first by two standard errors."""
    rewards = [[m["reward"] for m in part if m["reward"] is not None] for part in (history[:LONG], history[-LONG:])]
    if len(history) < 2 * LONG or min(map(len, rewards)) < SHORT:
        return False
    error = sum(variance(part) / len(part) for part in rewards) ** 0.5
    return fmean(rewards[1]) - fmean(rewards[0]) <= 2 * error


RULES: dict[Symptom, Rule] = {
    "entropy_collapse": Rule(
        _is("entropy", when=lambda first, last: last < 0.1 * first),
        "entropy is below a tenth of what it was: the policy has stopped exploring; raise objective.epsilon_high or "
        "objective.entropy_coef, or lower train.learning_rate",
    ),
    "entropy_explosion": Rule(
        _is("entropy", when=lambda first, last: last > max(2 * first, first + 0.5)),
        "entropy is more than twice what it was: updates destroy what the model knew; lower train.learning_rate or "
        "objective.entropy_coef, or leave S2T on (objective.s2t.enabled)",
    ),
    "no_signal": Rule(
        _is("zero_variance_groups", when=lambda _, last: last > 0.95),
        "more than 95 % of the groups have equal rewards, so nothing is learned (but from reward.overlong_penalty): "
        "the problems are too hard or too easy, or the reward is constant; change data.source or reward.functions, or "
        "raise rollout.num_generations or rollout.max_completion_length",
    ),
    "reward_stuck": Rule(
        _not_rising,
        f"the reward of the last {LONG} steps is not above that of the first {LONG}: raise train.learning_rate or "
        "train.batch_size, or see whether reward.functions rewards what the model can do",
    ),
    "silenced_share": Rule(
        _is("silenced_share", when=lambda _, last: last > 0.01),
        "S2T silences more than 1 % of the tokens, a hundred times the paper's share: lower objective.s2t.tau_p or "
        "objective.s2t.quantile",
    ),
    "sampler_gap": Rule(
        _is("sampler_gap_mean", when=lambda first, last: last > max(2 * first, 0.02)),
        "the engine's log-probabilities drift away from the trainer's: raise the precision of what samples "
        "(rollout.quantization, rollout.model, dtype), lower rollout.max_lag, or keep objective.sampler_correction on",
    ),
    "ratio": Rule(
        _is("clip_low_share", "clip_high_share", when=lambda _, last: last > 0.2),
        "more than a fifth of the tokens are clipped: the policy moves too far within a step; lower "
        "train.learning_rate or raise train.mini_batch_size",
    ),
}


def new_symptoms(history: Metrics) -> list[Symptom]:
    """Symptoms that hold after the last of these steps and did not after the one before."""
    return [name for name, rule in RULES.items() if rule.holds(history) and not rule.holds(history[:-1])]


def ending_symptom(symptoms: Sequence[Symptom], stop_on: Sequence[Symptom]) -> Symptom | None:
    """The one of a step's new symptoms that ends the run, if one does."""
    return next((symptom for symptom in symptoms if symptom in stop_on), None)
