"""A finished run at a glance: a table, and reward.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lite.training.charts import Curve, lines, png
from stapo_lite.training.tracking import run_metrics, show

ROWS = (
    # label, metric, format
    ("reward", "reward", ".3f"),
    ("entropy [nats]", "sampled_nll", ".3f"),
    ("silenced share", "silenced_share", ".2e"),
    ("completion length", "completion_length", ".1f"),
    ("tokens/s", "tokens_per_second", ".0f"),
)


def summary_table(metrics: list[dict[str, Any]], window: int = 5) -> str:
    """Means over the first `window` steps against the last `window`."""
    lines = [f"{'':<18} {f'first {window}':>10} {f'last {window}':>10}", "-" * 40]
    for label, name, form in ROWS:
        first, last = (show(mean(part, name), form) for part in (metrics[:window], metrics[-window:]))
        lines.append(f"{label:<18} {first:>10} {last:>10}")
    seconds = sum(line["seconds_step"] for line in metrics)
    lines.append(f"{len(metrics)} steps in {seconds:.0f} s")
    return "\n".join(lines)


def mean(metrics: Sequence[dict[str, Any]], name: str) -> float | None:
    """The mean over the steps that have the metric; None where none has."""
    values = [line[name] for line in metrics if line[name] is not None]
    return sum(values) / len(values) if values else None


def write_report(run_folder: Path) -> str:
    """Draw `reward.png` into the run folder; return the table.

    Raises:
        InputError: the folder holds no metrics.
    """
    metrics, path = run_metrics(run_folder), run_folder / "reward.png"
    steps = [line["step"] for line in metrics]
    path.write_bytes(png(lines, [Curve("reward", steps, [line["reward"] for line in metrics])], "mean reward"))
    return f"{summary_table(metrics)}\nplot: {path}"
