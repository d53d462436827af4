"""Grading in processes that are killed when they overrun.

Answers such as `9^{9^{9^{9}}}` hang sympy in C code, which handles no signals; only killing the
process stops it.
"""

import os
import resource
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from stapo_lite.rewards.sandbox import Pool

UNREADABLE = "?"
"""Replaces the answer if grading took too long or too much memory, or raised an error."""
TIMEOUT = 5.0
"""Wall-clock seconds after which a worker is killed and the answer counts as wrong."""
NUM_WORKERS = min(8, len(os.sched_getaffinity(0)))
WORKER_MEMORY_BYTES = 4 << 30


class Question(NamedTuple):
    """A response to grade; the fields are those of `answers.final_answer` and
    `answers.equivalent`."""

    gold: Any
    """Text or number; may be a whole solution, as for `answers.equivalent`."""
    response: str
    finished: bool = True
    ordered: bool = False
    tolerance: float = 0.0


class MathGrader:
    """Grades responses in parallel.

    Args:
        timeout: wall-clock seconds per response, excluding a process's start.
        num_workers: number of processes, started on first use.
    """

    def __init__(self, timeout: float = TIMEOUT, num_workers: int = NUM_WORKERS):
        self._timeout = timeout
        self._pool = Pool(num_workers, initializer=warm_up)

    def grade(self, questions: Sequence[Question]) -> list[tuple[bool, str | None]]:
        """For each question whether the response is right, and its final answer, None if it has
        none."""
        calls = self._pool.call(grade, questions, self._timeout)
        return [outcome(call) for call in calls]

    def close(self) -> None:
        """Kill the processes."""
        self._pool.kill()


def outcome(call: Future) -> tuple[bool, str | None]:
    """What the grading of a question has found."""
    try:
        return call.result()
    except (BrokenProcessPool, CancelledError):  # no answer's fault
        raise
    except Exception:
        return False, UNREADABLE


def warm_up() -> None:
    """Load the parser in a new process before the clock runs, and limit its memory."""
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    grade(*Question("1/2", "it is $\\sqrt{2}$"))


def grade(*question: Any) -> tuple[bool, str | None]:
    """Grade a response, in the worker process."""
    from stapo_lite.extras.math import answers  # slow to import

    return answers.grade(*question)
