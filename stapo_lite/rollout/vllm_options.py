"""vLLM's engine arguments in one table, for an engine in the process and for a server; checks of
the installed vLLM."""

import logging
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from stapo_lite.config import Engine, Lora
from stapo_lite.errors import InputError

BATCHED_TOKENS = 2048
"""Tokens that vLLM prefills at a time on a GPU: enough to keep a card busy. The KV cache gets half
a GiB more than with vLLM's own 8,192. A group shares its prompt, so there is little to prefill."""
CPU_KV_CACHE_BYTES = 1 << 30
WATERMARK = 0.05
"""Share of the KV cache that vLLM keeps free for running sequences when it admits a new one. This
saves more than half of the tokens that preemption would otherwise recompute
(benchmarks/README.md)."""
ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm.config.lora.MaxLoRARanks


def prepare_vllm() -> None:
    """Set what vLLM reads when it is imported: one process, and quiet."""
    # vLLM's core runs in this process: `set_seed` reaches its sampler, `apply_model` its weights.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if os.environ.get("WORLD_SIZE", "1") == "1":  # its process group stays on this machine
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    # Both warn about a missing Triton, which a CPU does not need, during vLLM's import, before vLLM
    # applies its own level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def served_rank(lora_r: int) -> int:
    """The smallest `max_lora_rank` that serves adapters of this rank."""
    return next(rank for rank in ALLOWED_RANKS if rank >= lora_r)


def engine_arguments(
    model: str,
    dtype: str,
    max_model_len: int,
    options: Engine,
    lora: Lora | None,
    *,
    max_loras: int,
    on_cpu: bool,
) -> dict[str, Any]:
    """Arguments of vLLM's engine, by the names of its `EngineArgs`.

    Args:
        model: folder or Hub name of the base.
        lora: rank and layers of the adapters to come; None if there will be none.
        max_loras: adapters that are served at the same time.

    Raises:
        InputError: `options.vllm` has an argument that the run sets itself.
    """
    ours: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "quantization": options.quantization,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        # log_softmax(logits / temperature), as the trainer has it
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,  # they would keep the name of every adapter
    }
    if lora is not None:
        ours |= {"enable_lora": True, "max_loras": max_loras, "max_lora_rank": served_rank(lora.r)}
        if lora.target_modules != ["all-linear"]:  # by default every layer that vLLM can adapt
            ours["lora_target_modules"] = list(lora.target_modules)
    defaults: dict[str, Any] = {"watermark": WATERMARK}
    if on_cpu:  # with chunked prefill, requests with a seed crash vLLM 0.32 there
        defaults |= {
            "max_num_batched_tokens": max(4096, max_model_len),
            "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        }
        ours |= {"enforce_eager": True, "enable_chunked_prefill": False}
        ours["worker_extension_cls"] = "stapo_lite.rollout.vllm_cpu_lora.WorkerExtension"
    else:
        # At most what all sequences can hold: vLLM's warm-up spreads such a batch over them.
        most = options.max_num_seqs * max_model_len
        defaults["max_num_batched_tokens"] = min(BATCHED_TOKENS, most)
        if options.gpu_memory_utilization is not None:  # by default vLLM's
            ours["gpu_memory_utilization"] = options.gpu_memory_utilization
    for name in ours.keys() & options.vllm.keys():
        raise InputError(f"rollout.vllm.{name}: the run sets it itself: leave it out")
    arguments = ours | defaults | options.vllm
    if not on_cpu:
        arguments["hf_overrides"] = fp32_head(model, options) | options.vllm.get("hf_overrides", {})
        compilation = options.vllm.get("compilation_config", {})
        # Every request has an adapter, so graphs without one are not needed. (Only vLLM's first
        # model runner heeds this; the second captures both sets.)
        arguments["compilation_config"] = {"cudagraph_specialize_lora": False} | compilation
        if options.quantization == "bitsandbytes" and dtype == "float16":
            # Those layers cast to bfloat16, which compiled graphs cannot do before Ampere.
            arguments["enforce_eager"] = True
    return arguments


def fp32_head(model: str, options: Engine) -> dict[str, str]:
    """Overrides of the model's config on a GPU: logits in fp32, like the trainer's.

    Rounding them to bf16 adds a fifth to the gap between engine and trainer
    (benchmarks/README.md). vLLM refuses fp32 for a quantised head; a CPU would cast the head at
    every step, which takes 40 % more time per token.
    """
    from transformers import AutoConfig

    if options.quantization not in (None, "bitsandbytes", "fp8"):  # they leave the head as it is
        return {}
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return {} if hasattr(config, "quantization_config") else {"head_dtype": "float32"}


def vllm_version() -> str:
    """The version of the installed vLLM, or of its CPU build."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def has_device() -> bool:
    """Whether the installed vLLM is a CPU build, or torch can use a card; it cannot if the driver
    is older than torch's CUDA."""
    import torch

    try:
        for_cpu = "cpu" in version("vllm")
    except PackageNotFoundError:  # the CPU build on PyPI has another name
        for_cpu = True
    return for_cpu or torch.cuda.is_available()


def check_vllm(options: Engine, dtype: str) -> None:
    """Check that the installed vLLM can serve as asked.

    Raises:
        InputError: it needs a plugin, or another dtype.
    """
    if options.quantization == "bitsandbytes" and not find_spec("vllm_bnb_plugin"):
        raise InputError(
            "rollout.quantization=bitsandbytes: vLLM needs a plugin for it: "
            "pip install --no-deps vllm-bnb-plugin==0.0.3"
        )
    import torch

    if dtype == "float32" and (options.quantization == "bitsandbytes" or torch.cuda.is_available()):
        raise InputError(
            "dtype=float32: vLLM's bitsandbytes layers, and its adapters on a card, cannot compute "
            "in it; set dtype=bfloat16"
        )
