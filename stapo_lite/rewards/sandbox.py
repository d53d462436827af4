"""Call functions in worker processes, which may hang or crash: pebble kills and replaces them.

This protects a run from a function's faults, not the machine from the function: it has the user's
rights, files, network and memory, and processes that it starts outlive it.
"""

import asyncio
import inspect
import pkgutil
import random
import sys
from collections.abc import Iterable
from concurrent.futures import Future, TimeoutError
from functools import cache
from io import TextIOWrapper
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any
from weakref import WeakSet

from pebble import ProcessExpired, ProcessPool

from stapo_lite.errors import one_line


class SandboxError(Exception):
    """The sandboxed call failed; the message says why."""


class Worker(ForkServerProcess):
    """A process that does not import the user's script, whose lines it would run again unless they
    are under `if __name__ == "__main__"`."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class Workers(ForkServerContext):
    """Starts workers from a server that has imported nothing."""

    Process = Worker


class Pool(ProcessPool):
    """Worker processes, which start with their first call.

    Args:
        options: of `ProcessPool`.
    """

    def __init__(self, workers: int, **options: Any):
        super().__init__(workers, context=Workers(), **options)
        self._calls: WeakSet[Future] = WeakSet()

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Begin a call; its future."""
        call = super().schedule(*arguments, **options)
        self._calls.add(call)
        return call

    def kill(self) -> None:
        """Kill the processes, and cancel their calls, which threads may wait for."""
        self.stop()
        for call in list(self._calls):
            call.cancel()
        self.join()


def run_in(pool: Pool, timeout: float, function: Any, *arguments: Any) -> Any:
    """Call a function in one of the pool's processes.

    Raises:
        SandboxError: it raised, exceeded `timeout` seconds, or ended its process.
    """
    try:
        return pool.schedule(explained_call, [function, *arguments], timeout=timeout).result()
    except TimeoutError:
        raise SandboxError(f"took longer than {timeout:g} s") from None
    except ProcessExpired as error:
        raise SandboxError(f"ended its process with status {error.exitcode}") from None


def explained_call(function: Any, *arguments: Any) -> Any:
    """Call a function; in the worker. Any error becomes a SandboxError, since not every error can
    be sent to the trainer, and a SystemExit would end it."""
    if isinstance(sys.stdout, TextIOWrapper):  # prints are seen even if the worker is killed
        sys.stdout.reconfigure(line_buffering=True)
    try:
        return function(*arguments)
    except BaseException as error:
        raise SandboxError(f"raised {type(error).__name__}: {one_line(error)}") from error


def check_callable(path: str) -> None:
    """Raise a TypeError unless something callable is at the path."""
    if not callable(pkgutil.resolve_name(path)):
        raise TypeError("not a function")


def call(path: str, arguments: dict[str, Any], seed: int) -> list[float | None]:
    """Call a function, which returns a number or None for each completion; in the worker."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    values = pkgutil.resolve_name(path)(**arguments)
    if inspect.iscoroutine(values):
        values = runner().run(values)
    return plain(values)


def plain(values: Iterable[Any]) -> list[float | None]:
    """Numbers of any library as floats; None stays."""
    return [None if value is None else float(value) for value in values]


@cache
def runner() -> asyncio.Runner:
    """One loop for all calls: what a coroutine function keeps, such as a client, is tied to it."""
    return asyncio.Runner()
