"""The seconds of a step, by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of a step, by phase.

    Attributes:
        seconds: so far in this step.
    """

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Start at zero."""
        self.seconds = dict.fromkeys(("rollout", "reward", "update"), 0.0)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to phase `name`."""
        moment = time.perf_counter()
        self.seconds[name] += moment - self._last
        self._last = moment

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time spent in the context."""
        last = self._last
        begin = time.perf_counter()
        yield
        self._last = last + time.perf_counter() - begin  # also right for nested stops
