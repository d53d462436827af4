"""Guard rails: what a run's metrics say about its health, with the likely cause and the key to change.

A symptom is a function of the metrics alone, which are the same on every process and, after `--resume`, in the file.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

from stapo_lite.config import Symptom

Metrics = Sequence[dict[str, Any]]
SHORT, LONG = 10, 50
"""Steps: what is compared are means over the first or last of them."""


class Rule(NamedTuple):
    holds: Callable[[Metrics], bool]
    cause: str
    """What it may come from, and the keys to change."""


def _first(history: Metrics, name: str) -> float:
    return fmean(_known(history[:SHORT], name) or [0.0])


def _last(history: Metrics, name: str) -> float:
    return fmean(_known(history[-SHORT:], name) or [0.0])


def _known(history: Metrics, name: str) -> list[float]:
    return [m[name] for m in history if m[name] is not None]


def _not_rising(history: Metrics) -> bool:
    """The mean reward of the last LONG steps is not above that of the first by two standard errors."""
    first, last = (_known(part, "reward") for part in (history[:LONG], history[-LONG:]))
    if len(history) < 2 * LONG or min(len(first), len(last)) < SHORT:
        return False
    error = (variance(first) / len(first) + variance(last) / len(last)) ** 0.5
    return fmean(last) - fmean(first) <= 2 * error


RULES: dict[Symptom, Rule] = {
    "entropy_collapse": Rule(
        lambda h: _last(h, "entropy") < 0.1 * _first(h, "entropy"),
        "entropy is below a tenth of what it was: the policy has stopped exploring; raise objective.epsilon_high or "
        "objective.entropy_coef, or lower train.learning_rate",
    ),
    "entropy_explosion": Rule(
        lambda h: _last(h, "entropy") > max(2 * _first(h, "entropy"), _first(h, "entropy") + 0.5),
        "entropy is more than twice what it was: updates destroy what the model knew; lower train.learning_rate or "
        "objective.entropy_coef, or leave S2T on (objective.s2t.enabled)",
    ),
    "no_signal": Rule(
        lambda h: _last(h, "zero_variance_groups") > 0.95,
        "more than 95 % of the groups have equal rewards, so nothing is learned: the problems are too hard or too "
        "easy, or the reward is constant; change data.source or reward.functions, raise rollout.num_generations or "
        "rollout.max_completion_length",
    ),
    "reward_stuck": Rule(
        _not_rising,
        f"the reward of the last {LONG} steps is not above that of the first {LONG}: raise train.learning_rate or "
        "train.batch_size, or see whether reward.functions rewards what the model can do",
    ),
    "silenced_share": Rule(
        lambda h: _last(h, "silenced_share") > 0.01,
        "S2T silences more than 1 % of the tokens, a hundred times the paper's share: lower objective.s2t.tau_p or "
        "objective.s2t.quantile",
    ),
    "sampler_gap": Rule(
        lambda h: _last(h, "sampler_gap_mean") > max(2 * _first(h, "sampler_gap_mean"), 0.02),
        "the engine's log-probabilities drift away from the trainer's: raise the precision of what samples "
        "(rollout.quantization, rollout.model, dtype), or keep objective.sampler_correction on",
    ),
    "ratio": Rule(
        lambda h: _last(h, "clip_low_share") + _last(h, "clip_high_share") > 0.2,
        "more than a fifth of the tokens are clipped: the policy moves too far within a step; lower "
        "train.learning_rate or raise train.mini_batch_size",
    ),
}


def new_symptoms(history: Metrics) -> list[Symptom]:
    """Those that hold after the last of these steps and did not after the one before, none in the first `2 * SHORT`."""
    return [name for name in RULES if _holds(name, history) and not _holds(name, history[:-1])]


def _holds(name: Symptom, history: Metrics) -> bool:
    return len(history) >= 2 * SHORT and RULES[name].holds(history)
