"""A function in a process of its own: it may hang, crash or take all memory there.

The process is `python -m stapo_lite.rewards.sandbox CONNECTION MEMORY`. It imports neither torch nor anything of the
trainer, only what the function asks for, so that replacing one is quick. Arguments are pickled by the parent and
read by the process alone. What comes back is JSON: pickled values would make the parent import the user's or numpy's
types, to read them.

Arguments and values lie in a file in memory that both have open; only the number of the call goes through the
connection. A message of a few bytes never blocks, and comes whole or not at all: even if the process has died and one
that it started keeps the connection open.
Libraries with limits for each task (pebble, loky) start workers by `multiprocessing`, which imports the trainer's main
module, and with it torch, into each, and they leave behind what a function started.
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
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

from stapo_lite.errors import one_line


class SandboxError(Exception):
    """A call that gave no value; its message says why."""


class Sandbox:
    """A function whose calls are limited in time and memory.

    Args:
        function: `package.module:function`.
        timeout: seconds of one call, and of the module's import.
        memory_bytes: memory of the process and of what it started.
    """

    def __init__(self, function: str, timeout: float, memory_bytes: int):
        self.function, self.timeout, self.memory_bytes = function, timeout, memory_bytes
        self._process: subprocess.Popen | None = None
        self._number = 0

    def start(self) -> bool:
        """Start the process unless it runs; returns whether it was started.

        Raises:
            SandboxError: the function cannot be imported.
        """
        if self._process is not None:
            return False
        connection, theirs = Pipe()
        self._mailbox = Mailbox(connection, FileIO(os.memfd_create("stapo_lite"), "r+"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            ends = (theirs.fileno(), self._mailbox.memory.fileno())
            command = [sys.executable, "-m", "stapo_lite.rewards.sandbox", *map(str, ends)]
            try:  # in a group of its own, with what it starts
                self._process = subprocess.Popen(
                    command, pass_fds=ends, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
                )
            except OSError as error:
                self._mailbox.close()
                raise SandboxError(f"no process can be started ({error.strerror})") from None
        try:
            self._ask(self.function, self.timeout)
        except SandboxError:
            self.close()
            raise
        return True

    def call(self, arguments: dict[str, Any], seed: int = 0, timeout: float | None = None) -> Any:
        """The function's value, made of Python's own numbers, texts and lists.

        Args:
            arguments: by keyword.
            seed: of Python's, numpy's and torch's generators in the process.
            timeout: seconds, where not those of all calls.

        Raises:
            SandboxError: it raised, met a limit, or ended its process; the next call is made in a new one if need be.
        """
        self.start()
        timeout = timeout or self.timeout
        return self._ask((arguments, seed % 2**32, timeout), timeout)

    def _ask(self, question: Any, timeout: float) -> Any:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        with suppress(OSError):  # it has ended, as the next lines find
            self._number += 1
            self._mailbox.put(self._number, pickle.dumps(question))
        try:
            while not self._mailbox.connection.poll(0.1):
                if self._process.poll() is not None:  # what it started may hold the connection open
                    raise EOFError
                if time.monotonic() > deadline:
                    raise SandboxError(f"took longer than {timeout:g} s")
                if used_bytes(self._process.pid, self.memory_bytes) > self.memory_bytes:
                    raise SandboxError(f"took more than {self.memory_bytes / 2**30:.3g} GiB")
            number, answer = self._mailbox.get()
            if number != self._number:
                raise SandboxError("answered twice: a process that it forked returned from the function")
            value, problem = json.loads(answer)
        except (EOFError, OSError, ValueError):
            status = self._process.wait()
            self.close()
            raise SandboxError(f"ended its process with status {status}") from None
        except SandboxError:
            self.close()
            raise
        if problem is not None:
            raise SandboxError(problem)
        return value

    def kill(self) -> None:
        """End the process and what it started; a call under way in another thread finds that out."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and what it started, where no call is under way; the next call starts a new one."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._process = None
            self._mailbox.close()


class Mailbox(NamedTuple):
    """One side of what two processes, in turns, give each other."""

    connection: Connection
    """Carries the number of the call."""
    memory: FileIO
    """A file in memory, the same one on both sides, with the content."""

    def put(self, number: int, content: bytes) -> None:
        """Hand over what belongs to a call."""
        self.memory.seek(0)
        self.memory.truncate()
        rest = memoryview(content)
        while rest:
            rest = rest[self.memory.write(rest) :]
        self.connection.send_bytes(str(number).encode())

    def get(self) -> tuple[int, bytes]:
        """Wait for what the other side hands over: number of the call, and content.

        Raises:
            EOFError: it has closed its connection, or ended.
        """
        number = int(self.connection.recv_bytes())
        self.memory.seek(0)
        return number, self.memory.readall()

    def close(self) -> None:
        """Close this side."""
        self.connection.close()
        self.memory.close()


def used_bytes(pid: int, limit: int) -> int:
    """Memory of a process and of those that it started.

    Pages that they share count once: each process has its part of them (PSS). To find out takes a walk through all
    pages, so it is done only if the limit is passed when they count for every process.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
        resident = sum(_memory(one, "memory_info", "rss") for one in processes)
        return resident if resident <= limit else sum(_memory(one, "memory_full_info", "pss") for one in processes)
    return 0


def _memory(process: psutil.Process, read: str, kind: str) -> int:
    try:
        return getattr(getattr(process, read)(), kind)
    except psutil.Error:  # it ends just now
        return 0


def serve(mailbox: Mailbox) -> None:
    """Receive the function's path, then (keyword arguments, seed, seconds) of each call; answer [value, problem].

    Raises:
        EOFError: the parent has closed the connection, or ended.
    """
    try:
        number, path = mailbox.get()
        function = pkgutil.resolve_name(pickle.loads(path))
        problem = None if callable(function) else f"is a {type(function).__name__}, not a function"
    except Exception as error:  # the module is the user's
        problem = f"cannot be imported ({type(error).__name__}: {one_line(error)})"
    mailbox.put(number, _answer(None, problem))
    loop = asyncio.Runner()  # one for all calls: what a coroutine function holds belongs to its loop
    while problem is None:
        number, question = mailbox.get()
        arguments, seed, timeout = pickle.loads(question)
        signal.alarm(math.ceil(timeout) + 1)  # without a handler it ends even C code, and does so if the parent is gone
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)
        try:
            value = function(**arguments)
            answer = _answer(loop.run(value) if inspect.iscoroutine(value) else value, None)
        except Exception as error:
            answer = _answer(None, f"raised {type(error).__name__}: {one_line(error)}{_place(error, function)}")
        signal.alarm(0)
        mailbox.put(number, answer)


def _place(error: Exception, function: Callable) -> str:
    """Where in the function's own file an error arose; empty where it was elsewhere."""
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({os.path.basename(file)}, line {lines[-1]})" if file and lines else ""


def _answer(value: Any, problem: str | None) -> bytes:
    return json.dumps([value, problem], default=_plain, skipkeys=True).encode()


def as_json(value: Any) -> Any:
    """A value as it would come out of a sandbox: Python's own numbers, texts and lists."""
    return json.loads(_answer(value, None))[0]


def _plain(value: Any) -> Any:
    """The list or number that a value of a type unknown to JSON stands for; NaN where it stands for none."""
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        return float(value)
    except (TypeError, ValueError):
        return list(value) if isinstance(value, Iterable) else math.nan


if __name__ == "__main__":
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where the machine's memory ends before the limit, the kernel takes this process first
    with suppress(EOFError, ConnectionError):  # the trainer has ended
        serve(Mailbox(Connection(int(sys.argv[1])), FileIO(int(sys.argv[2]), "r+")))
