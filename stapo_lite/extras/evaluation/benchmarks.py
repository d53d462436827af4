"""The six benchmarks of the paper, and benchmarks in files: rows of a problem and its answer."""

from itertools import islice
from pathlib import Path
from typing import Any

from stapo_lite.config import Data
from stapo_lite.data.rows import load_rows
from stapo_lite.errors import explained

SOURCES = {
    "aime24": Data(source="HuggingFaceH4/aime_2024", prompt_column="problem"),
    "aime25": Data(source="math-ai/aime25", split="test", prompt_column="problem"),
    "amc23": Data(source="math-ai/amc23", split="test", prompt_column="question"),
    "math500": Data(source="HuggingFaceH4/MATH-500", split="test", prompt_column="problem"),
    "minerva": Data(source="math-ai/minervamath", split="test", prompt_column="question"),
    "olympiadbench": Data(
        source="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",
        prompt_column="question",
        answer_column="final_answer",
    ),
}
NUM_SAMPLES = {
    "aime24": 32,
    "aime25": 32,
    "amc23": 32,
    "math500": 4,
    "minerva": 4,
    "olympiadbench": 4,
}
"""Samples per problem, as in the paper."""


def load_benchmark(name: str, limit: int | None = None) -> tuple[str, int, list[dict[str, Any]]]:
    """Read a benchmark: its short name, its default samples per problem, and its rows (`read_row`).

    Args:
        name: one of `SOURCES`, or a `.jsonl` file with `problem`, `answer` and optionally `id`,
            `answer_type` (`list`: order counts) and `tolerance`. A file whose name begins with one
            of `SOURCES` counts as that one.
        limit: take only the first `limit` problems.

    Raises:
        InputError: there is no such benchmark or file, or a row lacks problem or answer.
    """
    short = Path(name).stem
    for benchmark in SOURCES:
        if short.startswith(benchmark):
            short = benchmark
    data = SOURCES.get(name) or Data(source=name, prompt_column="problem")
    rows = islice(load_rows(data, key="benchmarks"), limit)
    with explained(f"benchmarks={name}: a row cannot be read"):
        problems = [read_row(row, data, number) for number, row in enumerate(rows)]
    return short, NUM_SAMPLES.get(short, 1), problems


def read_row(row: dict[str, Any], data: Data, number: int) -> dict[str, Any]:
    """A row by the same names in every benchmark. `ordered` says whether the order of an answer
    that is a plain list counts. Numbers are equal up to the absolute difference `tolerance`.

    Args:
        number: the id of a row without one.
    """
    answer = row[data.answer_column]
    if isinstance(answer, list):  # OlympiadBench
        (answer,) = answer
    if isinstance(answer, float) and answer.is_integer():  # AMC23 on the Hub
        answer = int(answer)
    if row.get("id") is not None:
        number = row["id"]
    return {
        "problem": row[data.prompt_column],
        "answer": answer,
        "id": str(number),
        "ordered": row.get("answer_type") == "list",
        # OlympiadBench calls it error.
        "tolerance": float(row.get("tolerance") or row.get("error") or 0),
    }
