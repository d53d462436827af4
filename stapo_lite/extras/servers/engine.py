"""Rollouts over HTTP from one or more vLLM servers, on other cards or machines, optionally ahead of
the trainer.

Each completion is a request with its own seed, so the result does not depend on the server. A
failed request goes to another server. A server that fails its health check, or cannot load an
adapter, is lost until the next publish.

Every adapter version is written to a folder that the servers see under the same path, and loaded
under a new name, since vLLM keys its prefix cache by name.
"""

import asyncio
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
from json import loads
from pathlib import Path
from typing import Any

import aiohttp
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock

from stapo_lite.config import Rollout
from stapo_lite.errors import InputError, RunError, explained, one_line
from stapo_lite.rollout import (
    Decoding,
    Publisher,
    RolloutEngine,
    RolloutSettings,
    each_sample,
    in_groups,
    progress_bar,
    write_adapter,
)
from stapo_lite.types import Completion, Prompt

logger = logging.getLogger(__name__)

MAX_RETRIES = 3
"""Retries of a request before the run ends."""
START_TIMEOUT = 600.0
"""Seconds that servers have to come up, and to load an adapter."""
HEALTH_INTERVAL = 5.0
"""Seconds between two health checks of the servers."""
HEALTH_TIMEOUT = 20.0
"""Seconds without an answer to a health check after which a server is lost."""
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 60,  # seconds of silence before the first probe
    socket.TCP_KEEPINTVL: 15,  # seconds between two probes
    socket.TCP_KEEPCNT: 4,  # probes without an answer before the connection fails
}
"""A request may be silent for hours, and routers drop silent connections. Health checks would not
notice: they use other connections."""
MOST_FILES = 65_535
KEY_FILE = Path("~/.cache/stapo_lite/api_key")


def api_key() -> str:
    """The key that servers ask for and trainers send: `VLLM_API_KEY`, or a secret generated once
    per user."""
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
    """Raise this process's limit on open files, usually 1024: each request has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < most:  # an infinite one is negative
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keep_alive(address: Any) -> socket.socket:
    """Open a socket that stays open while silent, and fails if the other side is gone.

    Args:
        address: an entry of `getaddrinfo`.
    """
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened


class ServerFault(Exception):
    """A request failed, but may succeed on another server or attempt."""


@dataclass(eq=False)
class Server:
    """One server as a client sees it."""

    url: str
    live: bool = False
    """Whether it has the current adapter and answers."""
    requests: int = 0
    """Completions that it is sampling."""


class ServerEngine(RolloutEngine):
    """Client of vLLM's OpenAI-compatible servers, started by `stapo serve`; requests run in their
    own thread.

    Args:
        dtype: data type of the adapters sent to the servers.
        rollout: `max_num_seqs` limits each server's concurrent requests, over all our processes.
        folder: for adapters; the servers must see it under the same path.
        accelerator: the processes that share the servers. The main process publishes.

    Raises:
        InputError: a server does not come up, refuses the key, or cannot serve this run.
    """

    def __init__(
        self,
        dtype: str,
        sampling: RolloutSettings,
        rollout: Rollout,
        folder: Path,
        accelerator: Accelerator,
    ):
        self._dtype, self._sampling = dtype, sampling
        self._max_lag, self._is_main = rollout.max_lag, accelerator.is_main_process
        if self._is_main:
            for left in folder.glob(f"stapo_lite-{8 * '[0-9a-f]'}"):  # from a killed run
                shutil.rmtree(left, ignore_errors=True)
        # Each start gets its own names: a resumed run reuses version numbers for new weights.
        (name,) = broadcast_object_list([f"stapo_lite-{secrets.token_hex(4)}"])
        self._folder = folder.absolute() / name
        self._versions: list[int] = []
        self._ahead: dict[int, Future] = {}
        self._servers = [Server(url.rstrip("/")) for url in rollout.servers]
        self._why_lost, self._key = "", api_key()
        self._session: aiohttp.ClientSession | None = None
        at_once = max(1, rollout.max_num_seqs // accelerator.num_processes)
        self._slots = asyncio.Semaphore(at_once * len(self._servers))
        allow_connections()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()
        self._watching = self._submit(self._watch())
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
            # A reused connection may be half closed.
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=keep_alive),
        )
        needed, deadline = self._sampling.max_model_len, self._loop.time() + START_TIMEOUT
        for server in self._servers:
            where = f"rollout.servers: {server.url}"
            if not await self._healthy(server):
                logger.warning("rollout.servers: waiting for %s (stapo serve)", server.url)
            while not await self._healthy(server):
                if self._loop.time() > deadline:
                    raise InputError(f"{where} did not come up in {START_TIMEOUT:g} s: start it")
                await asyncio.sleep(0.5)
            malformed = (LookupError, TypeError, ValueError)  # from a server that is not vLLM's
            with explained(
                f"{where} does not say what it serves", ServerFault, RunError, *malformed
            ):
                models = await self._ask(f"{server.url}/v1/models")
                served = int(loads(models)["data"][0]["max_model_len"])
            if served < needed:
                raise InputError(
                    f"{where} serves sequences of {served} tokens, but data.max_prompt_length + "
                    f"rollout.max_completion_length = {needed}: start it with this config"
                )

    async def _ask(
        self, url: str, timeout: float | None = START_TIMEOUT, json: dict[str, Any] | None = None
    ) -> str:
        """Send a GET request, or a POST with `json`; return the text of the response.

        Raises:
            RunError: the server refuses the request, and would again.
            ServerFault: any other failure.
        """
        assert self._session is not None
        method = "POST" if json else "GET"
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=HEALTH_TIMEOUT)
        try:
            async with self._session.request(method, url, timeout=limit, json=json) as response:
                text = await response.text()
                if response.ok:
                    return text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerFault(f"{type(error).__name__}: {one_line(error)}") from error
        if response.status in (401, 403):
            raise RunError(f"{url} refuses the API key: set VLLM_API_KEY to the server's")
        # 404: the server was restarted, and has no adapter; 429: it has too many requests.
        refused = response.status < 500 and response.status not in (404, 429)
        kind = RunError if refused else ServerFault
        raise kind(f"{url}: {response.status} {' '.join(text.split())[:300]}")

    async def _watch(self) -> None:
        """Keep checking the health of servers that have requests."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            busy = [server for server in self._servers if server.live and server.requests]
            await asyncio.gather(*map(self._healthy, busy))

    async def _healthy(self, server: Server) -> bool:
        """Whether the server answers; if not, it is lost."""
        try:
            await self._ask(f"{server.url}/health", HEALTH_TIMEOUT)
        except (ServerFault, RunError):
            self._lose(server, "it does not answer")
            return False
        return True

    def _lose(self, server: Server, reason: str) -> None:
        """Mark the server as lost until the next publish."""
        if server.live:
            logger.warning("rollout.servers: going on without %s (%s)", server.url, reason)
        server.live, self._why_lost = False, reason

    def publish(self, policy: Publisher, version: int) -> None:
        """Load the adapter as `version`, which must be new, into every server that answers, lost
        ones included.

        Raises:
            RunError: no server could load it.
        """
        loaded: list[bool] = []
        if self._is_main:
            write_adapter(policy, self._dtype, self._folder / f"v{version}")
            loaded = self._submit(self._publish(version)).result()
        (loaded,) = broadcast_object_list([loaded])
        if not any(loaded):
            raise RunError(
                f"rollout.servers: none could load the adapter ({self._why_lost}); fix it, then "
                "--resume"
            )
        # First: a server that is back has no older version, and requests begin in another thread.
        self._version = version
        for server, live in zip(self._servers, loaded, strict=True):
            server.live = live

    async def _publish(self, version: int) -> list[bool]:
        """Load a version into the servers, and unload versions that no request needs any more;
        returns which servers have it."""
        loaded = await asyncio.gather(*(self._load(server, version) for server in self._servers))
        self._versions.append(version)
        # Requests of version v belong to steps up to v + max_lag; steps before `version` are done.
        await self._unload([old for old in self._versions if old < version - self._max_lag])
        return loaded

    def _name(self, version: int) -> str:
        return f"{self._folder.name}-v{version}"

    async def _load(self, server: Server, version: int) -> bool:
        if not await self._healthy(server):
            return False
        content = {"lora_name": self._name(version), "lora_path": str(self._folder / f"v{version}")}
        try:
            await self._ask(f"{server.url}/v1/load_lora_adapter", json=content)
        except (ServerFault, RunError) as error:
            if "already been loaded" not in str(error):  # one server listed under two addresses
                self._lose(server, one_line(error))
                return False
        return True

    async def _unload(self, versions: Sequence[int]) -> None:
        for version in versions:
            self._versions.remove(version)  # first, since this may be interrupted
            content = {"lora_name": self._name(version)}
            for server in self._servers:
                if server.live:
                    url = f"{server.url}/v1/unload_lora_adapter"
                    with suppress(ServerFault, RunError):  # it is gone already
                        await self._ask(url, HEALTH_TIMEOUT, json=content)
            shutil.rmtree(self._folder / f"v{version}", ignore_errors=True)

    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Start sampling what later calls of `generate` will ask for, in that order."""
        for prompt, seed in each_sample(prompts, seeds, self._sampling.num_generations):
            begun = self._ahead.get(seed)
            if begun is None or (begun.done() and begun.exception()):  # servers may be back
                self._ahead[seed] = self._begin(prompt, seed, self._sampling.decoding)

    def _begin(self, prompt: Prompt, seed: int, decoding: Decoding) -> Future:
        return self._submit(self._sample(prompt, decoding.parameters(seed)))

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        self.prefetch(prompts, seeds)
        size = self._sampling.num_generations
        completions = []
        with progress_bar("rollout", "completion", size * len(prompts)) as bar:
            for _, seed in each_sample(prompts, seeds, size):
                completions.append(self._ahead.pop(seed).result())
                bar.update()
        return in_groups(completions, size)

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decodings: Sequence[Decoding]
    ) -> Iterator[tuple[int, Completion]]:
        begun = list(map(self._begin, prompts, seeds, decodings))
        indices = {future: index for index, future in enumerate(begun)}
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
        finally:  # the caller may stop early
            for future in indices:
                future.cancel()

    async def _sample(self, prompt: Prompt, parameters: dict[str, Any]) -> Completion:
        """Sample one completion on the least busy live server; after a failure, on another one if
        there is one.

        Raises:
            RunError: no server is left, the request failed too often, or a server refuses it.
        """
        body = {"prompt": prompt.token_ids, "stop_token_ids": list(self._sampling.stop_token_ids)}
        body |= parameters | {"return_token_ids": True}
        failed: list[Server] = []
        async with self._slots:
            while live := [server for server in self._servers if server.live]:
                server = min(live, key=lambda server: (failed.count(server), server.requests))
                version = self._version
                server.requests += 1
                try:
                    choice = await self._complete(server, body | {"model": self._name(version)})
                    logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                    truncated = choice["finish_reason"] == "length"
                    return Completion(prompt, choice["token_ids"], logprobs, truncated, version)
                except ServerFault as error:
                    if ": 404 " in str(error):  # restarted: it has lost the adapter
                        self._lose(server, one_line(error))
                    failed.append(server)
                    if len(failed) > MAX_RETRIES:
                        raise RunError(
                            f"rollout.servers: a request failed {len(failed)} times ({error}); "
                            "check the servers, and continue with --resume"
                        ) from error
                    # By then a health check has shown whether the server is gone.
                    await asyncio.sleep(HEALTH_INTERVAL * len(failed))
                finally:
                    server.requests -= 1
        raise RunError(
            "rollout.servers: none is left; start one (stapo serve), and continue with --resume"
        )

    async def _complete(self, server: Server, body: dict[str, Any]) -> Any:
        """Wait, maybe for hours, for the server's response; returns its `choice`.

        Raises:
            RunError: the server refuses the request.
            ServerFault: the request failed, or the server is lost.
        """
        request = asyncio.ensure_future(
            self._ask(f"{server.url}/v1/completions", timeout=None, json=body)
        )
        try:
            while server.live and not request.done():
                await asyncio.wait([request], timeout=HEALTH_INTERVAL)
            if not request.done():
                raise ServerFault("the server is lost")
            (choice,) = loads(request.result())["choices"]
        finally:
            request.cancel()
        if choice["finish_reason"] not in ("stop", "length"):  # it is being shut down
            raise ServerFault(f"it has given up a request ({choice['finish_reason']})")
        return choice

    def close(self) -> None:
        """Cancel all requests, unload the adapters and delete their files."""
        for future in [self._watching, *self._ahead.values()]:
            future.cancel()
        self._submit(self._unload(list(self._versions))).result()
        if self._session is not None:
            self._submit(self._session.close()).result()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
