"""Output of a run that a person reads: the metrics file, one line per step, samples, accelerate's trackers."""

import heapq
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from stapo_lite.data.prompts import prompt_text
from stapo_lite.errors import InputError, one_line
from stapo_lite.evaluation.results import markdown, results_table
from stapo_lite.files import append_lines, read_lines, size_until, stream_lines
from stapo_lite.types import Completion

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
ENVIRONMENT_FILE = "environment.json"
TOKENS_FILE = "tokens.jsonl"
QUADRANTS_FILE = "quadrants.jsonl"
LOGS = (METRICS_FILE, EVALUATIONS_FILE, COMPLETIONS_FILE, TOKENS_FILE, QUADRANTS_FILE)
"""Files that get lines while a run goes on."""


class RunLog:
    """Writes a run's metrics; its files and the terminal are the main process's.

    Args:
        start_step: the last step before a run is resumed; later lines of its files are dropped. 0 for a new run.

    Attributes:
        evaluated: steps after which there was an evaluation.
    """

    def __init__(self, folder: Path, max_steps: int, start_step: int, accelerator: Accelerator):
        self._accelerator = accelerator
        self._max_steps = max_steps
        if accelerator.is_main_process:
            # Drop what the steps to come will write again; of the token log, too, even where it is off by now.
            last = start_step or -1  # an evaluation may have come before the first step
            sizes = {path: size_until(path, last) for name in LOGS if (path := folder / name).exists()}
            for path, size in sizes.items():
                os.truncate(path, size)
        accelerator.wait_for_everyone()
        self._folder = folder
        self.evaluated = {line["step"] for line in read_lines(folder / EVALUATIONS_FILE)}

    def start_trackers(self, project: str, config: dict[str, str]) -> None:
        """Start accelerate's trackers."""
        with self._or_untracked():
            self._accelerator.init_trackers(project, config)

    def _track(self, values: dict[str, Any], step: int) -> None:
        with self._or_untracked():
            self._accelerator.log(values, step=step)

    def close(self) -> None:
        """Finish the trackers."""
        with self._or_untracked():
            for tracker in self._accelerator.trackers:
                tracker.finish()

    @contextmanager
    def _or_untracked(self) -> Iterator[None]:
        """Go on without trackers, with a warning, where they fail: a service out of reach, a folder that cannot be
        written."""
        try:
            yield
        except Exception as error:
            logger.warning("log.report_to: training goes on without trackers (%s)", one_line(error))
            self._accelerator.trackers = []

    def step(self, metrics: dict[str, float | int | None]) -> None:
        """Append one line to the file, print the compact one, and tell the trackers."""
        append_lines(self._folder / METRICS_FILE, [metrics])
        tqdm.write(step_line(metrics, self._max_steps))
        known = {name: value for name, value in metrics.items() if value is not None and name != "step"}
        self._track(known, int(metrics["step"] or 0))

    def evaluation(self, step: int, results: dict[str, Any] | None) -> None:
        """Note an evaluation after a step: in a file of its own, on the terminal, and for the trackers."""
        self.evaluated.add(step)
        if results is None:  # not the main process
            return
        append_lines(self._folder / EVALUATIONS_FILE, [{"step": step} | results])
        values = {name: value for name, value in results.items() if name.startswith("reward") and value is not None}
        for name, value in values.items():
            tqdm.write(f"held out after step {step}: {name} {value:.3f}")
        if "benchmarks" in results:
            tqdm.write(f"benchmarks after step {step}\n{results_table(results)}")
            scores = results["benchmarks"] | {"average": results["average"]}
            values |= {name: score["avg"] for name, score in scores.items()}
        self._track({f"evaluation/{name}": value for name, value in values.items()}, step)

    def completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Keep completions in a file of their own, and as a table with the trackers that have tables or texts."""
        if not completions:
            return
        lines = [completion_line(step, completion) for completion in completions]
        append_lines(self._folder / COMPLETIONS_FILE, lines)
        cells = [[_shorten(str(value)) for value in line.values()] for line in lines]
        with self._or_untracked():
            for tracker in self._accelerator.trackers:
                if hasattr(tracker, "log_table"):
                    tracker.log_table("completions", columns=list(lines[0]), data=cells, step=step)
                elif tracker.name == "tensorboard":
                    rows = [[cell.replace("|", "\\|") for cell in row] for row in cells]
                    tracker.log({"completions": markdown([list(lines[0]), *rows])}, step=step)

    def samples(self, step: int, group: Sequence[Completion]) -> None:
        """Print the best and the worst completion of a prompt."""
        group = sorted(group, key=lambda c: -math.inf if c.reward is None else c.reward)
        lines = [f"  samples of step {step} | prompt: {_shorten(prompt_text(group[0].prompt.prompt))}"]
        for completion in (group[-1], group[0]):
            lines.append(f"    reward {show(completion.reward)} | {_shorten(completion.text)}")
        tqdm.write("\n".join(lines))


def completion_line(step: int, completion: Completion) -> dict[str, Any]:
    """A line of completions.jsonl."""
    return {
        "step": step,
        "prompt": prompt_text(completion.prompt.prompt),
        "text": completion.text,
        "reward": completion.reward,
        "scores": completion.scores,
        "advantage": completion.advantage,
        "tokens": len(completion.token_ids),
        "truncated": completion.truncated,
    }


def show_completions(folder: Path, worst: int, step: int | None) -> str:
    """The completions of a run with the lowest rewards, those that nobody judged first; nothing if none are kept.

    Args:
        step: of this step alone; None for all.

    Raises:
        InputError: none of the step are kept.
    """
    kept = (line for line in stream_lines(folder / COMPLETIONS_FILE) if step in (None, line["step"]))
    lines = heapq.nsmallest(worst, kept, key=lambda line: -math.inf if line["reward"] is None else line["reward"])
    if step is not None and not lines:
        raise InputError(f"{folder}: no completions of step {step} were kept; see log.completions")
    parts = []
    for line in lines:
        scores = "".join(f", {name} {score:.3f}" for name, score in line["scores"].items() if len(line["scores"]) > 1)
        cut = ", cut off" if line["truncated"] else ""
        parts.append(
            f"step {line['step']} | reward {show(line['reward'])}{scores} | advantage {line['advantage']:.3f} | "
            f"{line['tokens']} tokens{cut}\n> {line['prompt']}\n{line['text']}"
        )
    return "\n\n".join(parts)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run; none where it has no metrics file."""
    return read_lines(folder / METRICS_FILE)


def run_metrics(folder: Path) -> list[dict[str, Any]]:
    """The same of a folder that must hold a run.

    Raises:
        InputError: there are none.
    """
    metrics = read_metrics(folder)
    if not metrics:
        raise InputError(f"{folder}: no metrics.jsonl with steps in it; is it a run folder?")
    return metrics


def step_line(m: dict[str, Any], max_steps: int) -> str:
    """One compact line of a step's metrics for a person."""
    no_update = "no update: not finite" if m["skipped_updates"] else "no update: no token to train"
    parts = [
        f"step {m['step']:>{len(str(max_steps))}}/{max_steps}",
        f"reward {show(m['reward'])}",
        f"entropy {show(m['entropy'])}",
        f"silenced {show(m['silenced_share'], '.3%').replace('%', ' %')}",
        f"length {show(m['completion_length'], '.1f')}",
        f"grad {show(m['grad_norm'])}" if m["updates"] else no_update,
        f"{m['tokens_per_second']:.0f} tok/s",
        f"rollout {m['seconds_rollout']:.1f} s, update {m['seconds_update']:.1f} s",
    ]
    if m["sampling_rounds"] > 1:
        parts.insert(1, f"{m['sampling_rounds']} rounds for {m['batch_groups']} groups")
    return " | ".join(parts)


def show(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}"


def _shorten(text: str, limit: int = 300) -> str:
    text = text.strip().replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
