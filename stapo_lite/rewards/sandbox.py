"""Call functions in worker processes, which may hang or crash: pebble kills and replaces them.

This protects a run from a function's faults, not the machine from the function: it has the user's
rights, files, network and memory, and processes that it starts outlive it.
"""

import asyncio
import ctypes
import inspect
import pkgutil
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from io import TextIOWrapper
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Lock
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

from pebble import ProcessExpired, ProcessPool

from stapo_lite.errors import one_line

POLL = 1.0
"""Seconds between two looks at whether a pool that is waited for has broken."""


class SandboxError(Exception):
    """The sandboxed call failed; the message says why."""


class Worker(SpawnProcess):
    """A process that does not import the user's script, whose lines it would run again unless they
    are under `if __name__ == "__main__"`."""

    _one_at_a_time = Lock()

    def start(self) -> None:
        """Start while the script has neither name nor file: multiprocessing then leaves it out, and
        other threads still find its classes to pickle."""
        nameless = patch.multiple("__main__", __spec__=None, __file__=None, create=True)
        with self._one_at_a_time, nameless:
            super().start()


class Workers(SpawnContext):
    """Starts workers as fresh interpreters."""

    Process = Worker


class Pool:
    """Worker processes, which start with their first call. They end with the process that started
    them, however it ends.

    Args:
        initializer: called in each new worker.
    """

    def __init__(self, workers: int, initializer: Callable[[], None] | None = None):
        self._make = partial(
            ProcessPool, workers, initializer=begin, initargs=[initializer], context=Workers()
        )
        self._pool = self._make()
        self._calls: WeakSet[Future] = WeakSet()
        self._killed = False

    def schedule(
        self, function: Any, arguments: Sequence[Any], timeout: float | None = None
    ) -> Future:
        """Begin a call."""
        self._revive()
        call = self._pool.schedule(function, arguments, timeout=timeout)
        self._calls.add(call)
        return call

    def call(
        self, function: Any, rows: Sequence[Sequence[Any]], timeout: float, tries: int = 2
    ) -> list[Future]:
        """Call a function with the arguments of each row, and wait for all.

        A worker that dies while no call runs, such as by the out-of-memory killer, breaks pebble's
        pool, and with it the calls that have not begun. They are made again in a new one.

        Args:
            timeout: seconds of one call.

        Returns:
            The finished calls. Their results raise TimeoutError, ProcessExpired or what the
            function raised; CancelledError if the pool was killed.

        Raises:
            BrokenProcessPool: the new workers died, too.
        """
        calls = [self.schedule(function, row, timeout) for row in rows]
        for number, call in enumerate(calls):
            while not call.done():  # `wait` says that of a cancelled one only once pebble saw it
                wait([call], POLL)
                self._revive()  # pebble leaves calls in its queue waiting
            lost = call.cancelled() or isinstance(call.exception(), BrokenProcessPool)
            if lost and not self._killed:
                if tries == 1:
                    raise BrokenProcessPool("the processes that call rewards do not start")
                return calls[:number] + self.call(function, rows[number:], timeout, tries - 1)
        return calls

    def _revive(self) -> None:
        """Replace a pool that broke."""
        if not (self._killed or self._pool.active):
            self._cancel_calls()
            self._pool.join()
            self._pool = self._make()

    def _cancel_calls(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def kill(self) -> None:
        """Kill the processes, and cancel their calls, which threads may wait for."""
        self._killed = True
        self._pool.stop()
        self._cancel_calls()
        self._pool.join()


def begin(initializer: Callable[[], None] | None) -> None:
    """Begin a worker: the system kills it with its parent, also if it hangs in C code."""
    end_with_parent(signal.SIGKILL)
    if initializer is not None:
        initializer()


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def run_in(pool: Pool, timeout: float, function: Any, *arguments: Any) -> Any:
    """Call a function in one of the pool's processes.

    Raises:
        SandboxError: it raised, exceeded `timeout` seconds, or ended its process.
    """
    try:
        (finished,) = pool.call(explained_call, [[function, *arguments]], timeout)
        return finished.result()
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
