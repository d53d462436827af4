"""Rollouts with vLLM in the trainer's process; each adapter version is loaded under a name of its
own.

vLLM keys its prefix cache by adapter name and path, and keeps the old weights of an id it knows, so
every version gets a fresh name, id and folder. The base is loaded once and never touched.
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
from stapo_lite.errors import InputError, RunError, explained, one_line, out_of_memory
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
            sleeps while it does.

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
        prepare_vllm()
        self._joined = torch.distributed.is_initialized()
        # A module of vLLM keeps the error of an optional import, whose traceback holds the callers'
        # variables, the base among them, for the life of the process. A thread has no callers.
        with ThreadPoolExecutor(1) as thread:
            llm = thread.submit(resolve_name, "vllm:LLM").result()
        from vllm import SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        on_cpu = current_platform.is_cpu()
        # On a CPU compiling the sampler costs ten seconds and gains nothing; the trainer may still
        # compile its layers.
        eager = functools.partial(torch.compiler.set_stance, "force_eager")
        self._uncompiled = eager if on_cpu else nullcontext
        self._dtype = dtype
        self._sleeps, self._asleep = share_base and not on_cpu, False
        arguments: dict[str, Any] = {"enable_sleep_mode": self._sleeps, "use_tqdm_on_load": False}
        if not on_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Each process has an engine, on its own card.
            arguments["distributed_executor_backend"] = "external_launcher"
        with explained(f"rollout: vLLM cannot serve {model}"), self._uncompiled():
            if not on_cpu:
                # vLLM works on a stream of its own, which may not wait for ours.
                torch.cuda.synchronize()
            arguments |= engine_arguments(
                model, dtype, sampling.max_model_len, options, lora, max_loras=1, on_cpu=on_cpu
            )
            self._threads = torch.get_num_threads()  # vLLM leaves one, on a GPU
            self._llm: Any = llm(**arguments)
        self._sampling = sampling
        self._parameters = functools.partial(
            SamplingParams,
            output_kind=RequestOutputKind.FINAL_ONLY,
            stop_token_ids=list(sampling.stop_token_ids),
        )
        self._folder = tempfile.TemporaryDirectory(prefix="stapo_lite-adapters-")
        self._request: Any = None
        self._prompts: dict[int, Prompt] = {}
        VLLMEngine._open = True

    def publish(self, policy: Publisher, version: int) -> None:
        """Hot-load the adapter as `version`, which must be new."""
        folder = Path(self._folder.name) / f"v{version}"
        write_adapter(policy, self._dtype, folder)
        self.load_adapter(folder, version)
        for old in Path(self._folder.name).iterdir():
            if old != folder:
                shutil.rmtree(old)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Serve an adapter in PEFT's format as `version`, which must be new, and drop the one
        before.

        Raises:
            InputError: it has layers that vLLM cannot adapt in this model.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"adapter-v{version}", version + 1, str(folder))  # ids begin at 1
        # Load it now: vLLM would hang on an adapter that fails to load during generation.
        with explained("lora.target_modules: vLLM cannot serve the adapter", ValueError):
            self._engine.add_lora(request)
        self._request = request

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        s = self._sampling
        # vLLM samples from the process's generators; a seed per request costs a fifth.
        set_seed(seeds[0] % 2**32)
        parameters = self._parameters(
            n=s.num_generations,
            temperature=s.temperature,
            max_tokens=s.max_completion_length,
            logprobs=0,  # of the sampled token only
            detokenize=False,
        )
        for index, prompt in enumerate(prompts):
            self._add(index, prompt, parameters)
        groups: dict[int, list[Completion]] = {}
        with progress_bar("rollout", "completion", s.num_generations * len(prompts)) as bar:
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
        finished = self._step()
        return [(index, completions(self._prompts.pop(index), o)[0]) for index, o in finished]

    def abort(self) -> None:
        self._engine.abort_request(list(map(str, self._prompts)))
        self._prompts.clear()

    def _add(self, index: int, prompt: Prompt, parameters: Any) -> None:
        tokens = {"prompt_token_ids": prompt.token_ids}
        self._engine.add_request(str(index), tokens, parameters, lora_request=self._request)

    def _step(self) -> list[tuple[int, Any]]:
        """Index and vLLM's output of the requests that a step of the engine finishes.

        Raises:
            RunError: vLLM failed.
        """
        try:
            with self._uncompiled():
                outputs = self._engine.step()
        except Exception as error:  # whatever ends vLLM
            reason = f"vLLM failed while it sampled ({type(error).__name__}: {one_line(error)})"
            raise RunError(
                f"{reason}: go on with the same command (stapo train: with --resume)"
            ) from error
        return [(int(output.request_id), output) for output in outputs if output.finished]

    @property
    def _engine(self) -> Any:
        return self._llm.llm_engine

    def shared_base(self) -> BaseWeights | None:
        models: list[Any] = []
        self._llm.apply_model(models.append)  # it runs in this process
        return named_weights(models[0])

    def sleep(self) -> None:
        """Give the KV cache's memory to the trainer, if it computes on the engine's weights. These
        and the adapter stay in place."""
        if not self._sleeps:
            return
        # The scheduler drops finished requests only in its next step, and does not release the
        # cache before that.
        for _ in range(STEPS_UNTIL_IDLE):
            self._engine.step()
        self._llm.sleep(level=0)
        self._llm.release_kv_cache_memory()
        self._asleep = True

    def wake(self) -> None:
        if not self._asleep:
            return
        torch.cuda.empty_cache()  # what the trainer has freed but torch still holds
        try:
            self._llm.wake_up(tags=["kv_cache", "scheduling"])
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise RunError(
                "vLLM does not get its memory back when it wakes: lower "
                "rollout.gpu_memory_utilization, and continue with --resume --force"
            ) from error
        self._asleep = False

    def close(self) -> None:
        """Free the engine's memory, for another engine in the same process (a notebook)."""
        VLLMEngine._open = False
        self._folder.cleanup()
        if self._asleep:  # memory unmapped by sleep would stay unmapped for the next engine
            torch.cuda.empty_cache()
            with suppress(Exception):
                self._llm.wake_up()
        with kept_pools():
            # If vLLM's failure ended the run, its shutdown may fail, too.
            with suppress(Exception), kept_process_group(self._joined):
                self._engine.engine_core.shutdown()
            self._llm = self._request = None
            forget_adapter_slots()
            gc.collect()  # the engine is full of cycles
        clear_device_cache()
        torch.set_num_threads(self._threads)


@contextmanager
def kept_process_group(keep: bool) -> Iterator[None]:
    """Keep accelerate's global process group, which vLLM would destroy along with its own groups.

    Args:
        keep: whether it was there before vLLM.
    """
    destroy = torch.distributed.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None or not keep:
            destroy(group)

    torch.distributed.destroy_process_group = destroy_own  # no option of vLLM's leaves it out
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy


@contextmanager
def kept_pools() -> Iterator[None]:
    """Keep the memory pools of vLLM's sleep mode until its tensors are gone. At its shutdown vLLM
    drops the pools first, and what is in them then stays on the card (18 GiB of an 8B model on an
    H100, with 0.32), where no other engine of the process starts."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator: Any = module and module.CuMemAllocator.instance
    if allocator is None:
        yield
        return
    allocator.release_pools = lambda: None
    yield
    del allocator.release_pools  # the instance's, in front of the class's
    allocator.release_pools()


def forget_adapter_slots() -> None:
    """Drop the adapter slots that vLLM's CUDA kernels keep in tables for the life of the process
    (vllm/lora/ops/triton_ops/utils.py). They are in sleep mode's memory pool, and no other engine
    starts while it holds any."""
    if kernels := sys.modules.get("vllm.lora.ops.triton_ops.utils"):
        kernels._LORA_A_PTR_DICT.clear()
        kernels._LORA_B_PTR_DICT.clear()


def completions(prompt: Prompt, output: Any) -> list[Completion]:
    """The samples in a vLLM `RequestOutput`, with the adapter version that its request named."""
    version = output.lora_request.lora_int_id - 1 if output.lora_request else 0
    found = []
    for sample in output.outputs:
        token_ids = list(sample.token_ids)
        logprobs = []
        if sample.logprobs:
            pairs = zip(token_ids, sample.logprobs, strict=True)
            logprobs = [step[token].logprob for token, step in pairs]
        truncated = sample.finish_reason == "length"
        found.append(Completion(prompt, token_ids, logprobs, truncated, version))
    return found
