"""Rollouts from vLLM servers over HTTP: on other cards or machines, several of them, and ahead of the trainer.

Each completion is a request of its own, with a seed of its own: it is the same whichever server samples it, and where
one fails or hangs, another is asked. Every adapter version is written to a folder that the servers see under the same
path, and loaded under a fresh name, by which vLLM keys its prefix cache.
"""

import asyncio
import itertools
import logging
import os
import resource
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock

from stapo_lite.config import Rollout
from stapo_lite.errors import InputError, RunError, explained, one_line
from stapo_lite.rollout import Decoding, Publisher, RolloutEngine, Sampling, progress_bar, write_adapter
from stapo_lite.types import Completion, Prompt, derived_seed

logger = logging.getLogger(__name__)

MAX_RETRIES = 3
"""Times that a request is repeated before the run ends."""
START_TIMEOUT = 600.0
"""Seconds in which servers must come up, and load an adapter."""
HEALTH_INTERVAL = 5.0
"""Seconds between two checks of a server that has a request."""
HEALTH_TIMEOUT = 20.0
"""Seconds that a server may take to answer a check; later it is lost."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
"""A request may be silent for hours, and routers forget such connections: seconds until the peer is asked whether it is
there, seconds between two such questions, and how many may stay without an answer."""
MOST_FILES = 65_535
KEY_FILE = Path("~/.cache/stapo_lite/api_key")


def api_key() -> str:
    """The key that servers ask for and trainers send: `VLLM_API_KEY`, or a secret of this user that is made once."""
    if given := os.environ.get("VLLM_API_KEY"):
        return given
    path = KEY_FILE.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):  # trainer and server may start together
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(32), encoding="utf-8")
        return path.read_text(encoding="utf-8")


def allow_connections() -> None:
    """Raise this process's limit of open files, usually 1024, where it may: each request has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keep_alive(address: Any) -> socket.socket:
    """A socket for an address of `getaddrinfo`, which stays open while it is silent, and fails where it is dead."""
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened


class ServerFault(Exception):
    """A request failed in a way that another server, or the next attempt, may not."""


@dataclass(eq=False)
class Server:
    """One server as a client sees it."""

    url: str
    live: bool = False
    """Whether it has the current adapter and answers."""
    requests: int = 0
    """Under way."""
    checked: float = 0.0
    """Time of the last health check."""


class ServerEngine(RolloutEngine):
    """vLLM's OpenAI-compatible servers, started by `stapo serve`.

    Its coroutines run in a thread of their own.

    Args:
        dtype: of the adapters that they get.
        rollout: `max_num_seqs` is what each server samples at the same time, for all of our processes.
        folder: for adapters; the servers must see it under this path.
        accelerator: of the processes that share the servers. One of them publishes.

    Raises:
        InputError: a server does not come up, refuses the key, or cannot serve this run.
    """

    def __init__(self, dtype: str, sampling: Sampling, rollout: Rollout, folder: Path, accelerator: Accelerator):
        self._dtype, self._sampling = dtype, sampling
        self._max_lag, self._is_main = rollout.max_lag, accelerator.is_main_process
        # A resumed run has old version numbers for new weights: its adapters must not have old names.
        if self._is_main:
            for left in folder.glob(f"stapo_lite-{8 * '[0-9a-f]'}"):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
        self._folder = folder.absolute() / broadcast_object_list([f"stapo_lite-{secrets.token_hex(4)}"])[0]
        self._versions: list[int] = []
        self._ahead: dict[int, list[Future]] = {}
        self._servers = [Server(url.rstrip("/")) for url in rollout.servers]
        self._why_lost, self._key = "", api_key()
        at_once = max(1, rollout.max_num_seqs // accelerator.num_processes)
        self._slots = asyncio.Semaphore(at_once * len(self._servers))
        allow_connections()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()
        try:
            self._submit(self._connect()).result()
        except BaseException:
            self.close()
            raise

    def _submit(self, coroutine: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _connect(self) -> None:
        """Wait until the servers are up, and check that they can serve this run."""
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"},
            # A connection that is used again may be half closed.
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=keep_alive),
        )
        needed, deadline = self._sampling.max_model_len, self._loop.time() + START_TIMEOUT
        for server in self._servers:
            if not await self._healthy(server):
                logger.warning("rollout.servers: waiting for %s (stapo serve)", server.url)
            while not await self._healthy(server):
                if self._loop.time() > deadline:
                    raise InputError(f"rollout.servers: {server.url} did not come up in {START_TIMEOUT:g} s: start it")
                await asyncio.sleep(0.5)
            with explained(f"rollout.servers: {server.url} does not say what it serves", ServerFault, RunError):
                served = (await self._ask("GET", f"{server.url}/v1/models"))["data"][0]["max_model_len"]
            if served < needed:
                raise InputError(
                    f"rollout.servers: {server.url} serves sequences of {served} tokens, but "
                    f"data.max_prompt_length + rollout.max_completion_length = {needed}: start it with this config"
                )

    async def _ask(self, method: str, url: str, timeout: float | None = START_TIMEOUT, **content: Any) -> Any:
        """Send a request; its answer, from JSON where it is.

        Raises:
            RunError: the server refuses it, as it would refuse it again.
            ServerFault: anything else.
        """
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=HEALTH_TIMEOUT)
        try:
            async with self._session.request(method, url, timeout=limit, **content) as response:
                if response.ok:
                    is_json = response.content_type == "application/json"
                    return await (response.json() if is_json else response.text())
                text = f"{url}: {response.status} {' '.join((await response.text()).split())[:300]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerFault(f"{type(error).__name__}: {one_line(error)}") from error
        if response.status in (401, 403):
            raise RunError(f"{url} refuses the API key: set VLLM_API_KEY to the server's")
        # 404: the server has lost the adapter; 429: it has too many requests. Another one may answer.
        raise (RunError if response.status < 500 and response.status not in (404, 429) else ServerFault)(text)

    async def _healthy(self, server: Server) -> bool:
        """Whether the server answers; else it is lost."""
        with suppress(ServerFault, RunError):
            await self._ask("GET", f"{server.url}/health", HEALTH_TIMEOUT)
            return True
        self._lose(server, "it does not answer")
        return False

    def _lose(self, server: Server, reason: str) -> None:
        """Mark the server as lost until the next publish."""
        if server.live:
            logger.warning("rollout.servers: going on without %s (%s)", server.url, reason)
        server.live, self._why_lost = False, reason

    def publish(self, policy: Publisher, version: int) -> None:
        """Load the adapter as `version`, which must be new, into every server that answers: one that was lost takes
        part again.

        Raises:
            RunError: there is none.
        """
        having: list[bool] = []
        if self._is_main:
            write_adapter(policy, self._dtype, self._folder / f"v{version}")
            having = self._submit(self._publish(version)).result()
        for server, has in zip(self._servers, broadcast_object_list([having])[0], strict=True):
            server.live = has
        if not any(server.live for server in self._servers):
            raise RunError(f"rollout.servers: none could load the adapter ({self._why_lost}); mend it, then --resume")
        self._version = version

    async def _publish(self, version: int) -> list[bool]:
        """Whether each server has loaded the adapter."""
        having = await asyncio.gather(*(self._load(server, version) for server in self._servers))
        self._versions.append(version)
        # What version v began belongs to steps up to v + max_lag, and those before this one are done.
        await self._unload([old for old in self._versions if old < version - self._max_lag])
        return having

    def _name(self, version: int) -> str:
        return f"{self._folder.name}-v{version}"

    async def _load(self, server: Server, version: int) -> bool:
        if not await self._healthy(server):
            return False
        content = {"lora_name": self._name(version), "lora_path": str(self._folder / f"v{version}")}
        try:
            await self._ask("POST", f"{server.url}/v1/load_lora_adapter", json=content)
            return True
        except (ServerFault, RunError) as error:
            if "already been loaded" in str(error):  # the same server under another address
                return True
            self._lose(server, one_line(error))
            return False

    async def _unload(self, versions: Sequence[int]) -> None:
        for version in versions:
            self._versions.remove(version)
            for server in [server for server in self._servers if server.live and await self._healthy(server)]:
                content = {"lora_name": self._name(version)}
                with suppress(ServerFault, RunError):  # it is gone already
                    await self._ask("POST", f"{server.url}/v1/unload_lora_adapter", json=content)
            shutil.rmtree(self._folder / f"v{version}", ignore_errors=True)

    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Begin with what later calls of `generate` will ask for, in their order."""
        s = self._sampling
        decoding = Decoding(s.max_completion_length, s.temperature, top_p=1.0, logprobs=True)
        for prompt, seed in zip(prompts, seeds, strict=True):
            if seed not in self._ahead:
                drawn = [decoding.parameters(derived_seed(seed, g)) for g in range(s.num_generations)]
                self._ahead[seed] = [self._submit(self._sample(prompt, parameters)) for parameters in drawn]

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        self.prefetch(prompts, seeds)
        bar = progress_bar("rollout", "prompt", len(seeds), seeds)
        return [[future.result() for future in self._ahead.pop(seed)] for seed in bar]

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decodings: Sequence[Decoding]
    ) -> Iterator[tuple[int, Completion]]:
        indices = {}
        for index, (prompt, seed, d) in enumerate(zip(prompts, seeds, decodings, strict=True)):
            indices[self._submit(self._sample(prompt, d.parameters(seed)))] = index
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
        finally:  # the caller may have seen enough
            for future in indices:
                future.cancel()

    async def _sample(self, prompt: Prompt, parameters: dict[str, Any]) -> Completion:
        """Sample one completion, on whichever server has the least to do.

        Raises:
            RunError: no server is left, the request failed too often, or a server refuses it.
        """
        body = {"prompt": prompt.token_ids, "stop_token_ids": list(self._sampling.stop_token_ids)}
        body |= parameters | {"return_token_ids": True}
        failures = 0
        async with self._slots:
            while live := [server for server in self._servers if server.live]:
                server, version = min(live, key=lambda server: server.requests), self._version
                server.requests += 1
                try:
                    choice = await self._complete(server, body | {"model": self._name(version)})
                    logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                    truncated = choice["finish_reason"] == "length"
                    return Completion(prompt, choice["token_ids"], logprobs, truncated, version)
                except ServerFault as error:
                    if ": 404 " in str(error):  # it was started anew, and does not know the adapter
                        self._lose(server, one_line(error))
                    failures += server.live and await self._healthy(server)
                    if failures > MAX_RETRIES:
                        raise RunError(f"rollout.servers: a request failed {failures} times: {error}") from error
                    await asyncio.sleep(0.1 * 2**failures)
                finally:
                    server.requests -= 1
        raise RunError("rollout.servers: none is left; start one (stapo serve), and continue with --resume")

    async def _complete(self, server: Server, body: dict[str, Any]) -> Any:
        """The `choice` of a server's answer, for which it waits, for hours if need be, while the server is healthy."""
        request = asyncio.ensure_future(self._ask("POST", f"{server.url}/v1/completions", timeout=None, json=body))
        try:
            while server.live and not (await asyncio.wait([request], timeout=HEALTH_INTERVAL))[0]:
                if self._loop.time() - server.checked >= HEALTH_INTERVAL:  # one request checks for all of this server
                    server.checked = self._loop.time()
                    await self._healthy(server)
            if not request.done():
                raise ServerFault("the server is lost")
        finally:
            request.cancel()
        (choice,) = request.result()["choices"]
        if choice["finish_reason"] not in ("stop", "length"):  # it is being shut down
            raise ServerFault(f"it has given up a request ({choice['finish_reason']})")
        return choice

    def close(self) -> None:
        """End all requests, and leave no adapter behind."""
        for future in itertools.chain(*self._ahead.values()):
            future.cancel()
        self._submit(self._unload(list(self._versions))).result()
        self._submit(self._session.close()).result()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
