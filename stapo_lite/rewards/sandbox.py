"""Call functions in worker processes, which may hang or crash: pebble kills and replaces them.

This protects a run from a function's faults, not the machine from the function: it has the user's
rights, files, network and memory, and processes that it starts outlive it.
"""

import asyncio
import inspect
import pkgutil
import random
import sys
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


class Sandbox:
    """The function at `package.module:function`, in a process of its own.

    Args:
        timeout: limit in seconds for one call, and for importing the module.

    Raises:
        SandboxError: the function cannot be imported.
    """

    def __init__(self, path: str, timeout: float):
        self._path, self._timeout = path, timeout
        self._pool = Pool(workers=1)
        try:
            self._run(check_callable, path)
        except SandboxError:
            self.close()
            raise

    def call(self, arguments: dict[str, Any], seed: int) -> list[float | None]:
        """Call the function.

        Raises:
            SandboxError: it raised, exceeded the limit, or ended its process.
        """
        return self._run(call, self._path, arguments, seed % 2**32)

    def _run(self, *call: Any) -> Any:
        try:
            return self._pool.schedule(explained_call, call, timeout=self._timeout).result()
        except TimeoutError:
            raise SandboxError(f"took longer than {self._timeout:g} s") from None
        except ProcessExpired as error:
            raise SandboxError(f"ended its process with status {error.exitcode}") from None

    def close(self) -> None:
        """Kill the process, and with it a running call."""
        self._pool.kill()


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
    """Raise a TypeError if something else is at the path."""
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
    return [None if value is None else float(value) for value in values]


@cache
def runner() -> asyncio.Runner:
    """One loop for all calls: what a coroutine function keeps, such as a client, is tied to it."""
    return asyncio.Runner()
