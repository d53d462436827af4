"""Grading in processes that are killed when they overrun.

Answers such as `9^{9^{9^{9}}}` hang sympy in C code, which handles no signals; only killing the
process stops it.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.files import check_writable, read_jsonl, write_out
from stapo_lite.machine import cores
from stapo_lite.rewards.sandbox import Sandbox, SandboxError

UNREADABLE = "?"
"""Replaces the answer if grading took too long or too much memory, or raised an error."""
TIMEOUT = 5.0
"""Wall-clock seconds after which a worker is killed and the answer counts as wrong."""
NUM_WORKERS = min(8, cores())
WORKER_MEMORY_BYTES = 4 << 30
START_SECONDS = 120.0
"""Seconds that a new process has to import sympy and the parser, and again for a first answer."""


@dataclass(frozen=True)
class Question:
    """A response to grade; the fields are those of `answers.final_answer` and
    `answers.equivalent`."""

    gold: Any
    """A bare final answer, as text or number."""
    response: str
    finished: bool = True
    ordered: bool = False
    tolerance: float = 0.0


class Verdict(NamedTuple):
    """A judgement; `answer` is in canonical form, None if the response has none."""

    correct: bool
    answer: str | None


class MathGrader:
    """Grades responses in parallel.

    Args:
        timeout: wall-clock seconds per response, excluding a process's start.
        num_workers: number of processes, started on first use.
    """

    def __init__(self, timeout: float = TIMEOUT, num_workers: int = NUM_WORKERS):
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math-grader")
        self._idle: SimpleQueue[Sandbox] = SimpleQueue()
        function = "stapo_lite.extras.math.answers:grade"
        for _ in range(num_workers):
            self._idle.put(Sandbox(function, START_SECONDS, WORKER_MEMORY_BYTES))

    def grade(self, questions: Sequence[Question], progress: bool = False) -> list[Verdict]:
        """A verdict for each question, in order.

        Args:
            progress: show a bar.

        Raises:
            RunError: the processes do not start.
        """
        verdicts = self._threads.map(self._judge, questions)
        hidden = None if progress else True  # None: hidden unless there is a terminal
        return list(tqdm(verdicts, "grade", len(questions), leave=False, disable=hidden))

    def _judge(self, question: Question) -> Verdict:
        sandbox = self._idle.get()
        try:
            _warm_up(sandbox)
            return Verdict(*sandbox.call(asdict(question), timeout=self._timeout))
        except SandboxError:
            return Verdict(False, UNREADABLE)
        finally:
            self._idle.put(sandbox)

    def close(self) -> None:
        """Stop the processes."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()


def _warm_up(sandbox: Sandbox) -> None:
    """Load the parser in a new process before the clock runs."""
    with explained("the grading process did not start", SandboxError, kind=RunError):
        if sandbox.start():
            sandbox.call(asdict(Question("1/2", "it is $\\sqrt{2}$")))


def grade_file(cases: Path, out: Path, timeout: float, num_workers: int) -> str:
    """Write each case with its verdict, `correct`; return a summary line.

    Args:
        cases: JSON lines of `gold`, `pred` and optionally `form` (`answer`: `pred` is a bare final
            answer; else it is a whole response), `answer_type` (`list`: the order of a list counts)
            and `tolerance`.

    Raises:
        InputError: there is no such file; a case lacks a field or has one of the wrong type; `out`
            cannot be written.
    """
    rows = read_jsonl(cases)
    questions = [_case(row, f"{cases}, case {number}") for number, row in enumerate(rows, start=1)]
    check_writable(out)
    grader = MathGrader(timeout, num_workers)
    verdicts = grader.grade(questions, progress=True)
    grader.close()
    right = [verdict.correct for verdict in verdicts]
    write_out(out, [row | {"correct": correct} for row, correct in zip(rows, right, strict=True)])
    missing = sum(verdict.answer is None for verdict in verdicts)
    return f"{len(rows)} graded, {sum(right)} correct, {missing} without an answer: {out}"


def _case(row: dict[str, Any], where: str) -> Question:
    for field in ("gold", "pred"):
        if not isinstance(row.get(field), str | int | float):
            raise InputError(f"{where}: {field} must be text or a number, got {row.get(field)!r}")
    tolerance = row.get("tolerance", 0.0)
    if not isinstance(tolerance, int | float) or not math.isfinite(tolerance):
        raise InputError(f"{where}: tolerance must be a number, got {tolerance!r}")
    response = f"\\boxed{{{row['pred']}}}" if row.get("form") == "answer" else str(row["pred"])
    ordered = row.get("answer_type") == "list"
    return Question(row["gold"], response, ordered=ordered, tolerance=tolerance)
