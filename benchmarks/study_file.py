"""The results of a study, one Parquet file.

`STUDY.parquet` has a row for each method, seed and step; step 0 is the untrained model. Results on
the held-out prompts stand in the columns `held_out_...`, which are empty on steps without an
evaluation. Each row also has what its run began with: the overrides of the config, the commit, the
hardware and the versions. Compressed, such repetitions take no space.

A finished run leaves `result.json`, with its rows, in its work folder.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame

from stapo_lite.files import read_lines, read_object, write_text

RESULTS = Path(__file__).parent / "results"
RESULT = "result.json"
METRICS = (
    "reward",
    "sampled_nll",
    "entropy",
    "spurious_share",
    "spurious_gradient_share",
    "silenced_share",
)
"""Metrics of a training step that are reported (docs/metrics.md)."""
HELD_OUT = ("reward", "greedy_reward", "right_share", "nll", "base_nll", "entropy", "wrong_sums")
"""Results on the held-out prompts that are reported (`experiments.judge`, `wrong_sums`)."""
RUN_COLUMNS = (
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
COLUMNS = (
    "method",
    "seed",
    "step",
    *METRICS,
    *(f"held_out_{name}" for name in HELD_OUT),
    *RUN_COLUMNS,
)
Row = dict[str, Any]


def add_results_option(parser: argparse.ArgumentParser) -> None:
    """Let a script take the folder of the studies' files."""
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="folder of the studies' Parquet files; default: benchmarks/results",
    )


def study_path(results: Path, study: str) -> Path:
    """The file of a study."""
    return results / f"{study}.parquet"


def read_rows(path: Path) -> list[Row]:
    """Rows of a study, each without the columns that it has no value for; none if there is no such
    file."""
    if not path.exists():
        return []
    rows = pd.read_parquet(path).to_dict("records")
    return [{name: value for name, value in row.items() if pd.notna(value)} for row in rows]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a study's file atomically. Keys that are no columns are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    table = DataFrame(rows, columns=COLUMNS)
    table.to_parquet(partial, index=False, compression="zstd", compression_level=22)
    partial.replace(path)


def run_key(row: Row) -> tuple[str, int]:
    """Method and seed."""
    return row["method"], row["seed"]


def finished_runs(results: Path, study: str) -> set[tuple[str, int]]:
    """Method and seed of the runs that a study's file holds."""
    return {run_key(row) for row in read_rows(study_path(results, study))}


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
    environment = read_object(folder / "environment.json")
    rows = [environment | run | {"step": step} | steps[step] for step in sorted(steps)]
    write_text(folder / RESULT, json.dumps({"rows": rows}))


def five_digits(value: Any) -> Any:
    """Round a float to five significant digits, whose file is a third as large; leave anything else
    as it is."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def collect_results(results: Path, study: str, work: Path) -> None:
    """Add the finished runs in a study's work folder to its file.

    One process should call this at a time. If two do, one may drop a run that the other has just
    added; the next call adds it again from the work folder.
    """
    path = study_path(results, study)
    rows = read_rows(path)
    known = {run_key(row) for row in rows}
    new = []
    for result in work.glob(f"*/{RESULT}"):
        run = read_object(result)["rows"]
        if run_key(run[0]) not in known:
            new += run
    if new:
        write_rows(path, sorted([*rows, *new], key=lambda row: (*run_key(row), row["step"])))
