"""A run at a glance: a table, reward.png, and its worst completions."""

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lite.errors import InputError
from stapo_lite.extras.audit.charts import Curve, lines, png
from stapo_lite.files import stream_lines
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.folder import COMPLETIONS_FILE, run_metrics
from stapo_lite.training.lifecycle import full_disk_is_a_run_error
from stapo_lite.training.log import show, worst_first
from stapo_lite.training.run import Run

ROWS = (
    # label, metric, format
    ("reward", "reward", ".3f"),
    ("entropy [nats]", "sampled_nll", ".3f"),
    ("silenced share", "silenced_share", ".2e"),
    ("completion length", "completion_length", ".1f"),
    ("tokens/s", "tokens_per_second", ".0f"),
)


def summary_table(metrics: list[dict[str, Any]], window: int = 5) -> str:
    """A table of means over the first and the last `window` steps."""
    lines = [f"{'':<18} {f'first {window}':>10} {f'last {window}':>10}", "-" * 40]
    for label, name, form in ROWS:
        first = show(mean(metrics[:window], name), form)
        last = show(mean(metrics[-window:], name), form)
        lines.append(f"{label:<18} {first:>10} {last:>10}")
    seconds = sum(line["seconds_step"] for line in metrics)
    lines.append(f"{len(metrics)} steps in {seconds:.0f} s")
    return "\n".join(lines)


def mean(metrics: Sequence[dict[str, Any]], name: str) -> float | None:
    """The mean over the steps that have the metric; None if none has."""
    values = [line[name] for line in metrics if line[name] is not None]
    return sum(values) / len(values) if values else None


def write_report(run_folder: Path) -> str:
    """Draw `reward.png` into the run folder; return the table.

    Raises:
        InputError: the folder holds no metrics.
    """
    metrics, path = run_metrics(run_folder), run_folder / "reward.png"
    steps = [line["step"] for line in metrics]
    rewards = [line["reward"] for line in metrics]
    path.write_bytes(png(lines, [Curve("reward", steps, rewards)], "mean reward"))
    return f"{summary_table(metrics)}\nplot: {path}"


def show_completions(folder: Path, worst: int, step: int | None) -> str:
    """The kept completions with the lowest rewards, unjudged ones first; empty if none are kept.

    Args:
        worst: how many to show.
        step: show only completions of this step; None for all.

    Raises:
        InputError: none of this step are kept.
    """
    kept = stream_lines(folder / COMPLETIONS_FILE)
    wanted = (line for line in kept if step in (None, line["step"]))
    lines = heapq.nsmallest(worst, wanted, key=lambda line: worst_first(line["reward"]))
    if step is not None and not lines:
        raise InputError(f"{folder}: no completions of step {step} were kept; see log.completions")
    return "\n\n".join(map(_show_line, lines))


def _show_line(line: dict[str, Any]) -> str:
    parts = [f"step {line['step']}", f"reward {show(line['reward'])}"]
    if len(line["scores"]) > 1:
        parts[1] += "".join(f", {name} {score:.3f}" for name, score in line["scores"].items())
    parts.append(f"advantage {line['advantage']:.3f}")
    parts.append(f"{line['tokens']} tokens" + (", cut off" if line["truncated"] else ""))
    return f"{' | '.join(parts)}\n> {line['prompt']}\n{line['text']}"


class Report(Callback):
    """Prints the table at the end of a run."""

    def on_train_end(self, run: Run) -> None:
        if run.accelerator.is_main_process:
            with full_disk_is_a_run_error(run.folder):
                print(write_report(run.folder))
