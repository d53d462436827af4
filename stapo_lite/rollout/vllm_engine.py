"""Rollouts with vLLM in the trainer's process.

The base is loaded once and never touched. Each version of the adapter is loaded under a new name,
id and folder: vLLM keys its prefix cache by name and path, and keeps the old weights of an id that
it knows.
"""

import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from accelerate.utils import set_seed
from accelerate.utils.memory import clear_device_cache

from stapo_lite.config import Engine, Lora
from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.progress import progress_bar, show_speed
from stapo_lite.rollout.engine import (
    Decoding,
    Publisher,
    RolloutEngine,
    RolloutSettings,
    write_adapter,
)
from stapo_lite.rollout.vllm_options import engine_arguments, prepare_vllm
from stapo_lite.rollout.vllm_weights import named_weights
from stapo_lite.types import BaseWeights, Completion, Prompt

logger = logging.getLogger(__name__)

STEPS_UNTIL_IDLE = 3
"""Steps without a request until vLLM is idle: it may have scheduled two ahead."""


class VLLMEngine(RolloutEngine):
    """vLLM's `LLM` with one adapter slot.

    Args:
        model: folder or Hub name of the base, which may be quantised.
        options: `gpu_memory_utilization` has an effect on a GPU only.
        lora: rank and layers of the adapters to come; None if there will be none.
        share_base: the trainer may compute on the engine's weights. On a card the engine then
            sleeps while the trainer computes.

    Raises:
        InputError: vLLM does not start, or another engine of this process is open.
    """

    _open = False

    def __init__(
        self,
        model: str,
        dtype: str,
        sampling: RolloutSettings,
        options: Engine,
        lora: Lora | None,
        share_base: bool = False,
    ):
        # vLLM's state is the process's: an engine that closes takes the other one's along.
        if VLLMEngine._open:
            raise InputError(
                "rollout.engine: this process has a vLLM engine already; end the run that has it "
                "(an iteration over its steps), or use another process"
            )
        self._dtype = dtype
        self._sampling = sampling
        self._joined = torch.distributed.is_initialized()
        prepare_vllm()
        llm_class = import_llm()
        from vllm import SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        on_cpu = current_platform.is_cpu()
        self._uncompiled = force_eager if on_cpu else nullcontext
        self.sleeps = share_base and not on_cpu
        self._asleep = False
        self._threads = torch.get_num_threads()  # vLLM leaves one, on a GPU
        self._parameters = functools.partial(
            SamplingParams,
            output_kind=RequestOutputKind.FINAL_ONLY,
            stop_token_ids=list(sampling.stop_token_ids),
            flat_logprobs=True,  # lists of numbers, not an object and a dictionary for each token
        )
        with explained(f"rollout: vLLM cannot serve {model}"), self._uncompiled():
            arguments = engine_arguments(
                model, dtype, sampling.max_model_len, options, lora, max_loras=1, on_cpu=on_cpu
            )
            if not on_cpu:
                # vLLM works on a stream of its own, which may not wait for torch's.
                torch.cuda.synchronize()
            self._llm: Any = llm_class(**process_arguments(on_cpu, self.sleeps) | arguments)
        self._folder = tempfile.TemporaryDirectory(prefix="stapo_lite-adapters-")
        self._request: Any = None
        self._prompts: dict[int, Prompt] = {}
        VLLMEngine._open = True

    def publish(self, policy: Publisher, version: int) -> None:
        """Hot-load the adapter as `version`, which must be new."""
        folder = Path(self._folder.name) / f"v{version}"
        write_adapter(policy, self._dtype, folder)
        self.load_adapter(folder, version)
        for other in Path(self._folder.name).iterdir():
            if other != folder:
                shutil.rmtree(other)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Serve an adapter in PEFT's format as `version`, which must be new, and drop the adapter
        before it.

        Raises:
            InputError: vLLM cannot adapt all of its layers in this model.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"adapter-v{version}", version + 1, str(folder))  # ids begin at 1
        # Load it now: vLLM would hang if an adapter failed to load during generation.
        with explained("lora.target_modules: vLLM cannot serve the adapter", ValueError):
            self._engine.add_lora(request)
        self._request = request

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        size = self._sampling.num_generations
        # vLLM draws from the process's generators. A seed for each request would cost a fifth.
        set_seed(seeds[0] % 2**32)
        parameters = self._parameters(
            n=size,
            temperature=self._sampling.temperature,
            max_tokens=self._sampling.max_completion_length,
            logprobs=0,  # of the sampled token only
            detokenize=False,
        )
        for index, prompt in enumerate(prompts):
            self._add(index, prompt, parameters)
        groups: dict[int, list[Completion]] = {}
        with progress_bar("rollout", "completion", size * len(prompts)) as bar:
            while len(groups) < len(prompts):
                for index, output in self._step():
                    groups[index] = completions(prompts[index], output)
                    show_speed(bar, chain(*groups.values()))
                bar.update(bar.total - self._engine.get_num_unfinished_requests() - bar.n)
        return [groups[index] for index in range(len(prompts))]

    def add(self, index: int, prompt: Prompt, seed: int, decoding: Decoding) -> None:
        options = {"detokenize": bool(decoding.options)}  # text is needed for stop strings
        # An option that an episode gave may be unknown or out of range.
        with explained("vLLM refuses a request", kind=RunError):
            parameters = self._parameters(**options | decoding.parameters(seed))
            self._add(index, prompt, parameters)
        self._prompts[index] = prompt

    def step(self) -> list[tuple[int, Completion]]:
        return [
            (index, completions(self._prompts.pop(index), output)[0])
            for index, output in self._step()
        ]

    def abort(self) -> None:
        self._engine.abort_request(list(map(str, self._prompts)))
        self._prompts.clear()

    def _add(self, index: int, prompt: Prompt, parameters: Any) -> None:
        tokens = {"prompt_token_ids": prompt.token_ids}
        self._engine.add_request(str(index), tokens, parameters, lora_request=self._request)

    def _step(self) -> list[tuple[int, Any]]:
        """Run one step of vLLM; return index and output of the requests that it finishes.

        Raises:
            RunError: vLLM failed.
        """
        fix = ": go on with the same command (stapo train: with --resume)"
        with explained("vLLM failed while it sampled", fix=fix, kind=RunError), self._uncompiled():
            outputs = self._engine.step()
        return [(int(output.request_id), output) for output in outputs if output.finished]

    @property
    def _engine(self) -> Any:
        return self._llm.llm_engine

    def shared_base(self) -> BaseWeights | None:
        return self._llm.apply_model(named_weights)[0]  # vLLM's one worker is in this process

    def sleep(self) -> None:
        """Give the KV cache's memory to a trainer that computes on the engine's weights. Weights
        and adapter stay in place."""
        if not self.sleeps:
            return
        # The scheduler does not release the cache before it has dropped finished requests, which
        # it does in its next step.
        for _ in range(STEPS_UNTIL_IDLE):
            self._engine.step()
        self._llm.sleep(level=0)
        self._llm.release_kv_cache_memory()
        self._asleep = True

    def wake(self) -> None:
        if not self._asleep:
            return
        torch.cuda.empty_cache()  # torch still holds what the trainer has freed
        fix = ": lower rollout.gpu_memory_utilization, and continue with --resume --force"
        with explained("vLLM does not get its memory back", RuntimeError, fix=fix, kind=RunError):
            self._llm.wake_up(tags=["kv_cache", "scheduling"])
        self._asleep = False

    def close(self) -> None:
        """Free the engine's memory, for another engine in the same process (a notebook)."""
        VLLMEngine._open = False
        self._folder.cleanup()
        if self._asleep:  # memory that sleep has unmapped would stay so for the next engine
            torch.cuda.empty_cache()
            with suppress(Exception):
                self._llm.wake_up()
        with kept_pools():
            # If a failure of vLLM ended the run, its shutdown may fail, too.
            with suppress(Exception), kept_process_group(self._joined):
                self._engine.engine_core.shutdown()
            self._llm = self._request = None
            forget_adapter_slots()
            gc.collect()  # the engine is full of cycles
        clear_device_cache()
        torch.set_num_threads(self._threads)


def import_llm() -> Any:
    """Import vLLM's `LLM`, in a thread of its own.

    A module of vLLM keeps the error of an optional import for the life of the process. The error's
    traceback holds the variables of all callers, the base among them. A thread has no callers.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(resolve_name, "vllm:LLM").result()


def force_eager() -> Any:
    """Compile nothing within the context. On a CPU compiling vLLM's sampler costs ten seconds and
    gains nothing; the trainer may still compile its layers."""
    return torch.compiler.set_stance("force_eager")


def process_arguments(on_cpu: bool, sleeps: bool) -> dict[str, Any]:
    """Arguments of an engine in the trainer's process, by the names of vLLM's `EngineArgs`."""
    arguments: dict[str, Any] = {"enable_sleep_mode": sleeps, "use_tqdm_on_load": False}
    if not on_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Each process of the launch has an engine, on its own card.
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments


@contextmanager
def kept_process_group(keep: bool) -> Iterator[None]:
    """Keep accelerate's global process group: vLLM's shutdown would destroy it with its own groups.

    Args:
        keep: whether the group was there before vLLM.
    """
    destroy = torch.distributed.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None or not keep:
            destroy(group)

    torch.distributed.destroy_process_group = destroy_own  # vLLM has no option for it
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy


@contextmanager
def kept_pools() -> Iterator[None]:
    """Keep the memory pools of vLLM's sleep mode until vLLM's tensors are gone.

    vLLM's shutdown drops the pools first. The tensors in them then stay on the card (18 GiB of an
    8B model on an H100, with 0.32), and no other engine of the process starts there.
    """
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator: Any = module and module.CuMemAllocator.instance
    if allocator is None:
        yield
        return
    allocator.release_pools = lambda: None
    yield
    del allocator.release_pools  # of the instance: the class's is back
    allocator.release_pools()


def forget_adapter_slots() -> None:
    """Drop the adapter slots that vLLM's CUDA kernels keep in tables for the life of the process
    (vllm/lora/ops/triton_ops/utils.py). The slots lie in sleep mode's memory pool, and no other
    engine starts before that is empty."""
    if kernels := sys.modules.get("vllm.lora.ops.triton_ops.utils"):
        kernels._LORA_A_PTR_DICT.clear()
        kernels._LORA_B_PTR_DICT.clear()


def completions(prompt: Prompt, output: Any) -> list[Completion]:
    """The samples in a vLLM `RequestOutput`, with the adapter version that its request named."""
    version = 0
    if output.lora_request:
        version = output.lora_request.lora_int_id - 1
    samples = []
    for sample in output.outputs:
        logprobs = []
        if sample.logprobs is not None:
            # Of each position's candidates the sampled one comes first.
            flat = sample.logprobs
            logprobs = [flat.logprobs[start] for start in flat.start_indices]
        truncated = sample.finish_reason == "length"
        samples.append(Completion(prompt, list(sample.token_ids), logprobs, truncated, version))
    return samples
