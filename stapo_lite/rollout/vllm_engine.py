"""Rollouts with vLLM in the trainer's process; each adapter version is loaded under a name of its own.

vLLM keys its prefix cache by adapter name and path, and keeps the old weights of an id it knows, so
every version gets a fresh name, id and folder. The folder holds PEFT's config only: the weights go to
vLLM in memory. The base is loaded once and never touched.
"""

import functools
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from tqdm.auto import tqdm

from stapo_lite.batching import out_of_memory
from stapo_lite.config import Engine, InputError, Lora, RunError, one_line
from stapo_lite.policy import Policy, load_model_config
from stapo_lite.rollout import Decoding, Sampling
from stapo_lite.types import Completion, Prompt

logger = logging.getLogger(__name__)

BATCHED_TOKENS = 8192
"""Tokens that vLLM prefills at a time on a GPU. Its own default doubles from 70 GiB on, which the planner would not
know."""
ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm.config.lora.MaxLoRARanks


def served_rank(lora_r: int) -> int:
    """The smallest `max_lora_rank` that serves adapters of this rank."""
    return next(rank for rank in ALLOWED_RANKS if rank >= lora_r)


def hf_overrides(model: str, quantization: str | None) -> dict[str, str]:
    """Changes of the model's config on a GPU: logits in fp32, as the trainer's.

    Rounded to bf16 they add a fifth to the gap between the two (docs/results.md). vLLM refuses it for a quantised head;
    a CPU would cast the head at every step, which takes 40 % more time per token.
    """
    plain = quantization in (None, "bitsandbytes") and not hasattr(load_model_config(model), "quantization_config")
    return {"head_dtype": "float32"} if plain else {}


def cpu_batched_tokens(max_model_len: int) -> int:
    """`max_num_batched_tokens` without chunked prefill: with it, requests that have a seed end vLLM 0.32 on a CPU."""
    return max(4096, max_model_len)


def prepare_vllm() -> None:
    """Set what vLLM reads when it is imported: one process, and quiet."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # seeds reach the sampler
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if os.environ.get("WORLD_SIZE", "1") == "1":  # its own process group listens to nobody else
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    # Both speak while vLLM is imported, before it reads its own level: of a Triton that no CPU needs.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def cpu_placement(options: Engine, max_model_len: int) -> dict[str, Any]:
    """Arguments of `LLM` on a CPU."""
    from stapo_lite.rollout import vllm_cpu_lora

    vllm_cpu_lora.install()
    # Compiling the sampler costs the first call ten seconds and gains nothing here.
    torch._dynamo.config.disable = True
    return {
        "kv_cache_memory_bytes": int(options.kv_cache_gb * 2**30),
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": cpu_batched_tokens(max_model_len),
    }


def gpu_placement(options: Engine, model: str) -> dict[str, Any]:
    """Arguments of `LLM` on a GPU."""
    torch.cuda.synchronize()  # vLLM goes on in a stream of its own, up to 0.29 without waiting
    placement: dict[str, Any] = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "hf_overrides": hf_overrides(model, options.quantization),
    }
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # an engine per process, each on its process's card
        placement["distributed_executor_backend"] = "external_launcher"
    return placement


class VLLMEngine:
    """vLLM's `LLM` with one adapter slot.

    Args:
        model: folder or Hub name of the base, which may be quantised.
        options: of them, gpu_memory_utilization counts on a GPU, kv_cache_gb on a CPU.
        lora: rank and layers of the adapters to come; None where there will be none.
        sleep_level: counts on a GPU.

    Raises:
        InputError: vLLM does not start.
    """

    def __init__(
        self, model: str, dtype: str, sampling: Sampling, options: Engine, lora: Lora | None, sleep_level: int
    ):
        prepare_vllm()
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        on_cpu = current_platform.is_cpu()
        self._dtype = getattr(torch, dtype)
        self._sleep_level, self._asleep = 0 if on_cpu else sleep_level, False
        adapters: dict[str, Any] = {}
        if lora is not None:
            adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": served_rank(lora.r)}
            adapters["lora_target_modules"] = list(lora.target_modules)
        make_llm: Any = LLM  # its signature lists every data type and quantisation by name
        self._start = functools.partial(
            make_llm,
            model,
            dtype=dtype,
            quantization=options.quantization,
            max_model_len=sampling.max_model_len,
            max_num_seqs=options.max_num_seqs,
            **adapters,
            logprobs_mode="processed_logprobs",  # log_softmax(logits / temperature), as the trainer has it
            generation_config="vllm",
            enable_sleep_mode=self._sleep_level > 0,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **(cpu_placement(options, sampling.max_model_len) if on_cpu else gpu_placement(options, model)),
        )
        try:
            self._llm: Any = self._start()
        except Exception as error:  # vLLM raises a dozen kinds
            raise InputError(
                f"rollout: vLLM cannot serve {model} ({type(error).__name__}: {one_line(error)})"
            ) from error
        self._max_restarts = options.max_restarts
        self._parameters = SamplingParams(
            n=sampling.num_generations,
            temperature=sampling.temperature,
            max_tokens=sampling.max_completion_length,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,  # the sampled token's only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        _read_adapters_from_memory()
        self._folder = tempfile.TemporaryDirectory(prefix="stapo_lite-adapters-")
        self._request: Any = None

    def publish(self, policy: Policy, version: int) -> None:
        """Hot-load the adapter as `version`, which must be new."""
        folder = Path(self._folder.name) / f"v{version}"
        policy.model.peft_config["default"].save_pretrained(folder)
        _ADAPTERS[str(folder)] = policy.adapter_tensors(self._dtype)
        self.load_adapter(folder, version)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Serve an adapter in PEFT's format as `version`, which must be new, and drop the one before."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"adapter-v{version}", version + 1, str(folder))  # ids begin at 1
        # Loaded before it is generated from: a bad adapter raises here, but would hang `generate`.
        self._engine.add_lora(request)
        self._forget_adapter()
        self._request = request

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], progress: bool = False
    ) -> list[list[Completion]]:
        set_seed(seeds[0] % 2**32)  # vLLM samples from the process's generators; a seed per request costs a fifth
        groups: dict[int, list[Completion]] = {}
        quiet = None if progress else True
        with tqdm(total=len(prompts), desc="rollout", unit="prompt", leave=False, disable=quiet) as bar:
            for index, output in self._outputs(prompts, [self._parameters] * len(prompts)):
                version = output.lora_request.lora_int_id - 1
                groups[index] = [completion(prompts[index], sample, version) for sample in output.outputs]
                bar.update()
        return [groups[index] for index in range(len(prompts))]

    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Nothing to gain: who samples here does not train meanwhile."""

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decoding: Decoding
    ) -> Iterator[tuple[int, Completion]]:
        parameters = [
            type(self._parameters)(
                temperature=decoding.temperature,
                top_p=decoding.top_p,
                max_tokens=decoding.max_completion_length,
                stop_token_ids=self._parameters.stop_token_ids,
                seed=seed,
                detokenize=False,
                output_kind=self._parameters.output_kind,
            )
            for seed in seeds
        ]
        version = self._request.lora_int_id - 1 if self._request else 0
        for index, output in self._outputs(prompts, parameters):
            sample = output.outputs[0]
            truncated = sample.finish_reason == "length"
            yield index, Completion(prompts[index], list(sample.token_ids), [], truncated, version)

    def _outputs(self, prompts: Sequence[Prompt], parameters: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """The index of a prompt and vLLM's output for it, as they finish. A vLLM that fails is started anew, with the
        current adapter, for the prompts that are missing.

        Raises:
            RunError: it failed too often.
        """
        missing, failures = dict.fromkeys(range(len(prompts))), 0
        while missing:
            try:
                if failures:
                    self._restart()
                for index in missing:
                    request = {"prompt_token_ids": prompts[index].token_ids}
                    self._engine.add_request(str(index), request, parameters[index], lora_request=self._request)
                while self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        if output.finished:
                            index = int(output.request_id)
                            del missing[index]
                            yield index, output
            except GeneratorExit:  # the caller has seen enough
                self._engine.abort_request([str(index) for index in missing])
                raise
            except Exception as error:  # whatever ends vLLM
                failures += 1
                reason = f"vLLM failed while it sampled ({type(error).__name__}: {one_line(error)})"
                if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # its end is that of the process group, too
                    raise RunError(f"{reason}: continue with --resume") from error
                if failures > self._max_restarts:
                    raise RunError(f"{reason}, after {failures - 1} restarts (rollout.max_restarts)") from error
                logger.warning("%s: starting it anew for %d of %d prompts", reason, len(missing), len(prompts))

    @property
    def _engine(self) -> Any:
        return self._llm.llm_engine

    def _restart(self) -> None:
        self._shut_down()
        self._llm = self._start()  # which reads the adapter with the first request for it

    def sleep(self) -> None:
        if self._sleep_level:
            self._llm.sleep(level=self._sleep_level)
            self._asleep = True

    def wake(self) -> None:
        if not self._asleep:
            return
        torch.cuda.empty_cache()  # what the trainer has freed but torch still holds
        try:
            if self._sleep_level == 2:
                self._llm.wake_up(tags=["weights"])
                self._llm.collective_rpc("reload_weights")
                self._llm.wake_up(tags=["kv_cache"])
            else:
                self._llm.wake_up()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise RunError(
                "vLLM does not get its memory back when it wakes: lower rollout.gpu_memory_utilization, or set "
                "train.park_trainer=true, and continue with --resume"
            ) from error
        self._asleep = False
        self._reload_adapter()

    def _reload_adapter(self) -> None:
        """Load the current version anew: level 2 leaves its place on the card empty, and an id that vLLM knows would
        not be read again."""
        if self._request is not None:
            self._engine.remove_lora(self._request.lora_int_id)
            self._engine.add_lora(self._request)

    def _forget_adapter(self) -> None:
        if self._request is not None and _ADAPTERS.pop(self._request.lora_path, None) is not None:  # not a user's
            shutil.rmtree(self._request.lora_path)

    def close(self) -> None:
        """Free the engine's memory, for another engine in the same process (a notebook)."""
        self._forget_adapter()
        self._request = None
        self._folder.cleanup()
        self._shut_down()

    def _shut_down(self) -> None:
        if self._llm is not None:
            if self._asleep:  # memory that is still given back would stay so for the next engine of the process
                torch.cuda.empty_cache()
                with suppress(Exception):
                    self._llm.wake_up()
            with suppress(Exception):  # it may be what failed
                self._engine.engine_core.shutdown()
        self._asleep = False
        self._llm = None
        clear_device_cache(garbage_collection=True)  # the engine is full of cycles


_ADAPTERS: dict[str, dict[str, Tensor]] = {}
"""The weights that belong to an adapter's folder, by PEFT's names."""


def _read_adapters_from_memory() -> None:
    """Let vLLM (0.26 to 0.33) find in `_ADAPTERS` what it would read from an adapter's folder: a third of the time that
    writing and reading the file takes."""
    from vllm.lora.lora_model import LoRAModel

    lora_model: Any = LoRAModel
    read_folder = lora_model.from_local_checkpoint

    def from_local_checkpoint(lora_dir: str, expected_lora_modules: Any, peft_helper: Any, **options: Any) -> Any:
        if lora_dir not in _ADAPTERS:
            return read_folder(lora_dir, expected_lora_modules, peft_helper, **options)
        names = ("lora_model_id", "device", "dtype", "model_vocab_size", "weights_mapper", "skip_prefixes")
        # Copies: vLLM multiplies B by the adapter's scale in place.
        tensors = {name: tensor.clone() for name, tensor in _ADAPTERS[lora_dir].items()}
        return lora_model.from_lora_tensors(
            tensors=tensors, peft_helper=peft_helper, **{name: options[name] for name in names}
        )

    if not hasattr(read_folder, "__wrapped__"):  # once for all engines
        lora_model.from_local_checkpoint = functools.wraps(read_folder)(from_local_checkpoint)


def completion(prompt: Prompt, sample: Any, version: int) -> Completion:
    """One of vLLM's `CompletionOutput`s, of the adapter version that its request named."""
    token_ids = list(sample.token_ids)
    logprobs = [step[token].logprob for token, step in zip(token_ids, sample.logprobs, strict=True)]
    return Completion(prompt, token_ids, logprobs, sample.finish_reason == "length", version)
