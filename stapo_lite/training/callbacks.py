"""Hooks for everything optional in a run: trackers, evaluations, uploads, your own code.

    from stapo_lite import Callback, Trainer

    class StopAtReward(Callback):
        def __init__(self, enough):
            self.enough = enough

        def on_step_end(self, run, metrics, rollouts):
            if (metrics.get("reward") or 0.0) >= self.enough:
                run.stop_reason = f"reward {metrics['reward']:.2f}"

    Trainer(config="config.yaml", callbacks=[StopAtReward(0.95)]).train()

The loop calls callbacks in every process. Each has a phase, and those of an earlier phase are
called first, so that your callback sees the metrics and files of all others. One that raises ends
the run with an error that names it. A step's seconds exclude them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stapo_lite.method.tokens import Tokens
from stapo_lite.types import Rollouts, Update

if TYPE_CHECKING:  # a run calls callbacks
    from stapo_lite.training.run import Run


class Phase(IntEnum):
    """When a callback's turn comes among the others at the same event."""

    MEASURE = 1
    """It adds to a step's metrics."""
    RECORD = 2
    """It reads the metrics, and writes what is new to the run folder or a tracker."""
    PUBLISH = 3
    """It reads what the others have written."""
    LAST = 4
    """Yours."""


class Callback:
    """Does nothing; override what you need. Names are those of transformers' `TrainerCallback` if
    it has one for the event."""

    phase: ClassVar[Phase] = Phase.LAST

    def on_train_begin(self, run: Run) -> None:
        """Everything is loaded, and the run folder has its config and environment."""

    def on_step_begin(self, run: Run, step: int) -> None:
        """The engine is awake and has the adapter that this step samples from. If they share a
        card, the policy's adapter waits in host memory until the engine sleeps again."""

    def on_mini_batches(self, run: Run, batches: Sequence[Tokens]) -> None:
        """A step's completions are cut into mini-batches; `batches` has this process's share of
        each. A teacher changes their `advantages` (`objective.distills`): without one, completions
        with a group advantage of 0 stay out of the update."""

    def on_update(self, run: Run, tokens: Tokens, update: Update) -> None:
        """An update has ended; `tokens` is this process's share of its mini-batch. The policy is
        unchanged unless `update.changed`. `update.masks` and `update.outputs` are dropped
        afterwards."""

    def on_evaluate(self, run: Run, step: int, results: dict[str, Any] | None) -> None:
        """An evaluation of the adapter after `step` has ended; its results are on the main process,
        None elsewhere."""

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        """A step has ended. `metrics` are the same in every process (docs/metrics.md) but for
        seconds and memory; setting `run.stop_reason`, in any process, ends the run after this
        step."""

    def on_save(self, run: Run, folder: Path) -> None:
        """A new checkpoint was written to `folder`. Called on the main process alone."""

    def on_train_end(self, run: Run) -> None:
        """The run has ended, or its caller stopped early; the adapter is written. Not called if an
        error or a signal ended the run, or if no step was taken."""

    def close(self) -> None:
        """Release resources. Called at the end, before the model goes, whatever ended the run,
        even if it never began."""


def in_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """Callbacks by phase. Within a phase their order carries no meaning, except that yours stay in
    the order in which you gave them."""
    return sorted(callbacks, key=lambda callback: callback.phase)
