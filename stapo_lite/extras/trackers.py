"""Accelerate's trackers: TensorBoard, Weights & Biases, Trackio."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from stapo_lite.config import flatten
from stapo_lite.errors import one_line
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.log import completion_line, kept_completions, shorten
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Rollouts

logger = logging.getLogger(__name__)


class Trackers(Callback):
    """Sends a run's metrics, completions and evaluations to the accelerator's trackers
    (`log.report_to`)."""

    phase = Phase.RECORD

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator

    def on_train_begin(self, run: Run) -> None:
        settings = {key: str(value) for key, value in flatten(run.config.model_dump()).items()}
        with self._or_untracked():
            self._accelerator.init_trackers(run.config.log.project, settings)

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        step = metrics["step"]
        values = {name: value for name, value in metrics.items() if value is not None}
        del values["step"]
        with self._or_untracked():
            self._accelerator.log(values, step=step)
            if completions := kept_completions(rollouts, run.config.log):
                self._log_completions(step, completions)

    def _log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Log completions as traces to Trackio, and as a table to trackers that support tables."""
        lines = [completion_line(step, completion) for completion in completions]
        cells = [[shorten(str(value)) for value in line.values()] for line in lines]
        for tracker in self._accelerator.trackers:
            if tracker.name == "trackio":
                tracker.log({"completions": list(map(trace, completions, lines))}, step=step)
            elif hasattr(tracker, "log_table"):
                tracker.log_table("completions", columns=list(lines[0]), data=cells, step=step)

    def on_evaluate(self, run: Run, step: int, results: dict[str, Any] | None) -> None:
        if results is None:  # not the main process
            return
        values = {}
        for name, value in results.items():
            if name.startswith("reward") and value is not None:
                values[f"evaluation/{name}"] = value
        if "benchmarks" in results:
            scores = results["benchmarks"] | {"average": results["average"]}
            for name, score in scores.items():
                values[f"evaluation/{name}"] = score["avg"]
        with self._or_untracked():
            self._accelerator.log(values, step=step)

    def close(self) -> None:
        with self._or_untracked():
            for tracker in self._accelerator.trackers:
                tracker.finish()

    @contextmanager
    def _or_untracked(self) -> Iterator[None]:
        """Warn and go on without trackers if they fail, for example because the connection is lost
        or a folder cannot be written."""
        try:
            yield
        except Exception as error:
            message = "log.report_to: training goes on without trackers (%s)"
            logger.warning(message, one_line(error))
            self._accelerator.trackers = []


def trace(completion: Completion, line: dict[str, Any]) -> Any:
    """A completion for Trackio's viewer: its messages, with its line of the log as metadata."""
    import trackio

    question = completion.prompt.prompt
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    answer = completion.messages or [{"role": "assistant", "content": completion.text}]
    return trackio.Trace([*question, *answer], metadata=line)
