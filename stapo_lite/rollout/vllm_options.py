"""vLLM's engine arguments, for an engine in the process and for a server; checks of the installed
vLLM."""

import logging
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from stapo_lite.config import Engine, Lora
from stapo_lite.errors import InputError

BATCHED_TOKENS = 2048
"""Tokens that vLLM prefills at a time on a GPU: enough to keep a card busy, since a group shares
its prompt. The KV cache gets half a GiB more than with vLLM's own 8,192."""
CPU_KV_CACHE_BYTES = 1 << 30
WATERMARK = 0.05
"""Part of the KV cache that vLLM keeps free for running sequences when it admits a new one. This
saves more than half of the tokens that preemption would otherwise recompute
(benchmarks/README.md)."""
ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm.config.lora.MaxLoRARanks


def prepare_vllm() -> None:
    """Set what vLLM reads when it is imported, so that it runs in one process and is quiet."""
    defaults = {
        # vLLM's core runs in this process: `set_seed` reaches its sampler, `apply_model` its
        # weights.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if os.environ.get("WORLD_SIZE", "1") == "1":  # vLLM's process group stays on this machine
        defaults |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    # While vLLM is imported, before it applies its own level, both warn that Triton is missing. A
    # CPU does not need Triton.
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
    """Arguments of vLLM's engine, by the names of its `EngineArgs`: those that a run fixes, and
    defaults under the user's `options.vllm`. Of two dictionaries the keys are merged.

    Args:
        model: folder or Hub name of the base.
        lora: rank and layers of the adapters to come; None if there will be none.
        max_loras: adapters that are served at the same time.

    Raises:
        InputError: `options.vllm` has an argument that the run fixes.
    """
    from transformers import AutoConfig

    model_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    fixed: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "quantization": options.quantization,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        # log_softmax(logits / temperature), as the trainer has it
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "language_model_only": True,  # without what reads images
        "disable_log_stats": True,  # they would keep the name of every adapter
    }
    if lora is not None:
        rank = served_rank(lora.r)
        fixed |= {"enable_lora": True, "max_loras": max_loras, "max_lora_rank": rank}
        if lora.target_modules != ["all-linear"]:  # no layer's name: vLLM would adapt none
            fixed["lora_target_modules"] = lora.target_modules
    if on_cpu:
        fixed |= cpu_arguments(model_config)
        # A prompt must fit into one batch, since prefill is not chunked.
        defaults = {"max_num_batched_tokens": max(4096, max_model_len)}
        defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    else:
        if options.gpu_memory_utilization is not None:
            fixed["gpu_memory_utilization"] = options.gpu_memory_utilization
        defaults = card_defaults(model_config, dtype, max_model_len, options)
    for name in fixed.keys() & options.vllm.keys():
        raise InputError(f"rollout.vllm.{name}: the run sets it itself: leave it out")
    arguments = {"watermark": WATERMARK} | fixed | defaults | options.vllm
    for name, default in defaults.items():
        if isinstance(default, dict):
            arguments[name] = default | options.vllm.get(name, {})
    return arguments


def cpu_arguments(model_config: Any) -> dict[str, Any]:
    """Arguments of an engine on a CPU."""
    arguments = {
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # with it, requests with a seed crash vLLM 0.32
        "worker_extension_cls": "stapo_lite.rollout.vllm_cpu_lora.WorkerExtension",
    }
    layers = getattr(model_config.get_text_config(), "layer_types", None) or []
    if "linear_attention" in layers:  # whose states vLLM caches only where prefill is chunked
        arguments["enable_prefix_caching"] = False
    return arguments


def card_defaults(
    model_config: Any, dtype: str, max_model_len: int, options: Engine
) -> dict[str, Any]:
    """Arguments on a card that `rollout.vllm` may replace."""
    defaults: dict[str, Any] = {
        # At most what all sequences can hold: vLLM's warm-up spreads such a batch over them.
        "max_num_batched_tokens": min(BATCHED_TOKENS, options.max_num_seqs * max_model_len),
        "hf_overrides": fp32_head(model_config, options),
        # Every request has an adapter, so graphs without one are not needed. (Only vLLM's first
        # model runner heeds this; the second captures both sets.)
        "compilation_config": {"cudagraph_specialize_lora": False},
    }
    # With speculation a batch has more tokens than sequences; your own sizes exclude ours.
    own = {"speculative_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    given = options.vllm | options.vllm.get("compilation_config", {})
    if own.isdisjoint(given):
        sizes = graph_sizes(options.max_num_seqs)
        defaults["compilation_config"]["cudagraph_capture_sizes"] = sizes
    if options.quantization == "bitsandbytes" and dtype == "float16":
        # These layers cast to bfloat16, which compiled graphs cannot do before Ampere.
        defaults["enforce_eager"] = True
    return defaults


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences for which vLLM captures a CUDA graph; it pads a batch between two of
    them. They are 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128 for 128. vLLM's own 35 go on to twice as
    many, which only a batch with prompts has, and take longer to start and more memory.
    """
    doubled = [2**power for power in range(4, 9)]
    between = [size * 3 // 2 for size in doubled]
    sizes = sorted([1, 2, 4, 8, *doubled, *between])
    largest = min(max_num_seqs, 512)  # vLLM's own limit
    return [size for size in sizes if size < largest] + [largest]


def fp32_head(model_config: Any, options: Engine) -> dict[str, str]:
    """Overrides of the model's config on a card: logits in fp32, like the trainer's.

    Rounding logits to bf16 adds a fifth to the gap between engine and trainer
    (benchmarks/README.md). vLLM refuses fp32 for a quantised head. A CPU would cast the head at
    every step, which takes 40 % more time per token.
    """
    # These quantisations leave the head as it is.
    plain_head = options.quantization in (None, "bitsandbytes", "fp8")
    if plain_head and not hasattr(model_config, "quantization_config"):
        return {"head_dtype": "float32"}
    return {}


def vllm_version() -> str:
    """The version of the installed vLLM, or of its CPU build."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def has_device() -> bool:
    """Whether the installed vLLM has a device: it is a CPU build, or torch can use a card. (Torch
    cannot if the driver is older than torch's CUDA.)"""
    import torch

    try:
        for_cpu = "cpu" in version("vllm")
    except PackageNotFoundError:  # the CPU build on PyPI has another name
        for_cpu = True
    return for_cpu or torch.cuda.is_available()


def check_vllm(options: Engine, dtype: str) -> None:
    """Check that the installed vLLM can serve as asked.

    Raises:
        InputError: vLLM needs a plugin, or another dtype.
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
