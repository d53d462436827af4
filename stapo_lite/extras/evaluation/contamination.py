"""Rows of a training set that hold a benchmark's problem, or most of it."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stapo_lite.config import BENCHMARK_NAMES, Data
from stapo_lite.data.prompts import load_rows, prompt_text
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.benchmarks import Problem, load_benchmark
from stapo_lite.files import check_writable, write_out


def load_problems(benchmarks: Sequence[str]) -> list[Problem]:
    """The problems of benchmarks, `all` for the six.

    Raises:
        InputError: one of them cannot be read.
    """
    names = BENCHMARK_NAMES if list(benchmarks) == ["all"] else benchmarks
    return [problem for name in names for problem in load_benchmark(name)[1]]


class Overlap(NamedTuple):
    """A row that holds a problem, or most of it."""

    row: int
    problem: Problem
    share: float
    """Share of the problem's n-grams that the row holds."""


def find_overlaps(
    texts: Iterable[str], problems: Sequence[Problem], n: int = 8, share: float = 0.6
) -> list[Overlap]:
    """Find pairs of a text and a problem where the text holds at least `share` of the problem's
    word `n`-grams.

    Words are lower-cased runs of letters and digits. A problem of fewer than `n` words counts as
    one n-gram.
    """
    grams = [_grams(problem.text, n) for problem in problems]
    holders = defaultdict(list)
    for number, own in enumerate(grams):
        for gram in filter(None, own):
            holders[gram].append(number)
    lengths = {len(gram) for gram in holders}
    overlaps = []
    for row, text in enumerate(texts):
        hits: Counter[int] = Counter()
        there = set().union(*(_grams(text, length) for length in lengths))
        for gram in holders.keys() & there:
            hits.update(holders[gram])
        for number, count in sorted(hits.items()):
            held = count / len(grams[number])
            if held >= share:
                overlaps.append(Overlap(row, problems[number], held))
    return overlaps


def _grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", text.lower())
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def check_dataset(
    data: Data, column: str | None, benchmarks: Sequence[str], out: Path | None
) -> str:
    """Report which share of each benchmark's problems overlaps with a data set, and every pair of
    row and problem.

    Args:
        column: column of the prompts; by default `prompt`, `problem` or `question`.
        out: file for the rows without overlap.

    Raises:
        InputError: rows or a benchmark cannot be read; there is no such column; `out` cannot be
            written.
    """
    rows, problems = load_rows(data), load_problems(benchmarks)
    usual = [column] if column else ["prompt", "problem", "question"]
    columns = [name for name in usual if name in rows[0]]
    if not columns:
        there = ", ".join(rows[0])
        raise InputError(f"--prompt-column: {data.source} has the columns {there}; name one")
    if out:
        check_writable(out)
    texts = [prompt_text(row.get(columns[0])) for row in rows]
    overlaps = find_overlaps(texts, problems)
    lines = []
    held = Counter(problem.benchmark for problem in {overlap.problem for overlap in overlaps})
    for name, total in Counter(problem.benchmark for problem in problems).items():
        percent = f"{100 * held[name] / total:.1f} %"
        lines.append(f"{name:<14} {held[name]:>4} of {total:>4} problems ({percent})")
    for row, problem, share in overlaps:
        start = " ".join(texts[row].split())[:80]
        pair = f"{problem.benchmark} {problem.id}: {100 * share:.0f} % in row {row + 1}"
        lines.append(f"  {pair}: {start}")
    dropped = {overlap.row for overlap in overlaps}
    lines.append(f"{len(dropped)} of {len(rows)} rows overlap a benchmark")
    if silent := texts.count(""):
        lines.append(f"{silent} rows were not compared: no text in {columns[0]}")
    if out:
        clean = [row for number, row in enumerate(rows) if number not in dropped]
        write_out(out, clean)
        lines.append(f"{len(clean)} rows: {out}")
    return "\n".join(lines)


def find_contaminated(rows: Sequence[Any], d: Data, show: Callable[[str], None]) -> set[int]:
    """Indices of rows that overlap a problem of `data.drop_contaminated`'s benchmarks.

    Raises:
        InputError: a benchmark cannot be read, or no row is left.
    """
    try:
        problems = load_problems(d.drop_contaminated or [])
    except InputError as error:
        fix = "or set data.drop_contaminated=false"
        raise InputError(f"data.drop_contaminated: {error}; {fix}") from None
    overlaps = find_overlaps((prompt_text(row.get(d.prompt_column)) for row in rows), problems)
    contaminated = {overlap.row for overlap in overlaps}
    if len(contaminated) == len(rows):
        raise InputError(
            f"data.drop_contaminated: every row of {d.source} overlaps a benchmark: choose other "
            "data"
        )
    held = len({overlap.problem for overlap in overlaps})
    show(f"left out {len(contaminated)} rows of {d.source}, which hold {held} benchmark problems")
    return contaminated
