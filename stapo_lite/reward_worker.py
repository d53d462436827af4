"""The process in which a reward function of the user runs: it may raise, hang, or take all memory there.

    python -m stapo_lite.reward_worker FILE_DESCRIPTOR SECONDS

It imports neither torch nor anything of the trainer. What is pickled passes between it and its parent alone.
"""

import importlib
import math
import pickle
import random
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection, timeout: float) -> None:
    """Call the function for each (keyword arguments, seed) that comes, until the parent is gone.

    What comes first is `package.module:function` or the pickled function; what is sent is None or an error, then lists
    of numbers and None, or an error.
    """
    given = connection.recv()
    try:
        if isinstance(given, bytes):
            function = pickle.loads(given)
        else:
            module_name, _, attribute = given.partition(":")
            function = getattr(importlib.import_module(module_name), attribute)
        connection.send(None if callable(function) else f"is a {type(function).__name__}, not a function")
    except Exception as error:  # the module is the user's
        connection.send(f"cannot be imported ({_describe(error)})")
        return
    while True:
        try:
            arguments, seed = connection.recv()
        except EOFError:
            return
        signal.alarm(math.ceil(timeout) + 1)  # where the parent is gone, too
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)
        try:
            answer: Any = [_number(value) for value in function(**arguments)]
        except Exception as error:
            answer = f"raised {_describe(error)}"
        signal.alarm(0)
        connection.send(answer)


def _number(value: Any) -> float | None:
    """numpy's and torch's scalars, too; NaN for what is no number."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return math.nan


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


if __name__ == "__main__":
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where the machine's memory ends before the limit, the kernel takes this process first
    serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
