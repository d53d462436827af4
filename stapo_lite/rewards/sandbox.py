"""A function in a process of its own, where it may hang, crash or take all memory.

The process is `python -m stapo_lite.rewards.sandbox CONNECTION`. It imports neither torch nor
anything of the trainer, only what the function asks for, so that starting another one is quick.
The parent sends pickled arguments. The process answers in JSON: with pickled values the parent
would have to import the user's types, or numpy's, to read them.

Libraries with limits for each task (pebble, loky) start their workers by `multiprocessing`. Each
worker then imports the trainer's main module, and with it torch, and processes that a function
started outlive it.
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
        timeout: seconds of one call, and of the module's import.
        memory_bytes: limit for the process together with all that it started.
    """

    def __init__(self, function: str, timeout: float, memory_bytes: int):
        self.function = function
        self.timeout = timeout
        self.memory_bytes = memory_bytes
        self._process: subprocess.Popen | None = None

    def start(self) -> bool:
        """Start the process unless it runs; returns whether it was started.

        Raises:
            SandboxError: the function cannot be imported, or the system starts no process.
        """
        if self._process is not None:
            return False
        self._connection, theirs = Pipe()
        number = theirs.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stapo_lite.rewards.sandbox", str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a process group, which ends as a whole
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            self._connection.close()
            raise SandboxError(f"no process can be started ({error.strerror})") from None
        finally:
            theirs.close()
        try:
            self._ask(self.function, self.timeout)
        except SandboxError:
            self.close()
            raise
        return True

    def call(self, arguments: dict[str, Any], seed: int = 0, timeout: float | None = None) -> Any:
        """Call the function; returns its value as Python's own numbers, texts and lists.

        Args:
            arguments: by keyword.
            seed: of Python's, numpy's and torch's generators in the process.
            timeout: seconds; by default the sandbox's.

        Raises:
            SandboxError: it raised, passed a limit, or ended its process. If the process has
                ended, the next call starts another one.
        """
        self.start()
        timeout = timeout or self.timeout
        return self._ask((arguments, seed % 2**32, timeout), timeout)

    def _ask(self, question: Any, timeout: float) -> Any:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + timeout
        limit_waiting(self._connection, timeout)
        try:
            # Nobody would read a long message to a process that has ended, if one that it started
            # holds the connection open.
            if process.poll() is None:
                self._connection.send_bytes(pickle.dumps(question))
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
        """End the process and what it started; a call under way in another thread then fails."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and what it started, when no call is under way. The next call starts
        another one."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._process = None
            self._connection.close()


def limit_waiting(connection: Connection, timeout: float) -> None:
    """Let a connection raise BlockingIOError if a message makes no progress for so many seconds,
    since its other end was stopped, or has ended while another process holds it open."""
    limit = struct.pack("ll", math.ceil(timeout), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def used_bytes(pid: int, limit: int) -> int:
    """Memory of a process and of those that it started; 0 if one of them ends just now.

    Pages that they share count once: each process has its part of them (PSS). Finding that out
    takes a walk through all pages, so it is done only if the resident sizes, in which shared pages
    count for every process, pass the limit.
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
    """Receive the function's path, then (keyword arguments, seed, seconds) of each call; answer
    [value, problem] to each.

    Raises:
        EOFError: the parent has closed the connection, or ended.
    """
    path, own_pid = connection.recv(), os.getpid()
    try:
        function = pkgutil.resolve_name(path)
        problem = None if callable(function) else f"is a {type(function).__name__}, not a function"
    except Exception as error:  # the module is the user's
        problem = f"cannot be imported ({type(error).__name__}: {one_line(error)})"
    connection.send_bytes(to_json([None, problem]))
    # One loop for all calls: what a coroutine function holds, such as a client, belongs to a loop.
    loop = asyncio.Runner()
    while problem is None:
        arguments, seed, timeout = connection.recv()
        # Without a handler the signal ends even C code. It does so, too, if the parent is gone.
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
        if os.getpid() != own_pid:  # the function has forked, and came back twice
            os._exit(1)
        connection.send_bytes(answer)


def _place(error: Exception, path: str) -> str:
    """Describe the line of the function's own file that raised an error; empty if none did."""
    module = sys.modules[path.partition(":")[0]]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == getattr(module, "__file__", None):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def to_json(value: Any) -> bytes:
    """Encode a value, with arrays and other iterables as lists, other numbers as floats, and NaN
    for anything else."""
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
    # If the machine's memory ends before the limit, let the kernel end this process first.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(EOFError, ConnectionError):  # the trainer has ended
        answer_calls(Connection(int(sys.argv[1])))
