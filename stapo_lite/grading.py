"""Grading in worker processes that are killed when they overrun.

A worker is a plain `python -m stapo_lite.grading SECONDS` speaking JSON lines: it imports neither the trainer nor
torch, so replacing one takes about a second. Answers such as `9^{9^{9^{9}}}` hang sympy in C code, where no signal is
handled: only killing the process ends them.
"""

import json
import math
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from stapo_lite.answers import canonical, equivalent, final_answer

UNREADABLE = "?"  # it took too long, too much memory, or an exception
WORKER_MEMORY_BYTES = 4 << 30  # address space; a runaway answer fails there instead of taking the machine


@dataclass(frozen=True)
class Question:
    """A response to grade; the fields are those of `answers.final_answer` and `answers.equivalent`."""

    gold: Any
    """A bare final answer, as text or number."""
    response: str
    finished: bool = True
    ordered: bool = False
    tolerance: float = 0.0


class Verdict(NamedTuple):
    """`answer` is the final answer in one spelling; None where there is none, `UNREADABLE` where judging it failed."""

    correct: bool
    answer: str | None


class MathGrader:
    """Grades responses in parallel.

    Args:
        timeout: wall-clock seconds per response, not counting a worker's start.
        num_workers: processes; started on first use.
    """

    def __init__(self, timeout: float, num_workers: int):
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math-grader")
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def grade(self, questions: Sequence[Question], on_verdict: Callable[[], object] = lambda: None) -> list[Verdict]:
        """A verdict for each question, in order.

        Args:
            on_verdict: called after each, from any thread.
        """

        def grade_one(question: Question) -> Verdict:
            worker = self._idle.get()
            try:
                if worker is None:
                    worker = _Worker(self._timeout)
                verdict = worker.ask(asdict(question) | {"gold": str(question.gold)}, self._timeout)
                if verdict is None:  # overran or died
                    worker.kill()
                    worker = None
                return Verdict(*verdict or (False, UNREADABLE))
            finally:
                self._idle.put(worker)
                on_verdict()

        return list(self._threads.map(grade_one, questions))

    def close(self) -> None:
        """Stop the workers."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.kill()


class _Worker:
    """One grading process."""

    def __init__(self, timeout: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stapo_lite.grading", str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        if self._read_line(timeout=120) is None:
            self.kill()
            raise RuntimeError("the grading worker did not start; `python -m stapo_lite.grading 5` should print true")

    def ask(self, question: dict[str, Any], timeout: float) -> Any:
        """The verdict's fields, or None where the worker died or took longer than `timeout` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            return None
        return self._read_line(timeout)

    def _read_line(self, timeout: float) -> Any:
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = self._process.stdout.read(4096)
            if not chunk:
                return None
            line += chunk
        return json.loads(line)

    def kill(self) -> None:
        self._selector.close()
        self._process.kill()
        with self._process:  # closes the pipes and reaps it
            pass


def grade(question: Question) -> Verdict:
    """Without a time limit."""
    answer = final_answer(question.response, question.finished)
    if answer is None:
        return Verdict(False, None)
    correct = equivalent(question.gold, answer, ordered=question.ordered, tolerance=question.tolerance)
    return Verdict(correct, canonical(answer))


def _serve(timeout: float) -> None:
    """Answer questions on stdin, one JSON line each, until it closes."""
    import logging
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    logging.disable(logging.CRITICAL)  # math-verify logs each answer it cannot parse
    grade(Question("\\frac{1}{2}", "it is $\\sqrt{2}$"))  # loads sympy and the parser before the clock runs
    print("true", flush=True)
    for line in sys.stdin:
        question = Question(**json.loads(line))
        signal.alarm(math.ceil(timeout) + 1)  # not handled, so it ends the process even in C code: no orphan lives on
        try:
            verdict = grade(question)
        except Exception:  # whatever a hostile answer raises, it is wrong
            verdict = Verdict(False, UNREADABLE)
        signal.alarm(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
