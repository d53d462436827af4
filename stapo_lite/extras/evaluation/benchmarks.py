"""The six benchmarks of the paper, and benchmarks in files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stapo_lite.data.prompts import is_answer
from stapo_lite.errors import InputError, explained
from stapo_lite.files import read_jsonl
from stapo_lite.types import derived_seed


@dataclass(frozen=True)
class Source:
    """The origin of a benchmark.

    Attributes:
        dataset, subset, split: on the Hub.
        problem, answer: column names; an answer that is a list of one element is unwrapped.
        num_samples: samples per problem, as in the paper.
        problems: number of problems.
    """

    dataset: str
    subset: str | None
    split: str
    problem: str
    answer: str
    num_samples: int
    problems: int


BENCHMARKS = {
    "aime24": Source("HuggingFaceH4/aime_2024", None, "train", "problem", "answer", 32, 30),
    "aime25": Source("math-ai/aime25", None, "test", "problem", "answer", 32, 30),
    "amc23": Source("math-ai/amc23", None, "test", "question", "answer", 32, 40),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", "problem", "answer", 4, 500),
    "minerva": Source("math-ai/minervamath", None, "test", "question", "answer", 4, 272),
    "olympiadbench": Source(
        "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", "question", "final_answer", 4, 674
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        ordered: whether the order of an answer that is a plain list counts.
        tolerance: absolute difference up to which numbers are equal.
    """

    benchmark: str
    id: str
    text: str
    gold: str
    ordered: bool
    tolerance: float

    def seed(self, run_seed: int, sample: int) -> int:
        """The seed of one sample, independent of what else is sampled."""
        return derived_seed(run_seed, self.benchmark, self.id, sample)


def load_benchmark(name: str, limit: int | None = None) -> tuple[str, list[Problem], int]:
    """Load a benchmark: its short name, its problems, and its default samples per problem.

    Args:
        name: one of `BENCHMARKS`, or a `.jsonl` file with `problem`, `answer` and optionally `id`,
            `answer_type` (`list`: order counts) and `tolerance`. A file whose name begins with one
            of `BENCHMARKS` counts as that one.
        limit: take only the first `limit` problems.

    Raises:
        InputError: there is no such benchmark or file, or it cannot be read; a row lacks problem or
            answer; an id occurs twice.
    """
    path = Path(name).expanduser()
    columns = ("problem", "answer")
    if path.suffix.lower() == ".jsonl":
        short = next((known for known in BENCHMARKS if path.stem.startswith(known)), path.stem)
        rows = read_jsonl(path)
    elif name in BENCHMARKS:
        short, source = name, BENCHMARKS[name]
        columns = (source.problem, source.answer)
        rows = _read_hub(name, source)
    else:
        known = ", ".join(BENCHMARKS)
        raise InputError(f"benchmarks: {name} is none of {known}, nor a .jsonl file")
    problems = [_problem(short, number, row, *columns) for number, row in enumerate(rows[:limit])]
    if not problems:
        raise InputError(f"benchmarks: {name} has no problems")
    if len({problem.id for problem in problems}) < len(problems):
        raise InputError(f"benchmarks: {name} has an id twice; give each problem an id of its own")
    return short, problems, BENCHMARKS[short].num_samples if short in BENCHMARKS else 1


def _read_hub(name: str, source: Source) -> list[dict[str, Any]]:
    import datasets

    what = f"benchmarks: {name} cannot be loaded from {source.dataset} on the Hub"
    fix = f"; give a file with problem and answer instead, path/{name}.jsonl"
    with explained(what, fix=fix):
        rows = list(datasets.load_dataset(source.dataset, source.subset, split=source.split))
    if len(rows) != source.problems:
        now = f"{source.dataset} has {len(rows)} rows now, not {source.problems}"
        raise InputError(f"benchmarks: {now}; give a file")
    return rows


def _problem(
    benchmark: str, number: int, row: dict[str, Any], problem: str, answer: str
) -> Problem:
    where = f"benchmarks: {benchmark}, row {number + 1}"
    text, gold = row.get(problem), row.get(answer)
    if isinstance(gold, list) and len(gold) == 1:
        gold = gold[0]
    if isinstance(gold, float) and gold.is_integer():  # AMC23 on the Hub
        gold = int(gold)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: `{problem}` must be text, got {text!r}")
    if not is_answer(gold):
        raise InputError(f"{where}: `{answer}` must be an answer, got {gold!r}")
    tolerance = row.get("tolerance") or row.get("error") or 0  # OlympiadBench calls it error
    with explained(f"{where}: the tolerance must be a number", ValueError):
        tolerance = max(float(part or 0) for part in str(tolerance).split(","))
    return Problem(
        benchmark=benchmark,
        id=str(number if row.get("id") is None else row["id"]),
        text=text,
        gold=str(gold),
        ordered=row.get("answer_type") == "list",
        tolerance=tolerance,
    )
