"""Run a function in its own process, where it may hang, crash or exhaust its memory limit.

The process is `python -m stapo_lite.rewards.sandbox CONNECTION`. It imports neither torch nor the
trainer, only what the function needs, so that a restart is quick. The parent sends pickled
arguments; the process replies in JSON, since unpickling could make the parent import the user's
types or numpy.

Libraries with limits per task (pebble, loky) start workers with `multiprocessing`: each worker
imports the trainer's main module, and so torch, and processes that a function starts outlive it.
"""

import asyncio
import inspect
import json
import math
import os
import pickle
import pkgutil
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from stapo_lite.errors import one_line


class SandboxError(Exception):
    """The sandboxed call failed; the message says why."""


class Sandbox:
    """A function whose calls are limited in time and memory.

    Args:
        function: `package.module:function`.
        timeout: limit in seconds for one call, and for importing the module.
        memory_bytes: limit for the process and its descendants together.

    Attributes:
        killed: whether `kill` was called.
    """

    def __init__(self, function: str, timeout: float, memory_bytes: int):
        self.function = function
        self.timeout = timeout
        self.memory_bytes = memory_bytes
        self.killed = False
        self._process: subprocess.Popen | None = None

    def start(self) -> bool:
        """Start the process unless it is running; returns whether it was started.

        Raises:
            SandboxError: the function cannot be imported, or no process can be started.
        """
        if self._process is not None:
            return False
        self._connection, theirs = Pipe()
        number = theirs.fileno()
        # Unbuffered: what the function prints is not lost when its process is killed.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment["PYTHONUNBUFFERED"] = "1"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stapo_lite.rewards.sandbox", str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # its own process group, to kill as a whole
                env=os.environ | environment,
            )
        except OSError as error:
            self._connection.close()
            raise SandboxError(f"no process can be started ({error.strerror})") from None
        finally:
            theirs.close()
        if self.killed:  # by another thread, which may not have seen the process
            self._end_process()
        try:
            self._ask(pickle.dumps(self.function), self.timeout)
        except SandboxError:
            self.close()
            raise
        return True

    def call(self, arguments: dict[str, Any], seed: int = 0, timeout: float | None = None) -> Any:
        """Call the function; returns its value as decoded from JSON.

        Args:
            arguments: keyword arguments.
            seed: for Python's, numpy's and torch's generators in the process.
            timeout: limit in seconds; by default the sandbox's.

        Raises:
            SandboxError: it raised, exceeded a limit, or ended its process. If the process is
                gone, the next call starts a new one.
        """
        timeout = timeout or self.timeout
        try:
            question = pickle.dumps((arguments, seed % 2**32, timeout))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SandboxError(f"cannot be sent its arguments: {error}") from error
        self.start()
        return self._ask(question, timeout)

    def _ask(self, question: bytes, timeout: float) -> Any:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + timeout
        limit_waiting(self._connection, timeout)
        try:
            # If a child keeps the connection of an ended process open, a long message would block:
            # nobody reads it.
            if process.poll() is None:
                self._connection.send_bytes(question)
            while not self._connection.poll(0.1):
                if process.poll() is not None:
                    raise EOFError
                if time.monotonic() > deadline:
                    raise SandboxError(f"took longer than {timeout:g} s")
                if used_bytes(process.pid, self.memory_bytes) > self.memory_bytes:
                    raise SandboxError(f"took more than {self.memory_bytes / 2**30:.3g} GiB")
            value, problem = json.loads(self._connection.recv_bytes())
        except BlockingIOError:  # from `limit_waiting`
            self.close()
            raise SandboxError(f"took longer than {timeout:g} s") from None
        except (EOFError, OSError):
            status = process.wait()
            self.close()
            raise SandboxError(f"ended its process with status {status}") from None
        except SandboxError:
            self.close()
            raise
        if problem is not None:
            raise SandboxError(problem)
        return value

    def kill(self) -> None:
        """Kill the process and its children, for good: a call running in another thread then fails,
        and so does any later one."""
        self.killed = True
        self._end_process()

    def _end_process(self) -> None:
        if process := self._process:  # which another thread may set to None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and its children; no call may be running. The next call starts a new
        one."""
        if self._process is not None:
            self._end_process()
            self._process.wait()
            self._process = None
            self._connection.close()


def limit_waiting(connection: Connection, timeout: float) -> None:
    """Make a connection raise BlockingIOError if a message makes no progress for `timeout` seconds:
    the other end was stopped, or it ended while another process holds the connection open."""
    limit = struct.pack("ll", math.ceil(timeout), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def used_bytes(pid: int, limit: int) -> int:
    """Memory of a process and its descendants, in bytes; 0 if one of them has just ended.

    Shared pages should count once, as in PSS. That takes a walk through all pages, so PSS is read
    only if the sum of resident sizes, which counts shared pages for every process, exceeds the
    limit.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
        resident = sum(one.memory_info().rss for one in processes)
        if resident <= limit:
            return resident
        return sum(one.memory_full_info().pss for one in processes)
    return 0


def answer_calls(connection: Connection) -> None:
    """Receive the function's path, then (keyword arguments, seed, timeout in seconds) of each call;
    reply to each with [value, problem].

    Raises:
        EOFError: the parent closed the connection or ended.
    """
    path, own_pid = connection.recv(), os.getpid()
    try:
        function = pkgutil.resolve_name(path)
        problem = None if callable(function) else f"is a {type(function).__name__}, not a function"
    except Exception as error:  # the module is the user's
        problem = f"cannot be imported ({type(error).__name__}: {one_line(error)})"
    connection.send_bytes(to_json([None, problem]))
    # One loop for all calls: what a coroutine function keeps, such as a client, is tied to a loop.
    loop = asyncio.Runner()
    while problem is None:
        arguments, seed, timeout = connection.recv()
        # With no handler, SIGALRM kills the process even in C code, and even without a parent.
        signal.alarm(math.ceil(timeout) + 1)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)
        try:
            value = function(**arguments)
            if inspect.iscoroutine(value):
                value = loop.run(value)
            answer = to_json([value, None])
        except Exception as error:
            reason = f"raised {type(error).__name__}: {one_line(error)}{_place(error, path)}"
            answer = to_json([None, reason])
        signal.alarm(0)
        if os.getpid() != own_pid:  # the function forked and returned twice
            os._exit(1)
        connection.send_bytes(answer)


def _place(error: Exception, path: str) -> str:
    """The line in the function's own file that raised an error; empty if there is none."""
    module = sys.modules[path.partition(":")[0]]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == getattr(module, "__file__", None):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def to_json(value: Any) -> bytes:
    """Encode a value: arrays and other iterables as lists, other numbers as floats, anything else
    as NaN."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Convert a value of a type that JSON does not know."""
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        return float(value)
    except (TypeError, ValueError):
        return list(value) if isinstance(value, Iterable) else math.nan


if __name__ == "__main__":
    # If the machine runs out of memory first, let the kernel kill this process.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(EOFError, ConnectionError):  # the trainer has ended
        answer_calls(Connection(int(sys.argv[1])))
