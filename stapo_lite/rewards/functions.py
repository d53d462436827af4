"""Rewards: the package's functions and the user's, given by import path or as Python objects."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

from stapo_lite.config import Reward
from stapo_lite.errors import InputError, RunError
from stapo_lite.loop_thread import submit
from stapo_lite.rewards.sandbox import Pool, SandboxError, call, check_callable, plain, run_in
from stapo_lite.types import Completion, copied

logger = logging.getLogger(__name__)

LARGEST = 1e30
"""Exclusive bound on a score's magnitude. It leaves room below fp32's maximum (3e38) for losses and
gradients."""
MAX_FAILURES = 3
"""Batches in a row on which a user's function may fail before the run ends."""

Scores = list[float | None]
"""A score per completion; None if the function gives none."""
RewardFunction = Callable[[Sequence[Completion], int, SimpleNamespace], Scores]
"""Called with completions, a seed and TRL's `trainer_state`."""


class RewardModel:
    """The weighted sum of a run's reward functions, which run concurrently.

    Args:
        max_steps: the run's, for `trainer_state`.
        own: the caller's functions, called in this process, by name in `settings.functions`.
        built_in: the package's functions, such as `math`, by name.

    Raises:
        InputError: a function cannot be imported.
    """

    def __init__(
        self,
        settings: Reward,
        max_steps: int,
        own: Mapping[str, Callable] = {},
        built_in: Mapping[str, RewardFunction] = {},
    ):
        self._max_steps = max_steps
        functions = dict(built_in)
        functions |= {name: LocalFunction(name, function) for name, function in own.items()}
        self._functions = {
            name: functions.get(name) or SandboxedFunction(name, settings.function_timeout)
            for name in settings.functions
        }
        weights = settings.weights or [1.0] * len(self._functions)
        self._weights = dict(zip(self._functions, weights, strict=True))
        self._threads = ThreadPoolExecutor(len(weights) or 1, thread_name_prefix="rewards")

    def score(self, completions: Sequence[Completion], seed: int, step: int) -> None:
        """Set `scores` and `reward` of each completion.

        Args:
            step: the run's, for `trainer_state`.

        Raises:
            RunError: a user's function failed too often.
            Exception: raised by a function called in this process.
        """
        # TRL's global_step counts finished steps.
        state = SimpleNamespace(global_step=step - 1, max_steps=self._max_steps)
        running = {}
        values = {}
        for name, function in self._functions.items():
            if not is_plain(function):
                running[name] = self._threads.submit(function, completions, seed, state)
        for name, function in self._functions.items():
            if is_plain(function):
                values[name] = function(completions, seed, state)
        values |= {name: future.result() for name, future in running.items()}
        for number, completion in enumerate(completions):
            scores = {name: values[name][number] for name in self._functions}
            completion.scores = {name: score for name, score in scores.items() if score is not None}
            # A function of weight 0 is only logged; it alone gives no reward.
            weighted = [
                self._weights[name] * score
                for name, score in completion.scores.items()
                if self._weights[name]
            ]
            # Rounded to 12 digits so that equal rewards (0.1 + 0.2 and 0.3) give no advantage.
            completion.reward = float(f"{sum(weighted):.12g}") if weighted else None

    @property
    def runs_apart(self) -> bool:
        """Whether none of the functions is the caller's own, in this process."""
        return not any(isinstance(f, LocalFunction) for f in self._functions.values())

    def close(self) -> None:
        """End all calls, including those in progress."""
        for function in self._functions.values():
            if isinstance(function, LocalFunction | SandboxedFunction):
                function.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_plain(function: RewardFunction) -> bool:
    """Whether it is the caller's plain function, which runs in the caller's thread."""
    return isinstance(function, LocalFunction) and not function.is_coroutine


def reward_arguments(
    completions: Sequence[Completion], trainer_state: SimpleNamespace
) -> dict[str, Any]:
    """Keyword arguments of a reward function, those of TRL's GRPOTrainer: `prompts`, `completions`
    (text, or messages if the prompt is messages), `completion_ids`, `trainer_state` with
    `global_step` and `max_steps`, and every other column of the data set as a list.

    Lists and dictionaries are copies: a function that changes them changes no row or completion.
    """
    prompts = [c.prompt for c in completions]
    names = {name for p in prompts for name in p.columns}
    answers: list[str | list[dict[str, Any]]] = []
    for c in completions:
        turns = c.messages or [{"role": "assistant", "content": c.text}]
        answers.append(c.text if isinstance(c.prompt.prompt, str) else turns)
    columns: dict[str, Any] = {name: [p.columns.get(name) for p in prompts] for name in names}
    columns |= {  # these win over columns of the same name
        "prompts": [p.prompt for p in prompts],
        "completions": answers,
        "completion_ids": [c.token_ids for c in completions],
    }
    return copied(columns | {"trainer_state": trainer_state})


def check_scores(name: str, values: Scores, count: int) -> Scores:
    """Check the values that a function returned. Those that are not finite or at least LARGEST in
    magnitude become None.

    Raises:
        SandboxError: they are not `count`.
    """
    if len(values) != count:
        raise SandboxError(f"returned {len(values)} values, not {count}")
    scores = [value if value is not None and abs(value) < LARGEST else None for value in values]
    unusable = scores.count(None) - values.count(None)
    if unusable:
        message = (
            "reward.functions=%s: %d of %d values are not finite numbers; their completions get "
            "no score"
        )
        logger.warning(message, name, unusable, count)
    return scores


class LocalFunction:
    """A reward function called in this process: it may be a lambda or closure, and keeps its state.
    It has no time limit and is not seeded; an exception in it ends the run.

    Args:
        name: for messages.
        function: called as TRL calls it; may be a coroutine function.
    """

    def __init__(self, name: str, function: Callable):
        self._name = name
        self._function = function
        self._task: asyncio.Task | None = None
        kinds = map(inspect.iscoroutinefunction, (function, type(function).__call__))
        self.is_coroutine = any(kinds)

    def __call__(
        self, completions: Sequence[Completion], _: int, trainer_state: SimpleNamespace
    ) -> Scores:
        """Score completions.

        Raises:
            RunError: it did not return a list with a value for each completion.
        """
        arguments = reward_arguments(completions, trainer_state)
        for name in {name for c in completions for name in c.prompt.live}:
            arguments[name] = [c.prompt.live.get(name) for c in completions]
        values = self._function(**arguments)
        if inspect.iscoroutine(values):
            values = submit(self._run(values)).result()
        try:
            return check_scores(self._name, plain(values), len(completions))
        except (SandboxError, TypeError, ValueError) as error:
            fix = "fix it, then resume=True"
            raise RunError(f"reward_funcs: {self._name} {error}; {fix}") from None

    def close(self) -> None:
        """Cancel a running coroutine, and wait until it has ended."""
        if self._task is not None:
            submit(end(self._task)).result()

    async def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._task = asyncio.current_task()
        return await coroutine


async def end(task: asyncio.Task) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])


class SandboxedFunction:
    """The user's reward function at `package.module:function`, called as TRL calls it
    (`reward_arguments`), in its own process; it may be a coroutine function.

    It returns a list of numbers, with None for a completion that it gives no score. If it raises,
    hangs or returns anything else, no completion of the call gets one.

    Args:
        timeout: seconds of one call, and of the module's import.

    Raises:
        InputError: the path is not of that form, or nothing callable is there.
    """

    def __init__(self, path: str, timeout: float):
        self._path = path
        self._failures = 0
        if ":" not in path:
            raise InputError(f"reward.functions={path}: use math or package.module:function")
        self._pool = Pool(workers=1)
        self._run = partial(run_in, self._pool, timeout)
        try:
            self._run(check_callable, path)
        except SandboxError as error:
            self.close()
            raise InputError(f"reward.functions={path}: {error}") from None

    def __call__(
        self, completions: Sequence[Completion], seed: int, trainer_state: SimpleNamespace
    ) -> Scores:
        """Score completions.

        Args:
            seed: for Python's, numpy's and torch's generators in the function's process.

        Raises:
            RunError: it failed on MAX_FAILURES batches in a row.
        """
        arguments = reward_arguments(completions, trainer_state)
        try:
            values = self._run(call, self._path, arguments, seed % 2**32)
            scores = check_scores(self._path, values, len(completions))
        except SandboxError as error:
            failed = f"reward.functions={self._path}: {error}; it"
            cause = error.__cause__  # with the lines of the user's function
            logger.warning("%s scores none of these completions", failed, exc_info=cause)
            self._failures += 1
            if self._failures < MAX_FAILURES:
                return [None] * len(completions)
            raise RunError(
                f"{failed} failed on {self._failures} batches in a row: fix it, or raise "
                "reward.function_timeout, and continue with --resume"
            ) from None
        self._failures = 0
        return scores

    def close(self) -> None:
        """Kill its process, and with it a running call."""
        self._pool.kill()
