"""One event loop for the process, in a thread of its own, for coroutines that plain functions start
and wait for. What a coroutine keeps from one step or run to the next, such as an HTTP client or a
semaphore, is tied to its loop."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from threading import Thread
from typing import Any

from stapo_lite.errors import RunError


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future:
    """Begin a coroutine in the loop."""
    return asyncio.run_coroutine_threadsafe(contained(coroutine), running_loop())


@cache
def running_loop() -> asyncio.AbstractEventLoop:
    """The loop, which runs until the process ends."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop


async def contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine. What would end the event loop, and leave all others waiting, becomes an
    error."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RunError(f"a coroutine raised {error!r}") from error
