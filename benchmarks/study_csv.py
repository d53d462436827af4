"""The results of a study as CSV files.

`STUDY/METHOD.csv` has a row for each seed and step; step 0 is the untrained model. What the
adapter did on the held-out prompts stands in the columns `held_out_...`, which are empty on steps
without an evaluation. `STUDY-runs.csv` has a row for each run: its overrides of `experiments.yaml`,
the commit, the hardware and the versions.

A finished run leaves `result.json`, with its rows of both, in its work folder.
"""

import argparse
import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stapo_lite.files import read_lines, read_object, write_text

RESULTS = Path(__file__).parent / "results"
RESULT = "result.json"
METRICS = (
    "reward",
    "sampled_nll",
    "entropy",
    "tau_h",
    "candidate_share",
    "spurious_share",
    "spurious_gradient_share",
    "silenced_share",
    "updates",
    "skipped_updates",
    "seconds_step",
)
"""Metrics of a training step that are reported (docs/metrics.md)."""
HELD_OUT = ("reward", "greedy_reward", "right_share", "nll", "base_nll", "entropy", "wrong_sums")
"""Results on the held-out prompts that are reported (`experiments.judge`, `wrong_sums`)."""
STEP_COLUMNS = ("method", "seed", "step", *METRICS, *(f"held_out_{name}" for name in HELD_OUT))
RUN_COLUMNS = (
    "method",
    "seed",
    "overrides",
    "commit",
    "hardware",
    "processes",
    "engine",
    "prompts",
    "stapo_lite",
    "torch",
    "transformers",
    "peft",
    "accelerate",
)
"""From `commit` on as in a run's `environment.json`; `prompts` is a digest of them."""
Row = dict[str, Any]


def add_results_option(parser: argparse.ArgumentParser) -> None:
    """Let a script take the folder of the CSVs."""
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="folder of the CSVs; default: benchmarks/results",
    )


def steps_paths(results: Path, study: str) -> list[Path]:
    """The CSVs of a study's steps, one for each method."""
    return sorted((results / study).glob("*.csv"))


def runs_path(results: Path, study: str) -> Path:
    """The CSV of a study's runs."""
    return results / f"{study}-runs.csv"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file as text; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Replace a CSV file atomically. Keys that are no columns are left out, None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def run_key(row: Row) -> tuple[str, int]:
    """Method and seed."""
    return row["method"], int(row["seed"])


def finished_runs(results: Path, study: str) -> set[tuple[str, int]]:
    """Method and seed of the runs that the CSVs hold."""
    return {run_key(row) for row in read_rows(runs_path(results, study))}


def keep_result(folder: Path, run: Row) -> None:
    """Write the result of a finished run to its work folder.

    Args:
        folder: the work folder, with `metrics.jsonl`, `held_out.jsonl` and `environment.json`.
        run: method, seed, overrides and commit.
    """
    steps: dict[int, Row] = {}
    for line in read_lines(folder / "metrics.jsonl"):
        steps[line["step"]] = {name: five_digits(line.get(name)) for name in METRICS}
    for look in read_lines(folder / "held_out.jsonl"):
        step = steps.setdefault(look["step"], {})
        for name in HELD_OUT:
            step[f"held_out_{name}"] = five_digits(look.get(name))
    first = {"method": run["method"], "seed": run["seed"]}
    rows = [first | {"step": step} | steps[step] for step in sorted(steps)]
    environment = read_object(folder / "environment.json")
    write_text(folder / RESULT, json.dumps({"run": environment | run, "steps": rows}))


def five_digits(value: Any) -> Any:
    """Round a float to five significant digits, with which twelve runs of 800 steps stay below a
    megabyte; leave anything else as it is."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def collect_results(results: Path, study: str, work: Path) -> None:
    """Add the finished runs in a study's work folder to its CSVs.

    One process should call this at a time. If two do, one may drop a run that the other has just
    added; the next call adds it again from the work folder. A run is finished if it is in the CSV
    of the runs, which is written last.
    """
    runs: dict[tuple[str, int], Row] = {}
    for row in read_rows(runs_path(results, study)):
        runs[run_key(row)] = row
    steps: dict[tuple[str, int], list[Row]] = {}
    for path in steps_paths(results, study):
        for row in read_rows(path):
            steps.setdefault(run_key(row), []).append(row)
    known = len(runs)
    for path in sorted(work.glob(f"*/{RESULT}")):
        result = read_object(path)
        key = run_key(result["run"])
        if key not in runs:
            runs[key] = result["run"]
            steps[key] = result["steps"]
    if len(runs) == known:
        return
    order = sorted(runs)
    for method in {method for method, _ in order}:
        rows = [row for key in order if key[0] == method for row in steps[key]]
        write_rows(results / study / f"{method}.csv", STEP_COLUMNS, rows)
    write_rows(runs_path(results, study), RUN_COLUMNS, [runs[key] for key in order])
