"""Rewards: functions of the package, and the user's own, given by import path or, in Python, as
they are."""

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

from stapo_lite.config import Reward
from stapo_lite.errors import InputError, RunError
from stapo_lite.machine import host_memory
from stapo_lite.rewards.sandbox import Sandbox, SandboxError, to_json
from stapo_lite.types import Completion

logger = logging.getLogger(__name__)

LARGEST = 1e30
"""Bound of a reward, with room below fp32's largest number (3e38): losses and gradients are
computed in fp32."""
MAX_FAILURES = 3
"""A run ends if a user's function fails on so many batches in a row."""

Judgements = list[float | None]
"""A number for each completion; None if the function does not judge it."""
RewardFunction = Callable[[Sequence[Completion], int, SimpleNamespace], Judgements]
"""Called with completions, a seed and TRL's `trainer_state`."""


class RewardModel:
    """The weighted sum of a run's reward functions, which run side by side.

    Args:
        max_steps: of the run, for `trainer_state`.
        own: functions of this process by their names in `settings.functions`.
        built_in: functions of the package by their names there, such as `math`.

    Raises:
        InputError: a function cannot be imported.
    """

    def __init__(
        self,
        settings: Reward,
        max_steps: int,
        own: Mapping[str, Callable] | None = None,
        built_in: Mapping[str, RewardFunction] | None = None,
    ):
        self._max_steps = max_steps
        known = dict(built_in or {})
        for name, function in (own or {}).items():
            known[name] = LocalFunction(name, function)
        self._functions = {
            name: known.get(name) or SandboxedFunction(name, settings.function_timeout)
            for name in settings.functions
        }
        weights = settings.weights or [1.0] * len(self._functions)
        self._weights = dict(zip(self._functions, weights, strict=True))
        self._threads = ThreadPoolExecutor(len(weights) or 1, thread_name_prefix="rewards")

    def score(self, completions: Sequence[Completion], seed: int, step: int) -> None:
        """Set `scores` and `reward` of each completion.

        Args:
            step: of the run, for `trainer_state`.

        Raises:
            RunError: a user's function failed too often.
            Exception: what a function of this process raised.
        """
        # TRL's global_step counts the steps that are done.
        state = SimpleNamespace(global_step=step - 1, max_steps=self._max_steps)
        running = {
            name: self._threads.submit(function, completions, seed, state)
            for name, function in self._functions.items()
            if not (isinstance(function, LocalFunction) and function.in_this_thread)
        }
        values = {
            name: running[name].result() if name in running else function(completions, seed, state)
            for name, function in self._functions.items()
        }
        for number, completion in enumerate(completions):
            scores = {name: judged[number] for name, judged in values.items()}
            completion.scores = {name: score for name, score in scores.items() if score is not None}
            # A weight of 0 only logs: such a function does not make a completion judged.
            weighted = [
                self._weights[name] * score
                for name, score in completion.scores.items()
                if self._weights[name]
            ]
            # To 12 digits: 0.1 + 0.2 and 0.3 are equal rewards, from which nothing is to be
            # learned.
            completion.reward = float(f"{sum(weighted):.12g}") if weighted else None

    def close(self) -> None:
        """End all calls, also those under way."""
        for function in self._functions.values():
            if isinstance(function, SandboxedFunction | LocalFunction):
                function.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def reward_arguments(
    completions: Sequence[Completion], trainer_state: SimpleNamespace
) -> dict[str, Any]:
    """Keyword arguments of a reward function, those of TRL's GRPOTrainer: `prompts`, `completions`
    (text, or messages if the prompt is messages), `completion_ids`, `trainer_state` with
    `global_step` and `max_steps`, and every other column of the data set as a list."""
    prompts = [c.prompt for c in completions]
    names = {name for p in prompts for name in p.columns}
    answers: list[str | list[dict[str, str]]] = []
    for c in completions:
        as_message = [{"role": "assistant", "content": c.text}]
        answers.append(c.text if isinstance(c.prompt.prompt, str) else as_message)
    columns = {name: [p.columns.get(name) for p in prompts] for name in names}
    return columns | {  # columns of these names stay out
        "prompts": [p.prompt for p in prompts],
        "completions": answers,
        "completion_ids": [c.token_ids for c in completions],
        "trainer_state": trainer_state,
    }


def judgements(name: str, values: Any, count: int) -> Judgements:
    """Check the values that a function returned; those that are not finite, or reach LARGEST,
    become None.

    Raises:
        SandboxError: it returned no list of `count` values, or none of them can be used.
    """
    if not isinstance(values, list):
        raise SandboxError(f"returned {values!r:.100}, not a list")
    if len(values) != count:
        raise SandboxError(f"returned {len(values)} values, not {count}")
    judged = [
        float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None
        for value in values
    ]
    unusable = judged.count(None) - values.count(None)
    if unusable and unusable == count:
        raise SandboxError("returned no finite number")
    if unusable:
        message = (
            "reward.functions=%s: %d of %d values are not finite numbers; their completions are "
            "not judged"
        )
        logger.warning(message, name, unusable, count)
    return judged


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, in a thread of its own, of all coroutines of this process's reward functions. The
    thread of a notebook has a loop that runs already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-coroutines", daemon=True).start()
    return loop


class LocalFunction:
    """A function of this process: it may be a lambda or a closure, and keeps its state. It runs
    without limits and without seeds of its own; what it raises ends the run.

    Args:
        name: for messages.
        function: called as TRL calls it; may be a coroutine function.

    Attributes:
        in_this_thread: whether it must be called in the run's own thread, whose device and signals
            it may need. True unless it is a coroutine function.
    """

    def __init__(self, name: str, function: Callable):
        self._name, self._function = name, function
        self._running: Future | None = None
        asynchronous = map(inspect.iscoroutinefunction, (function, type(function).__call__))
        self.in_this_thread = not any(asynchronous)

    def __call__(
        self, completions: Sequence[Completion], _: int, trainer_state: SimpleNamespace
    ) -> Judgements:
        """Judge completions.

        Raises:
            RunError: it returned something else than a list with a value for each.
        """
        values = self._function(**reward_arguments(completions, trainer_state))
        if inspect.iscoroutine(values):
            self._running = asyncio.run_coroutine_threadsafe(values, event_loop())
            values = self._running.result()
        try:
            return judgements(self._name, json.loads(to_json(values)), len(completions))
        except SandboxError as error:
            fix = "fix it, then resume=True"
            raise RunError(f"reward_funcs: {self._name} {error}; {fix}") from None

    def close(self) -> None:
        """Cancel a coroutine under way."""
        if self._running:
            self._running.cancel()


class SandboxedFunction:
    """The user's reward function at `package.module:function`, called as TRL calls it
    (`reward_arguments`), in a process of its own; it may be a coroutine function.

    It returns a list of numbers, with None for a completion that it does not judge. If it raises,
    hangs, takes more than half of the machine's memory, or returns anything else, it judges none
    of these completions.

    Args:
        timeout: seconds of one call, and of the module's import.

    Raises:
        InputError: the path is not of that form, or nothing callable is there.
    """

    def __init__(self, path: str, timeout: float):
        self._path, self._failures, self._closed = path, 0, False
        if ":" not in path:
            raise InputError(f"reward.functions={path}: use math or package.module:function")
        self.sandbox = Sandbox(path, timeout, host_memory() // 2)
        try:
            self.sandbox.start()
        except SandboxError as error:
            raise InputError(f"reward.functions={path}: {error}") from None

    def __call__(
        self, completions: Sequence[Completion], seed: int, trainer_state: SimpleNamespace
    ) -> Judgements:
        """Judge completions.

        Args:
            seed: of Python's, numpy's and torch's generators in the function's process.

        Raises:
            RunError: it failed on MAX_FAILURES batches in a row.
        """
        arguments = reward_arguments(completions, trainer_state)
        try:
            values = judgements(self._path, self.sandbox.call(arguments, seed), len(completions))
        except SandboxError as error:
            if self._closed:
                raise RunError(f"reward.functions={self._path}: interrupted") from None
            self._fail(error)
            return [None] * len(completions)
        self._failures = 0
        return values

    def _fail(self, problem: SandboxError) -> None:
        failed = f"reward.functions={self._path}: {problem}; it"
        logger.warning("%s judges none of these completions", failed)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise RunError(
                f"{failed} failed on {self._failures} batches in a row: fix it, or raise "
                "reward.function_timeout, and continue with --resume"
            )

    def close(self) -> None:
        """End its process, and with it a call under way."""
        self._closed = True
        self.sandbox.kill()


def overlong_share(length: int, max_completion_length: int, buffer: float) -> float:
    """The share of DAPO's soft overlong punishment (eq. 13) that a completion earns, from 0 to 1.

    Args:
        length: tokens of the completion, at most `max_completion_length`.
        buffer: share of `max_completion_length`, at its end, over which the punishment grows
            linearly.
    """
    width = buffer * max_completion_length
    return max(0.0, length - (max_completion_length - width)) / width
