"""Rewards: `math` (math-verify in worker processes), `arithmetic`, and the user's own by import path."""

import importlib
import json
import math
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from stapo_lite.config import InputError, one_line
from stapo_lite.types import Completion

RewardFunction = Callable[[Sequence[Completion]], list[float | None]]

BUILT_IN = ("math", "arithmetic")
OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")  # as in TRL, columns of these names stay out
WORKER_MEMORY_BYTES = 4 << 30  # address space; a runaway answer fails there instead of taking the machine


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
            verdicts = self._grader.grade([(c.prompt.answer, c.text) for c in completions])
            return [correct if verdict else incorrect for verdict in verdicts]

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


class MathGrader:
    """Grades answers with math-verify in worker processes that are killed when they overrun.

    A worker is a plain `python -m stapo_lite.rewards` speaking JSON lines: it imports neither the
    trainer nor torch, so replacing one takes about a second. Answers such as `9^{9^{9^{9}}}` hang
    sympy in C code, where no signal is handled: only killing the process ends them.

    Args:
        timeout: wall-clock seconds per answer, not counting a worker's start.
        num_workers: processes; started on first use.
    """

    def __init__(self, timeout: float, num_workers: int):
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math-grader")
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def grade(self, pairs: Sequence[tuple[Any, str]]) -> list[bool]:
        """Whether each (gold, response) agrees. A gold is a bare final answer, as text or number."""
        return list(self._threads.map(self._grade_one, pairs))

    def _grade_one(self, pair: tuple[Any, str]) -> bool:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._timeout)
            verdict = worker.ask({"gold": str(pair[0]), "response": pair[1]}, self._timeout)
            if verdict is None:  # overran or died
                worker.kill()
                worker = None
            return bool(verdict)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Stop the workers."""
        self._threads.shutdown()
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.kill()


class _Worker:
    """One grading process."""

    def __init__(self, timeout: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stapo_lite.rewards", str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        if self._read_line(timeout=120) is None:
            self.kill()
            raise RuntimeError(
                "the math-verify worker did not start; `python -m stapo_lite.rewards 5` should print true"
            )

    def ask(self, question: dict[str, str], timeout: float) -> bool | None:
        """The verdict, or None where the worker died or took longer than `timeout` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            return None
        return self._read_line(timeout)

    def _read_line(self, timeout: float) -> bool | None:
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = self._process.stdout.read(64)
            if not chunk:
                return None
            line += chunk
        return json.loads(line)

    def kill(self) -> None:
        self._selector.close()
        self._process.kill()
        with self._process:  # closes the pipes and reaps it
            pass


def is_equivalent(gold: str, response: str) -> bool:
    r"""Whether the final answer of `response` equals `gold`, by math-verify.

    The final answer is the content of the last \boxed{}, else what math-verify extracts last. The gold
    is wrapped in \boxed{}: bare, it often fails to parse. Time limits are the caller's.
    """
    from math_verify import parse, verify

    boxed = last_boxed(response)
    final = response if boxed is None else f"\\boxed{{{boxed}}}"
    # math-verify's own limit needs SIGALRM and cannot interrupt C code
    answers = [parse(text, parsing_timeout=None) for text in (f"\\boxed{{{gold}}}", final)]
    return bool(verify(*answers, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...} or \fbox{...}, braces balanced; None where there is none."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None


def _serve(timeout: float) -> None:
    """Answer questions on stdin, one JSON line each, until it closes."""
    import logging
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    logging.disable(logging.CRITICAL)  # math-verify logs each answer it cannot parse
    is_equivalent("1", "\\boxed{1}")  # loads sympy and the parser before the clock runs
    print("true", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(math.ceil(timeout) + 1)  # not handled, so it ends the process even in C code: no orphan lives on
        try:
            verdict = is_equivalent(question["gold"], question["response"])
        except Exception:  # whatever sympy raises on a hostile answer, the answer is wrong
            verdict = False
        signal.alarm(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
