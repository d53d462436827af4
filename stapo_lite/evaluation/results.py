"""Results of evaluations as tables in Markdown, which read well on a terminal too."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from stapo_lite.errors import InputError, explained
from stapo_lite.evaluation.scores import paired_difference
from stapo_lite.files import read_object


def results_table(results: dict[str, Any]) -> str:
    """Scores in per cent."""
    rows = [["benchmark", "problems", "N", "avg@N", "95 % interval", "maj@N", "tokens", "cut off", "no answer"]]
    for name, s in [*results["benchmarks"].items(), ("average", results["average"])]:
        row = [name, str(s.get("problems", "")), str(s.get("samples", "")), _percent(s["avg"]), _range(s)]
        row += [_percent(s.get("maj")), f"{s['length']:.0f}" if "length" in s else ""]
        rows.append([*row, _percent(s.get("truncated")), _percent(s.get("no_answer"))])
        if "verified" in results["average"]:
            rows[-1] += [_percent(s.get("verified", s["avg"])), str(s.get("asked", 0 if "maj" in s else ""))]
    if "verified" in results["average"]:
        rows[0] += ["with verifier", "asked"]
    return markdown(rows)


def pass_table(results: dict[str, Any]) -> str:
    """pass@k in per cent."""
    benchmarks = results["benchmarks"]
    powers = sorted({int(k) for s in benchmarks.values() for k in s["pass"]})
    rows = [["benchmark", *(f"pass@{k}" for k in powers)]]
    for name, s in benchmarks.items():
        rows.append([name, *(_percent(s["pass"].get(str(k))) for k in powers)])
    return markdown(rows)


def compare(folders: Sequence[Path]) -> str:
    """avg@N of evaluations side by side, and how each differs from the first.

    Raises:
        InputError: there are fewer than two folders; one holds no results; no benchmark is common to all with
            the same problems.
    """
    if len(set(folders)) < 2:
        raise InputError("compare: give the output_dir of two evaluations or more")
    runs = {}
    for folder in folders:
        with explained(f"{folder}: no results of an evaluation", InputError):
            runs[str(folder)] = read_object(folder / "results.json")["rates"]
    first, *others = runs.values()
    names = [name for name in first if all(first[name].keys() == rates.get(name, {}).keys() for rates in others)]
    if not names:
        raise InputError("compare: no benchmark with the same problems in common; evaluate the same benchmarks")
    base = [list(first[name].values()) for name in names]
    rows = [["run", *names, "average", f"less {folders[0]}", "95 % interval"]]
    for label, run in runs.items():
        rates = [[run[name][problem] for problem in first[name]] for name in names]
        difference = paired_difference(base, rates)
        against = ["", ""] if run is first else [f"{100 * difference['avg']:+.1f}", _range(difference)]
        means = [fmean(values) for values in rates]
        rows.append([label, *map(_percent, means), _percent(fmean(means)), *against])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head, its columns aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _range(scores: dict[str, float]) -> str:
    return f"{100 * scores['low']:.1f} to {100 * scores['high']:.1f}"
