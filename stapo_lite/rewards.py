"""Rewards: `math` (graded in worker processes), `arithmetic`, and the user's own by import path.

python -m stapo_lite.rewards grade cases.jsonl --out verdicts.jsonl
"""

import argparse
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
from tqdm.auto import tqdm

from stapo_lite.config import InputError, RunError, one_line, one_line_errors
from stapo_lite.files import read_jsonl, write_lines
from stapo_lite.grading import MathGrader, Question
from stapo_lite.types import Completion

logger = logging.getLogger(__name__)

RewardFunction = Callable[[Sequence[Completion], int], list[float | None]]
"""Of the completions and a seed."""

BUILT_IN = ("math", "arithmetic")
LARGEST = 1e30
"""Of a reward: its square fits into fp32 no more, which gradients are computed in."""
OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")  # as in TRL, columns of these names stay out


class RewardModel:
    """The weighted sum of a run's reward functions.

    Args:
        functions: `math`, `arithmetic` or `package.module:function` (TRL's signature).
        weights: one per function.
        correct, incorrect: what the built-in functions return.
        timeout: wall-clock seconds that `math` may spend on one completion.
        num_workers: processes of `math`.
        function_timeout, function_memory_gb, max_failures: of a user's function.

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
        function_timeout: float,
        function_memory_gb: float | None,
        max_failures: int,
    ):
        self._grader = MathGrader(timeout, num_workers)
        limit = int(function_memory_gb * 2**30) if function_memory_gb else psutil.virtual_memory().total // 2

        def score_math(completions: Sequence[Completion], _: int) -> list[float | None]:
            verdicts = self._grader.grade([Question(c.prompt.answer, c.text, not c.truncated) for c in completions])
            return [correct if verdict.correct else incorrect for verdict in verdicts]

        def score_arithmetic(completions: Sequence[Completion], _: int) -> list[float | None]:
            return [correct if last_integer_equals(c.text, c.prompt.answer) else incorrect for c in completions]

        built_in: dict[str, RewardFunction] = {"math": score_math, "arithmetic": score_arithmetic}
        self._weighted = [
            (built_in.get(name) or UserFunction(name, function_timeout, limit, max_failures), weight)
            for name, weight in zip(functions, weights, strict=True)
        ]

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
        self._path, self._timeout, self._memory_bytes = path, timeout, memory_bytes
        self._max_failures, self._failures = max_failures, 0
        self._process: subprocess.Popen | None = None
        module_name, _, attribute = path.partition(":")
        if not module_name or not attribute:
            raise InputError(f"reward.functions={path}: use math, arithmetic or package.module:function")
        problem = self._start()
        if problem is not None:
            raise InputError(f"reward.functions={path}: {problem}")

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
            values = self._start() or self._ask((arguments, seed))
            if isinstance(values, list) and len(values) != len(completions):
                values = f"returned {len(values)} values, not {len(completions)}"
            if isinstance(values, list):
                judged = [value if value is not None and abs(value) < LARGEST else None for value in values]
                unknown = sum(value is not None and kept is None for value, kept in zip(values, judged, strict=True))
                if unknown < max(1, len(values)):
                    self._failures = 0
                    if unknown:
                        logger.warning(
                            "reward.functions=%s: %d of %d values are no finite numbers, their completions not judged",
                            *(self._path, unknown, len(values)),
                        )
                    return judged
                values = "returned no finite number"
            logger.warning("reward.functions=%s: %s", self._path, values)
        self._failures += 1
        if self._failures >= self._max_failures:
            raise RunError(
                f"reward.functions={self._path}: {values}; it failed on {self._failures} batches in a row "
                "(reward.max_failures): mend it, and continue with --resume"
            )
        return [None] * len(completions)

    def _start(self) -> str | None:
        """Start the process unless it runs; what is wrong with the function."""
        if self._process is not None:
            return None
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stapo_lite.reward_worker", str(theirs.fileno()), str(self._timeout)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, with what it starts
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        try:
            problem = self._ask(_reference(self._path))
        except Exception as error:  # what a notebook's function drags along may not travel
            problem = f"cannot be imported ({type(error).__name__}: {one_line(error)})"
        if problem is not None:
            self.close()
        return problem

    def _ask(self, question: Any) -> Any:
        """The values, or what went wrong."""
        try:
            self._connection.send(question)
        except OSError:
            return self._ended()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process is not None
        deadline = time.monotonic() + self._timeout
        while not self._connection.poll(0.1):
            if self._process.poll() is not None:  # what it started may hold the connection open
                return self._ended()
            if time.monotonic() > deadline:
                self.close()
                return f"took longer than {self._timeout:g} s (reward.function_timeout)"
            if resident_bytes(self._process.pid) > self._memory_bytes:
                self.close()
                return f"took more than {self._memory_bytes / 2**30:.3g} GiB (reward.function_memory_gb)"
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return self._ended()

    def _ended(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        self.close()
        return f"ended its process with status {status}"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._connection.close()


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those that it started; 0 where it ends just now."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


def _reference(path: str) -> str | bytes:
    """How the function's process finds it: by its path; a notebook's own, `__main__:f`, as a pickle that carries it."""
    module_name, _, attribute = path.partition(":")
    return cloudpickle.dumps(getattr(sys.modules["__main__"], attribute)) if module_name == "__main__" else path


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
    with one_line_errors():
        print(grade_file(arguments.cases, arguments.out, arguments.timeout, arguments.num_workers))


if __name__ == "__main__":
    main()
