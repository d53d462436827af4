"""The one way in for what a run can do without: trackers, evaluations, uploads, your own.

    from stapo_lite import Callback, Trainer

    class StopAtReward(Callback):
        def __init__(self, enough):
            self.enough = enough

        def on_step_end(self, run, metrics, rollouts):
            if (metrics["reward"] or 0.0) >= self.enough:
                run.stop_reason = f"reward {metrics['reward']:.2f}"

    Trainer(config="configs/quickstart.yaml", callbacks=[StopAtReward(0.95)]).train()

The loop calls them in the order of `assemble.make_callbacks`, the user's own last, in every
process. A callback that raises ends the run with an error that names it. The seconds of a step
leave them out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.training.run import Run
from stapo_lite.types import Rollouts, Update


class Callback:
    """Does nothing; override what you need. Names are those of transformers' `TrainerCallback` if
    it has one for the event."""

    def on_train_begin(self, run: Run) -> None:
        """The run is open: everything is loaded, and its folder is noted in."""

    def on_step_begin(self, run: Run, step: int) -> None:
        """The engine is awake and has the adapter that this step samples from."""

    def on_mini_batches(self, run: Run, batches: Sequence[MiniBatch]) -> None:
        """A step's completions are cut into mini-batches, of which this process has a share. Their
        token advantages may be changed."""

    def on_update(self, run: Run, batch: MiniBatch, update: Update) -> None:
        """An update on a mini-batch has ended; this process has a share of it. The policy is as it
        was unless `update.changed`. `update.tokens` is dropped afterwards."""

    def on_evaluate(self, run: Run, step: int, results: dict[str, Any] | None) -> None:
        """An evaluation of the adapter after `step` has ended; its results are on the main process,
        None elsewhere."""

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        """A step has ended. `metrics` are the same in every process (docs/metrics.md); setting
        `run.stop_reason` in every process ends the run after this step."""

    def on_save(self, run: Run, folder: Path) -> None:
        """A new checkpoint was written to `folder`. Called on the main process alone."""

    def on_train_end(self, run: Run) -> None:
        """The run has come to its end, or its caller has seen enough: the adapter is written. Not
        called if an error or a signal ended it."""

    def close(self) -> None:
        """Let go of what the callback holds. Called last, whatever ended the run, even if it has
        not begun."""
