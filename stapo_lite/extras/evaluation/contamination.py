"""Find the rows of a training set that hold a problem of a benchmark, or most of it."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stapo_lite.config import BENCHMARK_NAMES, Data
from stapo_lite.data.messages import prompt_text
from stapo_lite.errors import InputError, explained
from stapo_lite.extras.evaluation.benchmarks import load_benchmark

WORDS = 8
"""Length of an n-gram."""
SHARE = 0.6
"""Share of a problem's n-grams from which on a row counts as holding the problem."""


def find_contaminated(rows: Sequence[Any], data: Data, show: Callable[[str], None]) -> set[int]:
    """Indices of rows that overlap a problem of `data.drop_contaminated`'s benchmarks.

    Raises:
        InputError: a benchmark cannot be read.
    """
    names = data.drop_contaminated or []
    if names == ["all"]:
        names = BENCHMARK_NAMES
    with explained("data.drop_contaminated", InputError):
        problems = [row["problem"] for name in names for row in load_benchmark(name)[2]]
    contaminated = find_overlaps(
        (prompt_text(row.get(data.prompt_column)) for row in rows), problems
    )
    show(f"left out {len(contaminated)} rows of {data.source}, which hold benchmark problems")
    return contaminated


def find_overlaps(texts: Iterable[str], problems: Sequence[str]) -> set[int]:
    """Indices of the texts that hold at least `SHARE` of a problem's word n-grams.

    Words are lower-cased runs of letters and digits. A problem of fewer than `WORDS` words counts
    as one n-gram.
    """
    grams = [find_grams(problem, WORDS) for problem in problems]
    # An index from n-grams to problems: a text is compared only with problems that it may hold.
    holders = defaultdict(list)
    for number, problem_grams in enumerate(grams):
        for gram in filter(None, problem_grams):
            holders[gram].append(number)
    lengths = {len(gram) for gram in holders}  # shorter than WORDS for short problems
    overlaps = set()
    for row, text in enumerate(texts):
        text_grams = set().union(*(find_grams(text, length) for length in lengths))
        hits: Counter[int] = Counter()
        for gram in holders.keys() & text_grams:
            hits.update(holders[gram])
        for number, count in hits.items():
            if count >= SHARE * len(grams[number]):
                overlaps.add(row)
    return overlaps


def find_grams(text: str, n: int) -> set[tuple[str, ...]]:
    """The word n-grams of a text; all its words as one if there are fewer than n."""
    words = re.findall(r"[^\W_]+", text.lower())
    starts = range(max(1, len(words) - n + 1))
    return {tuple(words[start : start + n]) for start in starts}
