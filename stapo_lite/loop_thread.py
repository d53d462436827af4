"""An event loop in a thread of its own, for coroutines that plain functions start and wait for."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from threading import Thread
from typing import Any

from stapo_lite.errors import RunError


class LoopThread:
    """One event loop for all coroutines that are submitted.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._over = asyncio.Event()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        # A daemon: a program that ends by an error before `close` must not wait for it.
        self._thread = Thread(target=asyncio.run, args=[self._run()], name=name, daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        """Run until `close`; `asyncio.run` then cancels what has not ended."""
        self._loop.set_result(asyncio.get_running_loop())
        await self._over.wait()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Begin a coroutine."""
        return asyncio.run_coroutine_threadsafe(contained(coroutine), self._loop.result())

    def close(self) -> None:
        """Cancel all coroutines, and wait until they have ended."""
        self._loop.result().call_soon_threadsafe(self._over.set)
        self._thread.join()


async def contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine. What would end the event loop, and leave all others waiting, becomes an
    error."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RunError(f"a coroutine raised {error!r}") from error


@cache
def user_loop() -> LoopThread:
    """The event loop of all the user's coroutines in this process: what they keep from one step or
    run to the next, such as an HTTP client or a semaphore, is tied to it."""
    return LoopThread("coroutines")
