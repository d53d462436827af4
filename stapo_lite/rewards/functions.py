"""Rewards: `math` (graded in worker processes) and the user's own by import path."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import cloudpickle
import psutil

from stapo_lite.config import Reward
from stapo_lite.errors import InputError, RunError
from stapo_lite.rewards.grading import MathGrader, Question
from stapo_lite.rewards.sandbox import Sandbox, SandboxError, describe
from stapo_lite.types import Completion

logger = logging.getLogger(__name__)

LARGEST = 1e30
"""Bound of a reward: beyond it a square does not fit into fp32, which gradients are computed in."""
MAX_FAILURES = 3
"""Batches in a row that a user's function may fail to judge (each is tried twice) before the run ends."""


class RewardModel:
    """The weighted sum of a run's reward functions.

    Raises:
        InputError: a function cannot be imported.
    """

    def __init__(self, settings: Reward):
        self._settings = settings
        self._grader = MathGrader()
        functions = [
            self._score_math if name == "math" else UserFunction(name, settings.function_timeout)
            for name in settings.functions
        ]
        self._weighted = list(zip(functions, settings.weights or [1.0] * len(functions), strict=True))

    def _score_math(self, completions: Sequence[Completion], _: int) -> list[float | None]:
        # Token-mean would reinforce all that rambles on after an early box, up to the limit.
        asked = [c for c in completions if not (c.truncated and self._settings.truncated_is_incorrect)]
        questions = [Question(c.prompt.answer, c.text, not c.truncated) for c in asked]
        right = {c for c, verdict in zip(asked, self._grader.grade(questions), strict=True) if verdict.correct}
        return [self._settings.correct if c in right else self._settings.incorrect for c in completions]

    def score(self, completions: Sequence[Completion], seed: int) -> None:
        """Set `reward` of each completion; None where no function judged it.

        Raises:
            RunError: a user's function failed too often.
        """
        for completion in completions:
            completion.reward = None
        for function, weight in self._weighted:
            for completion, value in zip(completions, function(completions, seed), strict=True):
                if value is not None:
                    completion.reward = (completion.reward or 0.0) + weight * value

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
        memory_bytes: resident memory of the process; by default half of the machine's.

    Raises:
        InputError: the path is not of that form, or nothing callable is there.
    """

    def __init__(self, path: str, timeout: float, memory_bytes: int | None = None):
        self._path, self._failures = path, 0
        module_name, _, attribute = path.partition(":")
        if not module_name or not attribute:
            raise InputError(f"reward.functions={path}: use math or package.module:function")
        try:
            # Its process finds a function by its path; a notebook's own travels there, with what it uses.
            own = module_name == "__main__"
            function = cloudpickle.dumps(getattr(sys.modules["__main__"], attribute)) if own else path
            self.sandbox = Sandbox(function, timeout, memory_bytes or psutil.virtual_memory().total // 2)
            self.sandbox.start()
        except SandboxError as error:
            raise InputError(f"reward.functions={path}: {error}") from None
        except Exception as error:  # pickling raises what it likes
            raise InputError(f"reward.functions={path}: cannot be imported ({describe(error)})") from None

    def __call__(self, completions: Sequence[Completion], seed: int) -> list[float | None]:
        """A number for each completion, or None.

        Args:
            seed: of Python's, numpy's and torch's generators in the function's process.

        Raises:
            RunError: it failed too often in a row.
        """
        prompts = [c.prompt for c in completions]
        names = dict.fromkeys(name for p in prompts for name in p.columns)
        columns = {name: [p.columns.get(name) for p in prompts] for name in names}
        arguments = columns | {  # as in TRL, columns of these names stay out
            "prompts": [p.prompt for p in prompts],
            "completions": [
                c.text if isinstance(c.prompt.prompt, str) else [{"role": "assistant", "content": c.text}]
                for c in completions
            ],
            "completion_ids": [c.token_ids for c in completions],
        }
        for _ in range(2):
            try:
                values = self._judgements(self.sandbox.call(arguments, seed), len(completions))
                self._failures = 0
                return values
            except SandboxError as error:
                problem = error
                logger.warning("reward.functions=%s: %s", self._path, problem)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise RunError(
                f"reward.functions={self._path}: {problem}; it failed on {self._failures} batches in a row: "
                "mend it, or raise reward.function_timeout, and continue with --resume"
            )
        return [None] * len(completions)

    def _judgements(self, values: Any, count: int) -> list[float | None]:
        """The values that the function returned, None in place of what gradients cannot bear.

        Raises:
            SandboxError: they are not as many values, or none of them can be used.
        """
        if not isinstance(values, list):
            raise SandboxError(f"returned {values!r:.100}, not a list")
        if len(values) != count:
            raise SandboxError(f"returned {len(values)} values, not {count}")
        unusable = [value is not None and not _is_finite(value) for value in values]
        if values and all(unusable):
            raise SandboxError("returned no finite number")
        if any(unusable):
            message = "reward.functions=%s: %d of %d values are no finite numbers, their completions not judged"
            logger.warning(message, self._path, sum(unusable), count)
        return [float(value) if _is_finite(value) else None for value in values]

    def close(self) -> None:
        self.sandbox.close()


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def overlong_share(length: int, max_completion_length: int, buffer: float) -> float:
    """The share of DAPO's soft overlong punishment (eq. 13) that a completion earns, from 0 to 1.

    Args:
        length: tokens of the completion, at most `max_completion_length`.
        buffer: share of `max_completion_length`, at its end, over which the punishment grows linearly.
    """
    width = buffer * max_completion_length
    return max(0.0, length - (max_completion_length - width)) / width
