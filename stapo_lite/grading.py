"""Grading in processes that are killed when they overrun.

Answers such as `9^{9^{9^{9}}}` hang sympy in C code, where no signal is handled: only killing the process ends them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from stapo_lite.config import RunError
from stapo_lite.sandbox import Sandbox, SandboxError

UNREADABLE = "?"
"""The answer where judging it took too long or too much memory, or raised."""
WORKER_MEMORY_BYTES = 4 << 30
START_SECONDS = 120.0
"""In which a process imports sympy and the parser, and judges for the first time."""


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
    """A judgement; `answer` is in one spelling, None where the response has none."""

    correct: bool
    answer: str | None


class MathGrader:
    """Grades responses in parallel.

    Args:
        timeout: wall-clock seconds per response, not counting a process's start.
        num_workers: processes; started on first use.
    """

    def __init__(self, timeout: float, num_workers: int):
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math-grader")
        self._idle: SimpleQueue[Sandbox] = SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(Sandbox("stapo_lite.answers:grade", START_SECONDS, WORKER_MEMORY_BYTES))

    def grade(self, questions: Sequence[Question], on_verdict: Callable[[], object] = lambda: None) -> list[Verdict]:
        """A verdict for each question, in order.

        Args:
            on_verdict: called after each, from any thread.
        """

        def grade_one(question: Question) -> Verdict:
            sandbox = self._idle.get()
            try:
                return self._judge(sandbox, question)
            finally:
                self._idle.put(sandbox)
                on_verdict()

        return list(self._threads.map(grade_one, questions))

    def _judge(self, sandbox: Sandbox, question: Question) -> Verdict:
        try:
            if sandbox.start():  # the parser is loaded before the clock runs
                sandbox.call(asdict(Question("1/2", "it is $\\sqrt{2}$")))
        except SandboxError as error:
            raise RunError(f"the grading process did not start ({error})") from error
        try:
            return Verdict(*sandbox.call(asdict(question) | {"gold": str(question.gold)}, timeout=self._timeout))
        except SandboxError:
            return Verdict(False, UNREADABLE)

    def close(self) -> None:
        """Stop the processes."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()
