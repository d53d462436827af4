"""Rewards: `math` (graded in worker processes) and the user's own, by import path or as they are."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from stapo_lite.config import Reward
from stapo_lite.errors import InputError, RunError
from stapo_lite.machine import host_memory
from stapo_lite.rewards.grading import MathGrader, Question
from stapo_lite.rewards.sandbox import Sandbox, SandboxError, as_json
from stapo_lite.types import Completion

logger = logging.getLogger(__name__)

LARGEST = 1e30
"""Bound of a reward, with room below fp32's largest number (3e38): losses and gradients are computed in fp32."""
MAX_FAILURES = 3
"""Batches in a row that a user's function fails to judge, which end the run."""


class RewardModel:
    """The weighted sum of a run's reward functions, which are called side by side.

    Args:
        max_steps: of the run, for `trainer_state`.
        own: functions of this process by their names in `settings.functions`.

    Attributes:
        grader: of `math`, and of benchmarks; its processes start with the first answer.

    Raises:
        InputError: a function cannot be imported.
    """

    def __init__(self, settings: Reward, max_steps: int, own: Mapping[str, Callable] | None = None):
        self._settings, self._max_steps = settings, max_steps
        self.grader = MathGrader()
        self._functions = {name: self._find(name, own or {}) for name in settings.functions}
        self._threads = ThreadPoolExecutor(len(self._functions), thread_name_prefix="rewards")

    def _find(self, name: str, own: Mapping[str, Callable]) -> Callable[..., list[float | None]]:
        if name in own:
            return OwnFunction(name, own[name])
        return self._score_math if name == "math" else UserFunction(name, self._settings.function_timeout)

    def _score_math(self, completions: Sequence[Completion], *_: Any) -> list[float | None]:
        # With token-mean, all text between an early box and the limit would be reinforced.
        asked = [c for c in completions if not (c.truncated and self._settings.truncated_is_incorrect)]
        questions = [Question(c.prompt.answer, c.whole_text, not c.truncated) for c in asked]
        right = {c for c, verdict in zip(asked, self.grader.grade(questions), strict=True) if verdict.correct}
        return [self._settings.correct if c in right else self._settings.incorrect for c in completions]

    def score(self, completions: Sequence[Completion], seed: int, step: int) -> None:
        """Set `scores` and `reward` of each completion.

        Args:
            step: of the run, for `trainer_state`.

        Raises:
            RunError: a user's function failed too often.
            Exception: what a function of this process raised.
        """
        state = SimpleNamespace(global_step=step - 1, max_steps=self._max_steps)  # as TRL has it: steps done
        beside = {
            name: self._threads.submit(function, completions, seed, state)
            for name, function in self._functions.items()
            if not (isinstance(function, OwnFunction) and function.in_this_thread)
        }
        values = {
            name: beside[name].result() if name in beside else function(completions, seed, state)
            for name, function in self._functions.items()
        }
        weights = dict(zip(self._functions, self._settings.weights or [1.0] * len(values), strict=True))
        for number, completion in enumerate(completions):
            scores = {name: judged[number] for name, judged in values.items()}
            completion.scores = {name: score for name, score in scores.items() if score is not None}
            # A weight of 0 only logs: such a function does not make a completion judged.
            weighted = [weights[name] * score for name, score in completion.scores.items() if weights[name]]
            # To 12 digits: 0.1 + 0.2 and 0.3 are equal rewards, from which nothing is to be learned.
            completion.reward = float(f"{sum(weighted):.12g}") if weighted else None

    def close(self) -> None:
        """End all calls, also those under way."""
        for function in self._functions.values():
            if isinstance(function, UserFunction | OwnFunction):
                function.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grader.close()


def reward_arguments(completions: Sequence[Completion], trainer_state: SimpleNamespace) -> dict[str, Any]:
    """Keyword arguments of a reward function, those of TRL's GRPOTrainer: `prompts`, `completions` (text, or messages
    where the prompt is messages), `completion_ids`, `trainer_state` with `global_step` and `max_steps`, and every other
    column of the data set as a list."""
    prompts = [c.prompt for c in completions]
    names = dict.fromkeys(name for p in prompts for name in p.columns)
    columns = {name: [p.columns.get(name) for p in prompts] for name in names}
    return columns | {  # columns of these names stay out
        "prompts": [p.prompt for p in prompts],
        "completions": [
            c.text if isinstance(c.prompt.prompt, str) else [{"role": "assistant", "content": c.text}]
            for c in completions
        ],
        "completion_ids": [c.token_ids for c in completions],
        "trainer_state": trainer_state,
    }


def judgements(name: str, values: Any, count: int) -> list[float | None]:
    """The values that a function returned, None in place of those that are not finite or reach LARGEST.

    Raises:
        SandboxError: it returned no list of `count` values, or none of them can be used.
    """
    if not isinstance(values, list):
        raise SandboxError(f"returned {values!r:.100}, not a list")
    if len(values) != count:
        raise SandboxError(f"returned {len(values)} values, not {count}")
    unusable = [value is not None and not _is_finite(value) for value in values]
    if values and all(unusable):
        raise SandboxError("returned no finite number")
    if any(unusable):
        message = "reward.functions=%s: %d of %d values are not finite numbers; their completions are not judged"
        logger.warning(message, name, sum(unusable), count)
    return [float(value) if _is_finite(value) else None for value in values]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


class OwnFunction:
    """A function that the caller of a run has given as it is: it may be a lambda or a closure, and keeps its state. It
    runs in the trainer's process, without limits and without seeds of its own; what it raises ends the run.

    Args:
        name: for messages.
        function: called as TRL calls it; may be a coroutine function.

    Attributes:
        in_this_thread: whether it must be called where the run lives, on the device of that thread and with its
            signals. A coroutine that it returns has an event loop of its own, the same for all calls, in a thread of
            its own: a notebook's thread has one that runs.
    """

    def __init__(self, name: str, function: Callable):
        self._name, self._function, self._loop = name, function, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"rewards-{name}", daemon=True).start()
        asynchronous = map(inspect.iscoroutinefunction, (function, type(function).__call__))
        self.in_this_thread = not any(asynchronous)

    def __call__(self, completions: Sequence[Completion], _: int, trainer_state: SimpleNamespace) -> list[float | None]:
        """A number for each completion, or None.

        Raises:
            RunError: it returned something else.
        """
        values = self._function(**reward_arguments(completions, trainer_state))
        if inspect.iscoroutine(values):
            values = asyncio.run_coroutine_threadsafe(values, self._loop).result()
        try:
            return judgements(self._name, as_json(values), len(completions))
        except SandboxError as error:
            raise RunError(f"reward_funcs: {self._name} {error}; mend it, then resume=True") from None

    def close(self) -> None:
        """Cancel a coroutine under way, and stop its loop."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.call_soon(self._loop.stop)

        asyncio.run_coroutine_threadsafe(end(), self._loop)


class UserFunction:
    """The user's reward function at `package.module:function`, called as TRL calls it (`reward_arguments`), in a
    process of its own; it may be a coroutine function.

    It returns a list of numbers, or None for a completion that it does not judge. If it raises, hangs, takes too much
    memory, or returns anything else, it judges none of these completions.

    Args:
        timeout: seconds of one call, and of the module's import.
        memory_bytes: resident memory of the process; by default half of the machine's.

    Raises:
        InputError: the path is not of that form, or nothing callable is there.
    """

    def __init__(self, path: str, timeout: float, memory_bytes: int | None = None):
        self._path, self._failures, self._closed = path, 0, False
        module_name, _, attribute = path.partition(":")
        if not module_name or not attribute:
            raise InputError(f"reward.functions={path}: use math or package.module:function")
        self.sandbox = Sandbox(path, timeout, memory_bytes or host_memory() // 2)
        try:
            self.sandbox.start()
        except SandboxError as error:
            raise InputError(f"reward.functions={path}: {error}") from None

    def __call__(
        self, completions: Sequence[Completion], seed: int, trainer_state: SimpleNamespace
    ) -> list[float | None]:
        """A number for each completion, or None.

        Args:
            seed: of Python's, numpy's and torch's generators in the function's process.

        Raises:
            RunError: it failed too often in a row.
        """
        arguments = reward_arguments(completions, trainer_state)
        try:
            values = judgements(self._path, self.sandbox.call(arguments, seed), len(completions))
            self._failures = 0
            return values
        except SandboxError as error:
            problem = error
        if self._closed:
            raise RunError(f"reward.functions={self._path}: interrupted")
        logger.warning("reward.functions=%s: %s; it judges none of these completions", self._path, problem)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise RunError(
                f"reward.functions={self._path}: {problem}; it failed on {self._failures} batches in a row: "
                "fix it, or raise reward.function_timeout, and continue with --resume"
            )
        return [None] * len(completions)

    def close(self) -> None:
        """End its process, and with it a call under way."""
        self._closed = True
        self.sandbox.kill()


def overlong_share(length: int, max_completion_length: int, buffer: float) -> float:
    """The share of DAPO's soft overlong punishment (eq. 13) that a completion earns, from 0 to 1.

    Args:
        length: tokens of the completion, at most `max_completion_length`.
        buffer: share of `max_completion_length`, at its end, over which the punishment grows linearly.
    """
    width = buffer * max_completion_length
    return max(0.0, length - (max_completion_length - width)) / width
