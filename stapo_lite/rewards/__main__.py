"""stapo grade cases.jsonl --out verdicts.jsonl"""

import argparse
from pathlib import Path
from typing import Any

from stapo_lite.errors import InputError, one_line_errors
from stapo_lite.files import read_jsonl, write_lines
from stapo_lite.rewards.grading import NUM_WORKERS, TIMEOUT, MathGrader, Question


def grade_file(cases: Path, out: Path, timeout: float, num_workers: int) -> str:
    """Write each case with its verdict, `correct`; return a line for a person.

    Args:
        cases: JSON lines of `gold`, `pred` and optionally `form` (`answer`: `pred` is a bare final answer; else it is a
            whole response), `answer_type` (`list`: the order of a list counts) and `tolerance`.

    Raises:
        InputError: no such file, or a case lacks a field or has one of another type; `out` cannot be written.
    """
    rows = read_jsonl(cases)
    questions = [_case(row, f"{cases}, case {number}") for number, row in enumerate(rows, start=1)]
    try:
        out.open("a").close()
    except OSError as error:
        raise InputError(f"--out={out}: cannot be written ({error.strerror})") from None
    grader = MathGrader(timeout, num_workers)
    verdicts = grader.grade(questions, progress=True)
    grader.close()
    write_lines(out, [row | {"correct": verdict.correct} for row, verdict in zip(rows, verdicts, strict=True)])
    missing = sum(verdict.answer is None for verdict in verdicts)
    return f"{len(rows)} graded, {sum(v.correct for v in verdicts)} correct, {missing} without an answer: {out}"


def _case(row: dict[str, Any], where: str) -> Question:
    for field in ("gold", "pred"):
        if not isinstance(row.get(field), str | int | float):
            raise InputError(f"{where}: {field} must be text or a number, got {row.get(field)!r}")
    if not isinstance(row.get("tolerance", 0), int | float):
        raise InputError(f"{where}: tolerance must be a number, got {row['tolerance']!r}")
    response = f"\\boxed{{{row['pred']}}}" if row.get("form") == "answer" else str(row["pred"])
    ordered = row.get("answer_type") == "list"
    return Question(row["gold"], response, ordered=ordered, tolerance=row.get("tolerance", 0.0))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="stapo grade", description="Grade answers by rules.")
    parser.add_argument("grade", nargs="?", choices=["grade"], help="may be left out")
    parser.add_argument("cases", type=Path, help="JSON lines of gold, pred and optionally form, answer_type, tolerance")
    parser.add_argument("--out", type=Path, required=True, help="the same lines with `correct`")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds per answer")
    parser.add_argument("--num-workers", type=int, default=NUM_WORKERS, help="processes")
    given = parser.parse_args(arguments)
    with one_line_errors():
        print(grade_file(given.cases, given.out, given.timeout, given.num_workers))


if __name__ == "__main__":
    main()
