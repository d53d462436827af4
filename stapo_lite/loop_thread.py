"""Event loops in threads of their own, for coroutines that plain functions start and wait for.

A loop lasts as long as the process: what a coroutine keeps from one step or run to the next, such
as an HTTP client or a semaphore, is tied to it.
"""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from threading import Lock, Thread
from typing import Any

from stapo_lite.errors import RunError

_starting = Lock()


def submit(coroutine: Coroutine[Any, Any, Any], name: str = "the user's") -> Future:
    """Begin a coroutine in the loop of that name. The user's coroutines, which may block theirs,
    have one."""
    with _starting:  # two threads that call first at the same time would make two loops
        loop = running_loop(name)
    return asyncio.run_coroutine_threadsafe(contained(coroutine), loop)


@cache
def running_loop(name: str) -> asyncio.AbstractEventLoop:
    """A loop, which runs until the process ends."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


async def contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine. What would end the event loop, and leave all others waiting, becomes an
    error."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RunError(f"a coroutine raised {error!r}") from error
