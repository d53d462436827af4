"""A model from a folder or the Hub: its config, its shapes, its weights."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch

from stapo_lite.errors import InputError, explained
from stapo_lite.model.attention import attention_for

# bitsandbytes warns at every start if it cannot fetch a kernel from the Hub, and then uses its own.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
NO_MODEL = "model={}: not a causal language model in a folder or on the Hub"


def load_model_config(model: str) -> Any:
    """Load the transformers config of a model.

    Raises:
        InputError: there is no such model.
    """
    from transformers import AutoConfig

    with explained(NO_MODEL.format(model)):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


def model_class(config: Any) -> Any:
    """transformers' class of a model.

    The language model of Qwen3.5 is part of a larger model, which also reads images. transformers
    can load it alone, but then its layers have other names than in the checkpoint and in vLLM. vLLM
    silently ignores an adapter with these names (vllm#48019). So this is the larger model's class.

    Args:
        config: the model's transformers config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if config.get_text_config() is config:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def decoder_path(model: Any) -> str:
    """The name of a model's decoder: `model`, or `model.language_model` in a larger model."""
    decoder = model.get_decoder()
    return next(path for path, module in model.named_modules() if module is decoder)


def drop_towers(model: Any) -> Any:
    """Drop all that stands beside the decoder in a larger model, such as what reads images; return
    the model."""
    parent, _, decoder = decoder_path(model).rpartition(".")
    if parent:
        larger = model.get_submodule(parent)
        for name, _ in list(larger.named_children()):
            if name != decoder:
                setattr(larger, name, None)
    return model


def without_weights(config: Any) -> Any:
    """A causal language model on the meta device: shapes only.

    Args:
        config: the model's transformers config.
    """
    with torch.device("meta"):
        return build_model(config)


def build_model(config: Any, **options: Any) -> Any:
    """A causal language model that reads no checkpoint.

    Args:
        config: the model's transformers config.
        options: of transformers' `from_config`.
    """
    with beside_vllm(config):
        return drop_towers(model_class(config).from_config(config, **options))


def load_weights(
    model: str,
    dtype: str,
    device: torch.device | str = "cpu",
    quantization: Literal["nf4"] | None = None,
    whole: bool = False,
) -> Any:
    """Load a causal language model in `dtype`, or in 4 bits (QLoRA, by bitsandbytes with double
    quantisation).

    Args:
        whole: with all that `drop_towers` would drop.

    Raises:
        InputError: the model cannot be loaded, does not fit on the device, or lacks weights.
    """
    from transformers import BitsAndBytesConfig

    device = torch.device(device)
    options: dict[str, Any] = {"dtype": dtype}
    if quantization == "nf4":
        in_4_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
        # Like vLLM, quantise the checkpoint's own values, before anything rounds them to `dtype`.
        options = {"dtype": "auto", "quantization_config": in_4_bits}
    too_large = explained(f"model={model} does not fit on {device}", torch.OutOfMemoryError)
    config = load_model_config(model)
    with explained(NO_MODEL.format(model)), too_large, default_stream(device), beside_vllm(config):
        loaded: Any = model_class(config).from_pretrained(
            model,
            attn_implementation=attention_for(device),
            device_map={"": device},
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    base, report = loaded
    if report["missing_keys"]:
        raise InputError(f"model={model}: its weights lack {min(report['missing_keys'])}")
    if quantization:  # norms, embedding and head still have the checkpoint's dtype
        for parameter in base.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(getattr(torch, dtype))
    return ready(base if whole else drop_towers(base))


def ready(base: Any) -> Any:
    """Override transformers' defaults for a model that has just been built; return the model."""
    for module in base.modules():
        # bitsandbytes would repack the weights in `generate`, and repacked ones have no backward.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    from transformers import GenerationConfig

    # `generate` takes from here what a call does not set: a model's default top-p and top-k would
    # bias the sampled log-probabilities. Padding is never read, so any token will do.
    base.generation_config = GenerationConfig(pad_token_id=0)
    return base


@contextmanager
def beside_vllm(config: Any) -> Iterator[None]:
    """Let transformers build a model in a process that has imported vLLM.

    vLLM serves some families (SmolLM3, OLMo 2 and 3) with transformers' own modules, and patches
    their decoder class for it: every decoder built afterwards asks for vLLM's config, which says
    whether to compile it. Within the context there is a config that says no.

    Args:
        config: the model's transformers config.
    """
    vllm = sys.modules.get("vllm.config")
    if vllm is None:
        yield
        return
    uncompiled: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=0),  # CompilationMode.NONE
        model_config=SimpleNamespace(hf_config=config, max_model_len=0),
    )
    with vllm.set_current_vllm_config(uncompiled):
        yield


@contextmanager
def default_stream(device: torch.device) -> Iterator[None]:
    """Run torch on the card's default stream within the context.

    bitsandbytes always quantises on the default stream. vLLM leaves torch on another stream when it
    closes. A base loaded on that one would be quantised from values that are not there yet.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        yield
    torch.cuda.synchronize(device)
