"""Rollouts over HTTP from one or more vLLM servers, on other cards or machines, optionally ahead of
the trainer.

Each completion is a request with its own seed, so the result does not depend on the server.
OpenAI's client retries a request that fails. If that does not help, the request goes to another
server, and the lost one gets no more requests in this step.

Every adapter version is written to a folder that the servers see under the same path. The servers
load it under a new name, since vLLM keys its prefix cache by name.
"""

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock
from openai import (
    APIConnectionError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    OpenAIError,
    Timeout,
)

from stapo_lite.config import Rollout
from stapo_lite.errors import InputError, RunError, explained, one_line
from stapo_lite.loop_thread import submit
from stapo_lite.progress import progress_bar, show_speed
from stapo_lite.rollout.engine import (
    Decoding,
    Publisher,
    RolloutEngine,
    RolloutSettings,
    each_sample,
    in_groups,
    write_adapter,
)
from stapo_lite.types import Completion, Prompt

logger = logging.getLogger(__name__)

MAX_RETRIES = 5
"""Retries of a request by the client, with growing pauses, before the next server is tried."""
START_TIMEOUT = 600.0
"""Seconds that servers have to come up."""
CONNECT_TIMEOUT = 5.0
"""Seconds until a machine that does not answer counts as lost."""
POLL = 0.02
"""Seconds after which requests made meanwhile begin."""
KEY_FILE = Path("~/.cache/stapo_lite/api_key")


def api_key() -> str:
    """The key that servers ask for and trainers send: `VLLM_API_KEY`, or a secret generated once
    per user."""
    if key := os.environ.get("VLLM_API_KEY"):
        return key
    path = KEY_FILE.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):  # trainer and server may start together
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(32), encoding="utf-8")
        return path.read_text(encoding="utf-8")


class ServerEngine(RolloutEngine):
    """Client of vLLM's OpenAI-compatible servers, started by `stapo serve`; requests run in an
    event loop of their own.

    Args:
        dtype: data type of the adapters sent to the servers.
        rollout: `max_num_seqs` limits the requests that all processes together have at a server.
        folder: receives the adapters; the servers must see it under the same path.
        accelerator: the processes that share the servers. The main process publishes.

    Raises:
        InputError: a server does not come up, or serves shorter sequences.
    """

    def __init__(
        self,
        dtype: str,
        sampling: RolloutSettings,
        rollout: Rollout,
        folder: Path,
        accelerator: Accelerator,
    ):
        self._dtype = dtype
        self._sampling = sampling
        self._max_lag = rollout.max_lag
        self._accelerator = accelerator
        # Each start gets its own names: a resumed run reuses version numbers for new weights.
        (name,) = broadcast_object_list([f".adapters-{secrets.token_hex(4)}"])
        self._folder = folder.absolute() / name
        if accelerator.is_main_process:
            for leftover in folder.glob(".adapters-*"):  # of a run that was killed
                shutil.rmtree(leftover)
        self._ahead: dict[int, Future] = {}  # requests of `prefetch`, by their seeds
        self._asked: dict[Future, int] = {}  # requests of `add`, with their indices
        options: Any = {
            "api_key": api_key(),
            "timeout": Timeout(None, connect=CONNECT_TIMEOUT),
            "max_retries": MAX_RETRIES,
        }
        self._servers = []
        for url in rollout.servers:
            direct = DefaultAsyncHttpxClient(trust_env=False)  # no proxy gets the key
            self._servers.append(AsyncOpenAI(base_url=f"{url}/v1", http_client=direct, **options))
        self._up = list(range(len(self._servers)))  # numbers of those that get requests
        self._failure: OpenAIError | None = None
        at_once = max(1, rollout.max_num_seqs // accelerator.num_processes)
        self._slots = asyncio.Semaphore(at_once * len(self._servers))
        for server in self._servers:
            with explained(f"rollout.servers: {server.base_url} cannot be used"):
                submit(self._connect(server), "rollouts").result()

    async def _connect(self, server: AsyncOpenAI) -> None:
        """Wait until a server is up, and check that it can serve this run."""
        async with asyncio.timeout(START_TIMEOUT):
            while True:
                try:
                    models: Any = await server.models.list()
                    break
                except APIConnectionError:
                    await asyncio.sleep(1)
        context = models.data[0].max_model_len
        longest = self._sampling.max_model_len
        if context < longest:
            raise InputError(f"{server.base_url} serves {context} tokens, {longest} are needed")

    def publish(self, policy: Publisher, version: int) -> None:
        """Load the adapter as `version`, which must be new, into every server. A server that cannot
        be reached gets no requests until the next version.

        Raises:
            RunError: no server could load it.
        """
        if self._accelerator.is_main_process:
            write_adapter(policy, self._dtype, self._folder / f"v{version}")
            with explained("rollout.servers: no adapter loaded", OpenAIError, kind=RunError):
                submit(self._load(version), "rollouts").result()
        (self._up,) = broadcast_object_list([self._up])
        self._version = version

    async def _load(self, version: int) -> None:
        path = str(self._folder / f"v{version}")
        self._up = await self._post("load", version, lora_path=path)
        # Requests of version v belong to steps up to v + max_lag; steps before `version` are done.
        old = version - self._max_lag - 1
        if (self._folder / f"v{old}").exists():
            with suppress(OpenAIError):  # a server that was restarted has lost it
                await self._post("unload", old)
            shutil.rmtree(self._folder / f"v{old}")

    async def _post(self, verb: str, version: int, **content: str) -> list[int]:
        """Ask every server to load or unload a version; return the numbers of those that answer.

        Raises:
            OpenAIError: no server did it.
        """
        body = {"lora_name": self._name(version)} | content
        posts = []
        for number, server in enumerate(self._servers):
            retries = MAX_RETRIES
            if number not in self._up:  # a lost server, which is asked only once
                retries = 0
            client = server.with_options(max_retries=retries)
            posts.append(client.post(f"/{verb}_lora_adapter", cast_to=str, body=body))
        answers: list[Any] = await asyncio.gather(*posts, return_exceptions=True)
        if not any(isinstance(answer, str) for answer in answers):
            raise answers[0]
        numbers = []
        for number, answer in enumerate(answers):
            if isinstance(answer, APIConnectionError):
                self._lose(number, answer)
            else:  # a server that was asked again may refuse what it has done already
                numbers.append(number)
        return numbers

    def _name(self, version: int) -> str:
        return f"{self._folder.name}-v{version}"

    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Start sampling what later calls of `generate` will ask for, in that order."""
        for prompt, seed in each_sample(prompts, seeds, self._sampling.num_generations):
            if seed not in self._ahead:
                self._ahead[seed] = self._begin(prompt, seed, self._sampling.decoding)

    def _begin(self, prompt: Prompt, seed: int, decoding: Decoding) -> Future:
        return submit(self._sample(prompt, decoding.parameters(seed)), "rollouts")

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        self.prefetch(prompts, seeds)
        size = self._sampling.num_generations
        completions = []
        with progress_bar("rollout", "completion", size * len(prompts)) as bar:
            for _, seed in each_sample(prompts, seeds, size):
                completions.append(self._ahead.pop(seed).result())
                show_speed(bar, completions)
                bar.update()
        return in_groups(completions, size)

    def add(self, index: int, prompt: Prompt, seed: int, decoding: Decoding) -> None:
        self._asked[self._begin(prompt, seed, decoding)] = index

    def step(self) -> list[tuple[int, Completion]]:
        ended, _ = wait(self._asked, POLL, FIRST_COMPLETED)
        return [(self._asked.pop(request), request.result()) for request in ended]

    def abort(self) -> None:
        for request in self._asked:
            request.cancel()
        self._asked.clear()

    async def _sample(self, prompt: Prompt, parameters: dict[str, Any]) -> Completion:
        """Sample one completion on the server that its seed chooses, or on another one if that
        server fails.

        Raises:
            RunError: all servers have failed.
        """
        stops = list(self._sampling.stop_token_ids)
        body = {"stop_token_ids": stops, "return_token_ids": True} | parameters
        async with self._slots:
            version = self._version
            while up := self._up:
                number = up[parameters["seed"] % len(up)]
                try:
                    answer: Any = await self._servers[number].completions.create(
                        model=self._name(version), prompt=prompt.token_ids, extra_body=body
                    )
                    (choice,) = answer.choices
                    if choice.finish_reason == "abort":  # the server is being stopped
                        raise OpenAIError("aborted")
                except OpenAIError as error:
                    self._lose(number, error)
                    continue
                logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
                truncated = choice.finish_reason == "length"
                return Completion(prompt, choice.token_ids, logprobs, truncated, version)
        raise RunError(
            f"rollout.servers: all have failed ({self._failure}); continue with --resume"
        )

    def _lose(self, number: int, error: OpenAIError) -> None:
        """Send a server no more requests until the next version."""
        self._failure = error
        if number in self._up:  # the first of its requests to fail
            self._up.remove(number)
            url = self._servers[number].base_url
            logger.warning("%s is left out of this step (%s)", url, one_line(error))

    def close(self) -> None:
        """Cancel all requests, and delete the adapters' files."""
        for request in [*self._ahead.values(), *self._asked]:
            request.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)
