"""Symptoms: signs that something is wrong with a run, with likely cause and keys to change.

Most depend only on the metrics. Those of a run that cannot learn are found once, from its first
completions (`causes.py`).
"""

import logging
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from stapo_lite.errors import InputError
from stapo_lite.extras.causes import CAUSES, NOTES, Rule, ask, example, look
from stapo_lite.files import append_lines, read_lines
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.folder import SYMPTOMS_FILE
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Rollouts

logger = logging.getLogger(__name__)

Metrics = Sequence[dict[str, Any]]
SHORT = 10
"""The first and the last so many steps of a run are compared."""
GROUPS = 16
"""Groups that show why a run cannot learn. They are looked at after step FIRST_LOOK, or once there
are as many."""
FIRST_LOOK = 2


def _is(*names: str, when: Callable[[float, float], bool]) -> Callable[[Metrics], bool]:
    """A condition on the sum of some metrics.

    Args:
        when: called with the means over the first and the last SHORT steps that have all of these
            metrics.
    """

    def holds(history: Metrics) -> bool:
        rows: list[list[Any]] = [[metrics.get(name) for name in names] for metrics in history]
        sums = [sum(row) for row in rows if None not in row]
        return len(sums) >= 2 * SHORT and when(fmean(sums[:SHORT]), fmean(sums[-SHORT:]))

    return holds


_EQUAL_REWARDS = _is("zero_variance_groups", when=lambda _, last: last > 0.95)


def _no_signal(history: Metrics) -> bool:
    last = [metrics.get("updates") for metrics in history[-SHORT:]]
    return last == [0] * SHORT or _EQUAL_REWARDS(history)


RULES: dict[str, Rule] = {
    "entropy_collapse": Rule(
        _is("entropy", when=lambda first, last: last < 0.1 * first),
        "entropy is below a tenth of what it was: the policy has stopped exploring; raise "
        "objective.epsilon_high or objective.entropy_coef, or lower train.learning_rate",
    ),
    "entropy_explosion": Rule(
        _is("entropy", when=lambda first, last: last > max(2 * first, first + 0.5)),
        "entropy is more than twice what it was: updates destroy what the model knew; lower "
        "train.learning_rate or objective.entropy_coef, or leave S2T on (objective.s2t.enabled)",
    ),
    "no_signal": Rule(
        _no_signal,
        "more than 95 % of the groups have equal rewards, or ten steps had no update, so nothing "
        "is learned (but from reward.overlong_penalty): the problems are too hard or too easy, or "
        "the reward is constant, None or of weight 0; change data.source, reward.functions or "
        "reward.weights, or raise rollout.num_generations or rollout.max_completion_length",
    ),
    "silenced_share": Rule(
        _is("silenced_share", when=lambda _, last: last > 0.01),
        "S2T silences more than 1 % of the tokens, a hundred times the paper's share: lower "
        "objective.s2t.tau_p or objective.s2t.quantile",
    ),
    "sampler_gap": Rule(
        _is("sampler_gap_mean", when=lambda first, last: last > max(2 * first, 0.02)),
        "the engine's log-probabilities drift away from the trainer's: raise the precision of the "
        "engine (rollout.quantization, dtype), lower rollout.max_lag, or keep "
        "objective.sampler_correction on",
    ),
    "tools_fail": Rule(
        lambda history: bool(history) and history[-1].get("tools/failure_frequency") == 1,
        "every call of a tool fails, and only the model is told: the errors are in "
        "completions.jsonl (log.completions)",
    ),
    "ratio": Rule(
        _is("clip_low_share", "clip_high_share", when=lambda _, last: last > 0.2),
        "more than a fifth of the tokens are clipped: the policy moves too far within a step; "
        "lower train.learning_rate or raise train.mini_batch_size",
    ),
}


def new_symptoms(history: Metrics) -> list[str]:
    """Symptoms that hold after the last of these steps but not after the one before."""
    return [
        name for name, rule in RULES.items() if rule.holds(history) and not rule.holds(history[:-1])
    ]


class Symptoms(Callback):
    """Warns of new symptoms, writes them to `symptoms.jsonl`, and ends the run at some of them.

    Args:
        stop_on: names of the symptoms that end it.
        probe: `reward.probe`, whether the reward functions are called once more.

    Raises:
        InputError: there is no symptom of a name.
    """

    phase = Phase.RECORD

    def __init__(self, stop_on: Sequence[str], probe: str):
        names = RULES.keys() | CAUSES.keys()
        if unknown := set(stop_on) - names:
            raise InputError(f"stop_on={min(unknown)}: choose from {', '.join(sorted(names))}")
        self._stop_on = stop_on
        self._probe = probe
        self._first_groups: list[list[Completion]] | None = []  # None: they have been looked at

    def on_train_begin(self, run: Run) -> None:
        for line in read_lines(run.folder / SYMPTOMS_FILE):
            if line["step"] == run.progress.step:  # a run that had ended this way ends again
                self._stop(run, line["name"])
        if run.progress.step >= FIRST_LOOK or run.config.objective.distills:
            self._first_groups = None  # with a teacher a run learns without rewards

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        for name in new_symptoms(run.history):
            self._report(run, name, RULES[name].text)
            self._stop(run, name)
        groups = self._first_groups
        if groups is None or not run.accelerator.is_main_process:
            return
        groups += rollouts.sampled
        if run.progress.step >= FIRST_LOOK and len(groups) >= GROUPS:
            self._look(run, groups)
            self._first_groups = None

    def _look(self, run: Run, groups: list[list[Completion]]) -> None:
        """Report why the run cannot learn, if the first groups show it, and notes."""
        facts = look(groups)
        # Of several turns, an answer that nobody sampled has none.
        suits = run.rewards.runs_apart and not run.config.rollout.several_turns
        asks = self._probe == "on" or (self._probe == "auto" and suits)
        # An environment has gone on to a later batch, and cannot score an earlier one again.
        asks = asks and not groups[0][0].prompt.live
        if asks and not CAUSES["abstains"].holds(facts):
            facts = ask(facts, run, groups[-GROUPS:])  # not more than a step's, or hardly
        figures = facts._asdict()
        for name, rule in CAUSES.items():
            if rule.holds(facts):
                row = example(groups[-1], run.config)
                self._report(run, name, f"{rule.text.format(**figures)} | {row}")
                self._stop(run, name)
                break
        for name, rule in NOTES.items():
            if rule.holds(facts):
                self._report(run, f"note {name}", rule.text.format(**figures))

    def _report(self, run: Run, name: str, text: str) -> None:
        if run.accelerator.is_main_process:
            step = run.progress.step
            logger.warning("step %d, %s: %s", step, name, text)
            line = {"step": step, "name": name, "text": text}
            append_lines(run.folder / SYMPTOMS_FILE, [line])

    def _stop(self, run: Run, name: str) -> None:
        if name in self._stop_on:
            run.stop_reason = run.stop_reason or f"stop_on={name}"
