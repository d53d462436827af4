"""Rewards: `math` (graded in worker processes), `arithmetic`, and the user's own by import path.

python -m stapo_lite.rewards grade cases.jsonl --out verdicts.jsonl
"""

import argparse
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from stapo_lite.config import InputError, exit_on_input_error, one_line
from stapo_lite.files import read_jsonl
from stapo_lite.grading import MathGrader, Question
from stapo_lite.types import Completion

RewardFunction = Callable[[Sequence[Completion]], list[float | None]]

BUILT_IN = ("math", "arithmetic")
OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")  # as in TRL, columns of these names stay out


class RewardModel:
    """The weighted sum of a run's reward functions.

    Args:
        functions: `math`, `arithmetic` or `package.module:function` (TRL's signature).
        weights: one per function.
        correct, incorrect: what the built-in functions return.
        timeout: wall-clock seconds that `math` may spend on one completion.
        num_workers: processes of `math`.

    Raises:
        InputError: a function cannot be imported.
    """

    def __init__(
        self,
        functions: Sequence[str],
        weights: Sequence[float],
        correct: float,
        incorrect: float,
        timeout: float,
        num_workers: int,
    ):
        self._grader = MathGrader(timeout, num_workers)

        def score_math(completions: Sequence[Completion]) -> list[float | None]:
            verdicts = self._grader.grade([Question(c.prompt.answer, c.text, not c.truncated) for c in completions])
            return [correct if verdict.correct else incorrect for verdict in verdicts]

        def score_arithmetic(completions: Sequence[Completion]) -> list[float | None]:
            return [correct if last_integer_equals(c.text, c.prompt.answer) else incorrect for c in completions]

        built_in: dict[str, RewardFunction] = {"math": score_math, "arithmetic": score_arithmetic}
        self._weighted = [
            (name, built_in.get(name) or import_reward(name), weight)
            for name, weight in zip(functions, weights, strict=True)
        ]

    def score(self, completions: Sequence[Completion]) -> None:
        """Set `reward` of each completion; None where every function returned None.

        Raises:
            InputError: a function returned the wrong number of values, or one that is not a finite
                number or None.
        """
        totals: list[float | None] = [None] * len(completions)
        for name, function, weight in self._weighted:
            values = list(function(completions))
            if len(values) != len(completions):
                raise InputError(f"reward.functions={name}: returned {len(values)} values, not {len(completions)}")
            for index, value in enumerate(values):
                if value is None:
                    continue
                try:
                    number = float(value)  # numpy's and torch's scalars too
                except (TypeError, ValueError):
                    number = math.nan
                if not math.isfinite(number):
                    raise InputError(f"reward.functions={name}: returned {value!r}; return finite numbers or None")
                totals[index] = (totals[index] or 0.0) + weight * number
        for completion, total in zip(completions, totals, strict=True):
            completion.reward = total

    def close(self) -> None:
        self._grader.close()


def import_reward(path: str) -> RewardFunction:
    """The user's function at `package.module:function`, which is called as TRL calls it.

    It gets lists by keyword: `prompts`, `completions` (text, or messages where the prompt is messages),
    `completion_ids`, and every other column of the data set; and returns a list of numbers, or None for
    a completion that it does not judge.

    Raises:
        InputError: the path is not of that form, or nothing callable is there.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise InputError(f"reward.functions={path}: use math, arithmetic or package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # the module is the user's
        raise InputError(
            f"reward.functions={path}: cannot be imported ({type(error).__name__}: {one_line(error)})"
        ) from None
    if not callable(function):
        raise InputError(f"reward.functions={path}: is a {type(function).__name__}, not a function")

    def call(completions: Sequence[Completion]) -> list[float | None]:
        prompts = [c.prompt for c in completions]
        return function(
            prompts=[p.prompt for p in prompts],
            completions=[
                c.text if isinstance(c.prompt.prompt, str) else [{"role": "assistant", "content": c.text}]
                for c in completions
            ],
            completion_ids=[c.token_ids for c in completions],
            **{name: [p.columns[name] for p in prompts] for name in prompts[0].columns if name not in OWN_ARGUMENTS},
        )

    return call


def last_integer_equals(text: str, answer: Any) -> bool:
    """Whether the last integer in `text` is exactly `answer`; leading zeros do not count."""
    integers = re.findall(r"-?\d+", text)
    normal = [re.sub(r"^(-?)0+(?=\d)", r"\1", number) for number in (*integers[-1:], str(answer).strip())]
    return len(normal) == 2 and normal[0] == normal[1]


def overlong_share(length: int, max_completion_length: int, buffer: float) -> float:
    """How much of DAPO's soft overlong punishment (eq. 13) a completion earns, from 0 to 1.

    Args:
        length: tokens of the completion, at most `max_completion_length`.
        buffer: share of `max_completion_length`, at its end, over which the punishment grows linearly.
    """
    width = buffer * max_completion_length
    return max(0.0, length - (max_completion_length - width)) / width


def grade_file(cases: Path, out: Path, timeout: float, num_workers: int) -> str:
    """Write each case with its verdict, `correct`; return a line for a person.

    Args:
        cases: JSON lines of `gold`, `pred` and optionally `form` (`answer`: `pred` is a bare final answer; else it is a
            whole response), `answer_type` (`set`: the order of a list does not count) and `tolerance`.

    Raises:
        InputError: no such file, or a case lacks a field or has one of another type; `out` cannot be written.
    """
    rows = read_jsonl(cases)
    questions = [_case(row, f"{cases}, case {number}") for number, row in enumerate(rows, start=1)]
    try:
        file = out.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out={out}: cannot be written ({error.strerror})") from None
    grader = MathGrader(timeout, num_workers)
    with tqdm(total=len(rows), desc="grade", unit="answer", leave=False, disable=None) as bar:
        verdicts = grader.grade(questions, on_verdict=bar.update)
    grader.close()
    with file:
        for row, verdict in zip(rows, verdicts, strict=True):
            file.write(json.dumps(row | {"correct": verdict.correct}, ensure_ascii=False) + "\n")
    missing = sum(verdict.answer is None for verdict in verdicts)
    return f"{len(rows)} graded, {sum(v.correct for v in verdicts)} correct, {missing} without an answer: {out}"


def _case(row: dict[str, Any], where: str) -> Question:
    for field in ("gold", "pred"):
        if not isinstance(row.get(field), str | int | float):
            raise InputError(f"{where}: {field} must be text or a number, got {row.get(field)!r}")
    if not isinstance(row.get("tolerance", 0), int | float):
        raise InputError(f"{where}: tolerance must be a number, got {row['tolerance']!r}")
    bare = row.get("form") == "answer"
    response = f"\\boxed{{{row['pred']}}}" if bare else str(row["pred"])
    ordered = row.get("answer_type") != "set"
    return Question(row["gold"], response, ordered=ordered, tolerance=row.get("tolerance", 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.rewards", description=__doc__)
    grade = parser.add_subparsers(required=True, metavar="grade").add_parser("grade", help="grade a file of answers")
    grade.add_argument("cases", type=Path, help="JSON lines of gold, pred and optionally form, answer_type, tolerance")
    grade.add_argument("--out", type=Path, required=True, help="the same lines with `correct`")
    grade.add_argument("--timeout", type=float, default=5.0, help="seconds per answer")
    grade.add_argument("--num-workers", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    with exit_on_input_error():
        print(grade_file(arguments.cases, arguments.out, arguments.timeout, arguments.num_workers))


if __name__ == "__main__":
    main()
