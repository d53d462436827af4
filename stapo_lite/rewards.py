"""Rewards: `math` (graded in worker processes), `arithmetic`, and the user's own by import path.

python -m stapo_lite.rewards grade cases.jsonl --out verdicts.jsonl
"""

import argparse
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
from tqdm.auto import tqdm

from stapo_lite.config import InputError, Reward, RunError, one_line, one_line_errors
from stapo_lite.files import read_jsonl, write_lines
from stapo_lite.grading import MathGrader, Question
from stapo_lite.sandbox import Sandbox, SandboxError
from stapo_lite.types import Completion

logger = logging.getLogger(__name__)

RewardFunction = Callable[[Sequence[Completion], int], list[float | None]]
"""Rewards from completions and a seed."""

BUILT_IN = ("math", "arithmetic")
LARGEST = 1e30
"""Of a reward: its square fits into fp32 no more, which gradients are computed in."""
LIMIT_KEYS = {"time": "timeout", "memory": "memory_gb"}
OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")  # as in TRL, columns of these names stay out


class RewardModel:
    """The weighted sum of a run's reward functions.

    Raises:
        InputError: a function cannot be imported.
    """

    def __init__(self, settings: Reward):
        self._settings = settings
        self._grader = MathGrader(settings.timeout, settings.num_workers)
        memory = settings.function_memory_gb
        limit = int(memory * 2**30) if memory else psutil.virtual_memory().total // 2
        built_in: dict[str, RewardFunction] = {"math": self._score_math, "arithmetic": self._score_arithmetic}
        functions = [
            built_in.get(name) or UserFunction(name, settings.function_timeout, limit, settings.max_failures)
            for name in settings.functions
        ]
        self._weighted = list(zip(functions, settings.weights or [1.0] * len(functions), strict=True))

    def _score_math(self, completions: Sequence[Completion], _: int) -> list[float | None]:
        # Token-mean would reinforce all that rambles on after an early box, up to the limit.
        asked = [c for c in completions if not (c.truncated and self._settings.truncated_is_incorrect)]
        questions = [Question(c.prompt.answer, c.text, not c.truncated) for c in asked]
        right = {c for c, verdict in zip(asked, self._grader.grade(questions), strict=True) if verdict.correct}
        return [self._value(c in right) for c in completions]

    def _score_arithmetic(self, completions: Sequence[Completion], _: int) -> list[float | None]:
        return [self._value(last_integer_equals(c.text, c.prompt.answer)) for c in completions]

    def _value(self, right: bool) -> float:
        return self._settings.correct if right else self._settings.incorrect

    def score(self, completions: Sequence[Completion], seed: int) -> None:
        """Set `reward` of each completion; None where no function judged it.

        Raises:
            RunError: a user's function failed too often.
        """
        totals: list[float | None] = [None] * len(completions)
        for function, weight in self._weighted:
            for index, value in enumerate(function(completions, seed)):
                if value is not None:
                    totals[index] = (totals[index] or 0.0) + weight * value
        for completion, total in zip(completions, totals, strict=True):
            completion.reward = total

    def close(self) -> None:
        self._grader.close()
        for function, _ in self._weighted:
            if isinstance(function, UserFunction):
                function.close()


class UserFunction:
    """The user's reward function at `package.module:function`, or in a notebook at `__main__:function`, called as TRL
    calls it, in a process of its own.

    It gets lists by keyword: `prompts`, `completions` (text, or messages where the prompt is messages),
    `completion_ids`, and every other column of the data set; and returns a list of numbers, or None for
    a completion that it does not judge. Where it raises, hangs, takes too much memory, or returns anything else, it is
    called again, in a new process if need be, and then judges none of the completions.

    Args:
        timeout: seconds of one call, and of the module's import.
        memory_bytes: resident memory of the process.
        max_failures: calls in a row that may fail.

    Raises:
        InputError: the path is not of that form, or nothing callable is there.
    """

    def __init__(self, path: str, timeout: float, memory_bytes: int, max_failures: int):
        self._path, self._max_failures, self._failures = path, max_failures, 0
        module_name, _, attribute = path.partition(":")
        if not module_name or not attribute:
            raise InputError(f"reward.functions={path}: use math, arithmetic or package.module:function")
        try:
            self.sandbox = Sandbox(_reference(path), timeout, memory_bytes)
            self.sandbox.start()
        except Exception as error:  # what a notebook's function drags along may not travel
            unsent = f"cannot be imported ({type(error).__name__}: {one_line(error)})"
            problem = error if isinstance(error, SandboxError) else unsent
            raise InputError(f"reward.functions={path}: {problem}") from None

    def __call__(self, completions: Sequence[Completion], seed: int) -> list[float | None]:
        """A number for each completion, or None.

        Args:
            seed: of Python's, numpy's and torch's generators in the function's process.

        Raises:
            RunError: it failed too often in a row.
        """
        prompts = [c.prompt for c in completions]
        columns = dict.fromkeys(name for p in prompts for name in p.columns if name not in OWN_ARGUMENTS)
        arguments = {
            "prompts": [p.prompt for p in prompts],
            "completions": [
                c.text if isinstance(c.prompt.prompt, str) else [{"role": "assistant", "content": c.text}]
                for c in completions
            ],
            "completion_ids": [c.token_ids for c in completions],
            **{name: [p.columns.get(name) for p in prompts] for name in columns},
        }
        for _ in range(2):
            try:
                values = _judgements(self.sandbox.call(arguments, seed), len(completions))
            except SandboxError as error:
                limit = f" (reward.function_{LIMIT_KEYS[error.limit]})" if error.limit else ""
                problem = f"{error}{limit}"
                logger.warning("reward.functions=%s: %s", self._path, problem)
                continue
            self._failures = 0
            unknown = values.count(math.nan)
            if unknown:
                logger.warning(
                    "reward.functions=%s: %d of %d values are no finite numbers, their completions not judged",
                    *(self._path, unknown, len(values)),
                )
            return [None if value is math.nan else value for value in values]
        self._failures += 1
        if self._failures >= self._max_failures:
            raise RunError(
                f"reward.functions={self._path}: {problem}; it failed on {self._failures} batches in a row "
                "(reward.max_failures): mend it, and continue with --resume"
            )
        return [None] * len(completions)

    def close(self) -> None:
        self.sandbox.close()


def _judgements(values: Any, count: int) -> list[float | None]:
    """The values that a function returned; `math.nan` itself for each that is no number that gradients can bear.

    Raises:
        SandboxError: they are not as many values, or none of them is one.
    """
    if not isinstance(values, list):
        raise SandboxError(f"returned {values!r:.100}, not a list")
    if len(values) != count:
        raise SandboxError(f"returned {len(values)} values, not {count}")
    usable = [value is None or (isinstance(value, int | float) and abs(value) < LARGEST) for value in values]
    if values and not any(usable):
        raise SandboxError("returned no finite number")
    return [
        (None if value is None else float(value)) if good else math.nan
        for value, good in zip(values, usable, strict=True)
    ]


def _reference(path: str) -> str | bytes:
    """A function as its process finds it: by its path; a notebook's own, `__main__:f`, as a pickle that carries it."""
    module_name, _, attribute = path.partition(":")
    return cloudpickle.dumps(getattr(sys.modules["__main__"], attribute)) if module_name == "__main__" else path


def last_integer_equals(text: str, answer: Any) -> bool:
    """Whether the last integer in `text` is exactly `answer`; leading zeros do not count."""
    integers = re.findall(r"-?\d+", text)
    normal = [re.sub(r"^(-?)0+(?=\d)", r"\1", number) for number in (*integers[-1:], str(answer).strip())]
    return len(normal) == 2 and normal[0] == normal[1]


def overlong_share(length: int, max_completion_length: int, buffer: float) -> float:
    """The share of DAPO's soft overlong punishment (eq. 13) that a completion earns, from 0 to 1.

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
    with tqdm(total=len(rows), desc="grade", unit="answer", leave=False, disable=None) as bar:
        verdicts = grader.grade(questions, on_verdict=bar.update)
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
    bare = row.get("form") == "answer"
    response = f"\\boxed{{{row['pred']}}}" if bare else str(row["pred"])
    ordered = row.get("answer_type") == "list"
    return Question(row["gold"], response, ordered=ordered, tolerance=row.get("tolerance", 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.rewards", description=__doc__)
    grade = parser.add_subparsers(required=True, metavar="grade").add_parser("grade", help="grade a file of answers")
    grade.add_argument("cases", type=Path, help="JSON lines of gold, pred and optionally form, answer_type, tolerance")
    grade.add_argument("--out", type=Path, required=True, help="the same lines with `correct`")
    grade.add_argument("--timeout", type=float, default=5.0, help="seconds per answer")
    grade.add_argument("--num-workers", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    with one_line_errors():
        print(grade_file(arguments.cases, arguments.out, arguments.timeout, arguments.num_workers))


if __name__ == "__main__":
    main()
