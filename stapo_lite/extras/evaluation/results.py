"""Results of evaluations as Markdown tables, aligned for a terminal."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from stapo_lite.errors import InputError, explained
from stapo_lite.extras.evaluation.scores import paired_difference
from stapo_lite.files import read_object
from stapo_lite.training.log import markdown

COLUMNS = (
    "benchmark", "problems", "N", "avg@N", "95 % interval", "maj@N", "tokens", "cut off",
    "no answer",
)  # fmt: skip


def results_table(results: dict[str, Any]) -> str:
    """Scores in per cent."""
    average = results["average"]
    rows = [list(COLUMNS)]
    for name, scores in [*results["benchmarks"].items(), ("average", average)]:
        length = scores.get("length")
        rows.append(
            [
                name,
                str(scores.get("problems", "")),
                str(scores.get("samples", "")),
                _percent(scores["avg"]),
                _range(scores),
                _percent(scores.get("maj")),
                "" if length is None else f"{length:.0f}",
                _percent(scores.get("truncated")),
                _percent(scores.get("no_answer")),
            ]
        )
        if "verified" in average:
            verified = scores.get("verified", scores["avg"])
            rows[-1] += [_percent(verified), str(scores.get("asked", ""))]
    if "verified" in average:
        rows[0] += ["with verifier", "asked"]
    return markdown(rows)


def pass_table(results: dict[str, Any]) -> str:
    """pass@k in per cent."""
    benchmarks = results["benchmarks"]
    powers = sorted({int(k) for scores in benchmarks.values() for k in scores["pass"]})
    rows = [["benchmark", *(f"pass@{k}" for k in powers)]]
    for name, scores in benchmarks.items():
        rows.append([name, *(_percent(scores["pass"].get(str(k))) for k in powers)])
    return markdown(rows)


def compare_evaluations(folders: Sequence[Path]) -> str:
    """avg@N of evaluations side by side, and each one's difference from the first.

    Args:
        folders: `output_dir` of each evaluation.

    Raises:
        InputError: there are fewer than two folders; one has no results; no benchmark has the same
            problems in all of them.
    """
    if len(set(folders)) < 2:
        raise InputError("compare: give the output_dir of two evaluations or more")
    runs = {}
    for folder in folders:
        with explained(f"{folder}: no results of an evaluation", InputError, KeyError):
            runs[str(folder)] = read_object(folder / "results.json")["rates"]
    first = runs[str(folders[0])]
    names = []
    for name, problems in first.items():
        if all(problems.keys() == run.get(name, {}).keys() for run in runs.values()):
            names.append(name)
    if not names:
        fix = "evaluate the same benchmarks"
        raise InputError(f"compare: no benchmark with the same problems in common; {fix}")
    base = [list(first[name].values()) for name in names]
    rows = [["run", *names, "average", f"less {folders[0]}", "95 % interval"]]
    for label, run in runs.items():
        rates = [[run[name][problem] for problem in first[name]] for name in names]
        means = [fmean(values) for values in rates]
        row = [label, *map(_percent, means), _percent(fmean(means)), "", ""]
        if run is not first:
            difference = paired_difference(base, rates)
            row[-2:] = [f"{100 * difference['avg']:+.1f}", _range(difference)]
        rows.append(row)
    return markdown(rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _range(scores: dict[str, float]) -> str:
    return f"{100 * scores['low']:.1f} to {100 * scores['high']:.1f}"
