"""Rollouts from vLLM servers over HTTP: on other cards or machines, several of them, and ahead of the trainer.

Each completion is a request of its own, with a seed of its own: it is the same whichever server samples it, and a
server that is lost takes only unfinished completions along, which the others then sample. Every adapter version is
loaded by vLLM's runtime LoRA endpoints under a fresh name, by which vLLM keys its prefix cache.
"""

import asyncio
import heapq
import itertools
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors.torch import save
from tqdm.auto import tqdm

from stapo_lite.config import InputError, Rollout, RunError, one_line
from stapo_lite.policy import Policy
from stapo_lite.rollout import Decoding, Sampling
from stapo_lite.types import Completion, Prompt, derived_seed

logger = logging.getLogger(__name__)

HEALTH_INTERVAL = 5.0
"""Seconds between two checks of a server."""
HEALTH_TIMEOUT = 20.0
"""Seconds that it may take to answer one, twice in a row."""
ADAPTER_TIMEOUT = 600.0
"""Seconds that it may take to get or drop an adapter."""
KEY_FILE = Path("~/.cache/stapo_lite/api_key")


def api_key() -> str:
    """The key that servers ask for and trainers send: `VLLM_API_KEY`, or a secret of this user that is made once."""
    path, given = KEY_FILE.expanduser(), os.environ.get("VLLM_API_KEY")
    if not given and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # which nobody else may read
            file.write(secrets.token_urlsafe(32))
            file.flush()
            with suppress(FileExistsError):  # trainer and server may start together
                os.link(file.name, path)
    return given or path.read_text(encoding="utf-8")


class ServerEngine:
    """vLLM's OpenAI-compatible servers, started by `python -m stapo_lite.rollout.serve` or by hand.

    Args:
        model: folder or Hub name that they should serve.
        dtype: of the adapters that they get.
        rollout: `servers` and what goes with them; `max_num_seqs` is what each samples at the same time, for all of
            our processes.
        accelerator: of the processes that share the servers. One of them publishes.

    Raises:
        InputError: a server does not come up, refuses the key, or cannot serve this run.
    """

    def __init__(self, model: str, dtype: str, sampling: Sampling, rollout: Rollout, accelerator: Accelerator):
        self._sampling, self._dtype = sampling, getattr(torch, dtype)
        self._shared_folder = Path(rollout.shared_folder) if rollout.shared_folder else None
        self._max_lag, self._is_main = rollout.max_lag, accelerator.is_main_process
        # A resumed run has old version numbers for new weights: its adapters must not have old names.
        self._run = self._share(f"stapo_lite-{secrets.token_hex(4)}")
        self._used: list[int] = []
        self._ahead: dict[int, list[Future]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()
        at_once = max(1, rollout.max_num_seqs // accelerator.num_processes)
        self._requests = _Requests(rollout.servers, at_once, rollout.max_restarts)
        try:
            self._call(self._requests.connect(rollout.server_timeout, model, sampling.max_model_len))
        except BaseException:
            self.close()
            raise

    def _share(self, value: Any) -> Any:
        """The main process's value."""
        return broadcast_object_list([value])[0]

    def _call(self, coroutine: Any) -> Any:
        """Run a coroutine in the thread of the requests."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def publish(self, policy: Policy, version: int) -> None:
        """Load the adapter as `version`, which must be new, into every server that answers: one that was lost takes
        part again.

        Raises:
            RunError: there is none.
        """
        having: list[str] = []
        if self._is_main:
            # What version v began belongs to steps up to v + max_lag, and those before this one are done.
            self._used = [*(used for used in self._used if used >= version - self._max_lag), version]
            keep = [self._name(used) for used in self._used]
            having = self._call(self._requests.load(self._name(version), self._adapter(policy, version), keep))
            self._drop_shared(keep)
        having = self._share(having)
        if not having:
            reason = self._requests.why_lost
            raise RunError(f"rollout.servers: none of them could load the adapter ({reason}); continue with --resume")
        self._call(self._requests.use(self._name(version), version, having))

    def _name(self, version: int) -> str:
        return f"{self._run}-v{version}"

    def _adapter(self, policy: Policy, version: int) -> Path | dict[str, bytes]:
        """The adapter's folder, or its files to upload."""
        with tempfile.TemporaryDirectory() as folder:
            policy.model.peft_config["default"].save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        files["adapter_model.safetensors"] = save(policy.adapter_tensors(self._dtype))
        if self._shared_folder is None:
            return files
        shared = self._shared_folder / self._name(version)
        shared.mkdir(parents=True)
        for name, content in files.items():
            (shared / name).write_bytes(content)
        return shared

    def _drop_shared(self, keep: Sequence[str]) -> None:
        for folder in self._shared_folder.glob(f"{self._run}-v*") if self._shared_folder else ():
            if folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)

    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Begin with what later calls of `generate` will ask for, in their order."""
        s = self._sampling
        options = {"temperature": s.temperature, "max_tokens": s.max_completion_length, "top_p": 1.0, "logprobs": 0}
        for prompt, seed in zip(prompts, seeds, strict=True):
            if seed not in self._ahead:
                drawn = [derived_seed(seed, g) for g in range(s.num_generations)]
                self._ahead[seed] = [self._submit(prompt, options | {"seed": one}) for one in drawn]

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], progress: bool = False
    ) -> list[list[Completion]]:
        self.prefetch(prompts, seeds)
        groups = []
        quiet = None if progress else True
        with tqdm(total=len(prompts), desc="rollout", unit="prompt", leave=False, disable=quiet) as bar:
            for seed in seeds:
                groups.append([future.result() for future in self._ahead[seed]])
                del self._ahead[seed]
                bar.update()
        return groups

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decoding: Decoding
    ) -> Iterator[tuple[int, Completion]]:
        d = decoding
        options = {"temperature": d.temperature, "max_tokens": d.max_completion_length, "top_p": d.top_p}
        drawn = zip(prompts, seeds, strict=True)
        indices = {self._submit(prompt, options | {"seed": seed}): i for i, (prompt, seed) in enumerate(drawn)}
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
        finally:  # the caller may have seen enough
            self._loop.call_soon_threadsafe(self._requests.abandon, set(indices))

    def _submit(self, prompt: Prompt, options: dict[str, Any]) -> Future:
        body = options | {
            "prompt": prompt.token_ids,
            "stop_token_ids": list(self._sampling.stop_token_ids),
            "return_token_ids": True,
            # All that would change the distribution is given: a server may have defaults of its own.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        future: Future = Future()
        self._loop.call_soon_threadsafe(self._requests.submit, prompt, body, future)
        return future

    def sleep(self) -> None:
        """Nothing to do: the card is the server's own."""

    def wake(self) -> None: ...

    def close(self) -> None:
        self._call(self._requests.close())
        if self._is_main:
            self._drop_shared([])
        self._loop.call_soon_threadsafe(self._loop.stop)


def _completion(prompt: Prompt, choice: dict[str, Any], version: int) -> Completion:
    """One of the choices of a response."""
    logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    return Completion(prompt, choice["token_ids"], logprobs, choice["finish_reason"] == "length", version)


@dataclass(order=True)
class _Job:
    """A completion to sample."""

    number: int
    """Requests are sent in this order."""
    prompt: Prompt = field(compare=False)
    body: dict[str, Any] = field(compare=False)
    future: Future = field(compare=False)
    failures: int = field(default=0, compare=False)


@dataclass(eq=False)
class _Server:
    url: str
    jobs: dict[asyncio.Task, _Job] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)


class _Lost(Exception):
    """A server answers that it has lost the adapter, or its engine."""


class _Requests:
    """Everything that happens in the thread of the requests.

    Args:
        capacity: requests that a server gets at the same time.
    """

    def __init__(self, servers: Sequence[str], capacity: int, max_retries: int):
        self._servers = [_Server(url.rstrip("/")) for url in servers]
        self._live: list[_Server] = []
        self._capacity, self._max_retries = capacity, max_retries
        self._queue: list[_Job] = []
        self._numbers = itertools.count()
        self._model, self._version = "", 0
        self.why_lost = ""
        self._session: aiohttp.ClientSession | None = None
        self._watcher: asyncio.Task | None = None

    async def connect(self, timeout: float, model: str, max_model_len: int) -> None:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key()}"},
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # a kept connection may be half closed
        )
        for server in self._servers:
            deadline = None
            while not await self._healthy(server):
                now = asyncio.get_running_loop().time()
                if deadline is None:
                    logger.warning("rollout.servers: waiting for %s (python -m stapo_lite.rollout.serve)", server.url)
                    deadline = now + timeout
                if now > deadline:
                    raise InputError(f"rollout.servers: {server.url} did not come up within {timeout:g} s")
                await asyncio.sleep(min(1.0, timeout / 10))
            try:
                await self._check(server, model, max_model_len)
            except (aiohttp.ClientError, RunError, _Lost) as error:
                raise InputError(f"rollout.servers: {one_line(error)}") from error
        self._watcher = asyncio.create_task(self._watch())

    async def _check(self, server: _Server, model: str, max_model_len: int) -> None:
        models = (await self._ask("GET", f"{server.url}/v1/models"))["data"]
        if models[0]["root"] != model:
            logger.warning("rollout.servers: %s serves %s, the trainer has %s", server.url, models[0]["root"], model)
        if models[0]["max_model_len"] < max_model_len:
            raise InputError(
                f"rollout.servers: {server.url} serves sequences of {models[0]['max_model_len']} tokens, but "
                f"data.max_prompt_length + rollout.max_completion_length = {max_model_len}: start it with "
                f"--max-model-len {max_model_len}"
            )
        # With such a bias the token is all but certain, unless log-probabilities are of the distribution before it.
        body = {"model": models[0]["id"], "prompt": [1], "max_tokens": 1, "logit_bias": {"2": 100}, "logprobs": 0}
        answer = await self._ask("POST", f"{server.url}/v1/completions", json=body)
        if answer["choices"][0]["logprobs"]["token_logprobs"][0] < -0.1:
            raise InputError(
                f"rollout.servers: {server.url} gives log-probabilities without the temperature: start it with "
                "--logprobs-mode processed_logprobs"
            )

    async def _ask(self, method: str, url: str, timeout: float | None = ADAPTER_TIMEOUT, **content: Any) -> Any:
        """Send a request; its answer, from JSON where it is.

        Raises:
            RunError: the server refuses it, as it would refuse it again.
            _Lost: it does not know the adapter, or has no engine any more.
            aiohttp.ClientError: anything else.
        """
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=HEALTH_TIMEOUT)
        async with self._session.request(method, url, timeout=limit, **content) as response:
            if response.ok:
                is_json = response.content_type == "application/json"
                return await (response.json() if is_json else response.text())
            text = " ".join((await response.text()).split())[:300]
        if response.status in (401, 403):
            raise RunError(f"{url} refuses the API key: set VLLM_API_KEY to the server's")
        if response.status in (404, 503):
            raise _Lost(f"{url}: {response.status} {text}")
        if response.status < 500 and response.status != 429:
            raise RunError(f"{url}: {response.status} {text}")
        raise aiohttp.ClientError(f"{url}: {response.status} {text}")

    async def _healthy(self, server: _Server) -> bool:
        """Whether it answers when it is asked twice; a lost one, once and quickly."""
        assert self._session is not None
        lost = server not in self._live
        limit = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT / 10 if lost else HEALTH_TIMEOUT)
        for _ in range(1 if lost else 2):
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._session.get(f"{server.url}/health", timeout=limit) as response:
                    return response.ok
        return False

    async def _watch(self) -> None:
        """Notice servers that hang, or are out of reach, and would let requests wait for ever."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            for server in list(self._live):
                if not await self._healthy(server):
                    self._drop(server, "it does not answer")

    def submit(self, prompt: Prompt, body: dict[str, Any], future: Future) -> None:
        heapq.heappush(self._queue, _Job(next(self._numbers), prompt, body, future))
        self._dispatch()

    def _dispatch(self) -> None:
        """Send what waits to whoever has the least to do."""
        while self._queue:
            if not self._live:
                job = heapq.heappop(self._queue)
                _settle(job.future.set_exception, RunError("rollout.servers: none is left; continue with --resume"))
                continue
            server = min(self._live, key=lambda server: len(server.jobs))
            if len(server.jobs) >= self._capacity:
                return
            job = heapq.heappop(self._queue)
            server.jobs[asyncio.create_task(self._sample(server, job))] = job

    async def _sample(self, server: _Server, job: _Job) -> None:
        version = self._version
        task = asyncio.current_task()
        try:
            body = job.body | {"model": self._model}
            answer = await self._ask("POST", f"{server.url}/v1/completions", timeout=None, json=body)  # hours, maybe
            (choice,) = answer["choices"]
            if choice["finish_reason"] not in ("stop", "length"):
                raise _Lost(f"it has given up a request ({choice['finish_reason']})")  # a server that is shut down
            _settle(job.future.set_result, _completion(job.prompt, choice, version))
        except RunError as error:
            _settle(job.future.set_exception, error)
        except _Lost as error:
            self._drop(server, one_line(error))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            job.failures += 1
            if not await self._healthy(server):
                self._drop(server, f"{type(error).__name__}: {one_line(error)}")
            elif job.failures > self._max_retries:
                problem = f"rollout.servers: a request failed {job.failures} times (rollout.max_restarts): {error}"
                _settle(job.future.set_exception, RunError(problem))
            else:
                await asyncio.sleep(0.1 * 2**job.failures)
                heapq.heappush(self._queue, job)
        except Exception as error:  # an answer of another shape: not from vLLM
            problem = (
                f"rollout.servers: {server.url} answers what is not a completion ({type(error).__name__}: {error})"
            )
            _settle(job.future.set_exception, RunError(problem))
        finally:
            server.jobs.pop(task, None)  # type: ignore[arg-type]
            self._dispatch()

    def _drop(self, server: _Server, reason: str) -> None:
        """Do without a server, and let others sample what it had to."""
        self.why_lost = reason
        if server not in self._live:
            return
        self._live.remove(server)
        jobs, server.jobs = server.jobs, {}
        logger.warning("rollout.servers: going on without %s (%s); %d completions move", server.url, reason, len(jobs))
        for task, job in jobs.items():
            task.cancel()
            heapq.heappush(self._queue, job)
        self._dispatch()

    def abandon(self, futures: set[Future]) -> None:
        """Forget requests, and end those that are under way."""
        self._queue = [job for job in self._queue if job.future not in futures]
        heapq.heapify(self._queue)
        for server in self._live:
            for task, job in server.jobs.items():
                if job.future in futures:
                    task.cancel()

    async def load(self, name: str, adapter: Path | dict[str, bytes], keep: Sequence[str]) -> list[str]:
        """Load an adapter into all servers, and drop those that are not to keep; gives the addresses of those that have
        it."""
        having = await asyncio.gather(*(self._load(server, name, adapter) for server in self._servers))
        loaded = [server for server, has in zip(self._servers, having, strict=True) if has]
        await asyncio.gather(*(self._unload(server, keep) for server in loaded))
        return [server.url for server in loaded]

    async def _load(self, server: _Server, name: str, adapter: Path | dict[str, bytes]) -> bool:
        failures = 0
        while await self._healthy(server):  # one that was lost may be back
            server.adapters.add(name)
            try:
                path = str(adapter) if isinstance(adapter, Path) else await self._upload(server, name, adapter)
                content = {"lora_name": name, "lora_path": path}
                await self._ask("POST", f"{server.url}/v1/load_lora_adapter", json=content)
                return True
            except (aiohttp.ClientError, TimeoutError, OSError, RunError, _Lost) as error:
                if "already been loaded" in str(error):  # only the answer was lost
                    return True
                failures += 1
                if failures > self._max_retries:
                    self._drop(server, one_line(error))
                    return False
                await asyncio.sleep(0.1 * 2**failures)
        self._drop(server, "it does not answer")
        return False

    async def _upload(self, server: _Server, name: str, files: dict[str, bytes]) -> str:
        """The folder on the server."""
        for file, content in files.items():
            folder = await self._ask("PUT", f"{server.url}/v1/adapters/{name}/{file}", data=content)
        return folder

    async def _unload(self, server: _Server, keep: Sequence[str]) -> None:
        for name in server.adapters - set(keep):
            with suppress(aiohttp.ClientError, TimeoutError, OSError, RunError, _Lost):  # or it is gone already
                await self._ask("POST", f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name})
            with suppress(aiohttp.ClientError, TimeoutError, OSError, RunError, _Lost):  # it was not uploaded
                await self._ask("DELETE", f"{server.url}/v1/adapters/{name}")
            server.adapters.discard(name)

    async def use(self, model: str, version: int, having: Sequence[str]) -> None:
        """Send new requests to this adapter, on the servers that have it."""
        self._model, self._version = model, version
        for server in self._servers:
            if server.url not in having:
                self._drop(server, "it has not loaded the adapter")
            elif server not in self._live:
                self._live.append(server)
        self._dispatch()

    async def close(self) -> None:
        """End all requests, and leave no adapter behind."""
        self._queue.clear()
        tasks = [task for server in self._servers for task in server.jobs]
        for task in [*tasks, *([self._watcher] if self._watcher else [])]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._live:
            if await self._healthy(server):
                await self._unload(server, [])
        if self._session is not None:
            await self._session.close()


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):  # nobody waits for it any more
        settle(value)
