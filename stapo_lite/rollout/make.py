"""Which engine a run has, and how it is made."""

import importlib.util

from stapo_lite.config import Config, Engine
from stapo_lite.errors import InputError
from stapo_lite.rollout.engine import RolloutEngine, RolloutSettings


def resolve_engine(name: str) -> str:
    """The engine that a name stands for: `auto` is `vllm` if vLLM is installed and has a device,
    else `transformers`. (`server` needs no vLLM on this machine.)

    Raises:
        InputError: the name is `vllm`, which is not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not installed:
        raise InputError(
            "rollout.engine=vllm: vLLM is not installed; install it, or set "
            "rollout.engine=transformers"
        )
    if name == "auto":
        from stapo_lite.rollout.vllm_options import has_device

        if installed and has_device():
            return "vllm"
        return "transformers"
    return name


def check_options(name: str, options: Engine, dtype: str) -> None:
    """Check before any weights are loaded that an engine can do what is asked of it.

    Raises:
        InputError: the engine cannot.
    """
    if name == "vllm":
        from stapo_lite.rollout.vllm_options import check_vllm, prepare_vllm

        prepare_vllm()
        check_vllm(options, dtype)
    elif name == "transformers" and options.quantization:
        raise InputError(
            f"rollout.quantization={options.quantization} needs vLLM; the transformers engine "
            "samples from the trainer's own model"
        )


def rollout_settings(config: Config, stop_tokens: tuple[int, ...]) -> RolloutSettings:
    """The sampling settings of a training run."""
    rollout = config.rollout
    return RolloutSettings(
        num_generations=rollout.num_generations,
        max_model_len=config.max_sequence_length,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        stop_token_ids=stop_tokens,
    )


def start_vllm(config: Config, sampling: RolloutSettings, share: float | None) -> RolloutEngine:
    """Start vLLM in this process, for a training run.

    Args:
        share: vLLM's part of the card's memory; None without a card.

    Raises:
        InputError: vLLM does not start.
    """
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    options = config.rollout.model_copy(update={"gpu_memory_utilization": share})
    return VLLMEngine(
        config.model, config.dtype, sampling, options, config.lora, config.may_share_base
    )
