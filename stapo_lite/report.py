"""A finished run at a glance: `python -m stapo_lite.report runs/x` prints a table and draws reward.png."""

import argparse
from pathlib import Path
from typing import Any

from stapo_lite.config import one_line_errors
from stapo_lite.tracking import run_metrics

ROWS = (
    # label, metric, format
    ("reward", "reward", "{:.3f}"),
    ("entropy [nats]", "entropy", "{:.3f}"),
    ("silenced share", "silenced_share", "{:.2e}"),
    ("completion length", "completion_length", "{:.1f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
)


def summary_table(metrics: list[dict[str, Any]], window: int = 5) -> str:
    """Means over the first `window` steps against the last `window`."""
    lines = [f"{'':<18} {f'first {window}':>10} {f'last {window}':>10}", "-" * 40]
    for label, name, form in ROWS:
        first, last = mean(metrics[:window], name), mean(metrics[-window:], name)
        cells = ["-" if value is None else form.format(value) for value in (first, last)]
        lines.append(f"{label:<18} {cells[0]:>10} {cells[1]:>10}")
    seconds = sum(line["seconds_step"] for line in metrics)
    lines.append(f"{len(metrics)} steps in {seconds:.0f} s")
    return "\n".join(lines)


def mean(metrics: list[dict[str, Any]], name: str) -> float | None:
    """The mean over the steps that have the metric; None where none has."""
    values = [line[name] for line in metrics if line[name] is not None]
    return sum(values) / len(values) if values else None


def plot(metrics: list[dict[str, Any]], path: Path) -> None:
    """Reward and entropy over the steps, as PNG."""
    from matplotlib.figure import Figure

    steps = [line["step"] for line in metrics]
    figure = Figure(figsize=(7, 5), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    for axis, name, label, colour in zip(
        panels, ("reward", "entropy"), ("mean reward", "entropy [nats]"), ("#0072b2", "#d55e00"), strict=True
    ):
        values = [float("nan") if line[name] is None else line[name] for line in metrics]
        axis.plot(steps, values, color=colour, marker=".", linewidth=1.2)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=130)


def write_report(run_folder: Path) -> str:
    """Draw `reward.png` into the run folder; return the table.

    Raises:
        InputError: the folder holds no metrics.
    """
    metrics = run_metrics(run_folder)
    plot(metrics, run_folder / "reward.png")
    return f"{summary_table(metrics)}\nplot: {run_folder / 'reward.png'}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.report", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    run_folder = parser.parse_args().run_folder
    with one_line_errors():
        print(write_report(run_folder))


if __name__ == "__main__":
    main()
