"""A base model that uses the rollout engine's weights: one copy in memory for both.

LoRA never changes the base, so trainer and engine may read the same bytes. transformers' model is
built without weights, and each of its parameters becomes a view of the engine's.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from stapo_lite.errors import InputError
from stapo_lite.model.fp8 import FP8Linear
from stapo_lite.model.loading import attention_for, beside_vllm, load_model_config, ready
from stapo_lite.types import BaseWeights, FP8Weight, NF4Weight

ROUNDING_IN_4_BITS = 0.2
"""Largest relative error (Frobenius) allowed for 4-bit weights: twice that of normally distributed
ones."""
ROUNDING_IN_8_BITS = 0.06
"""The same for 8-bit weights."""
COMPARED_AT_ONCE = 1 << 24
"""Values compared at a time, since the engine's cache may leave little memory."""


def base_on(weights: BaseWeights, model: str, dtype: str, device: torch.device) -> Any:
    """Build a causal language model on weights that exist.

    Args:
        weights: on `device`; they are not copied.
        model: folder or Hub name of the checkpoint that they are from.

    Raises:
        InputError: one of the model's parameters has no counterpart of its shape and dtype.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = load_model_config(model)
    # Buffers, such as rotary frequencies, are in no checkpoint and must be computed.
    with beside_vllm(config), init_empty_weights(include_buffers=False):
        base: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention_for(device)
        )
    for path, module in list(base.named_modules()):
        weight = weights.get(f"{path}.weight")
        if isinstance(module, nn.Linear) and isinstance(weight, NF4Weight):
            base.set_submodule(path, linear_4bit(module, weight))
            base.is_loaded_in_4bit = True  # transformers' flag, which PEFT reads
        elif isinstance(module, nn.Linear) and isinstance(weight, FP8Weight):
            base.set_submodule(path, FP8Linear(module, weight))
    tied = base.get_output_embeddings() if config.get_text_config().tie_word_embeddings else None
    for path, module in base.named_modules():
        if module is not tied:
            take_weights(path, module, weights)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    base.tie_weights()
    return ready(base)


def take_weights(path: str, module: Any, weights: BaseWeights) -> None:
    """Replace a module's own parameters with views of the engine's weights.

    Raises:
        InputError: one has no counterpart.
    """
    for kind, empty in list(module.named_parameters(recurse=False)):
        name = f"{path}.{kind}"
        weight = weights.get(name)
        if not empty.is_meta:  # a quantised layer was made with its weight
            continue
        there = "no such weight"
        if isinstance(weight, Tensor):
            there = f"one of {list(weight.shape)} in {weight.dtype}"
            if (weight.shape, weight.dtype) == (empty.shape, empty.dtype):
                module.register_parameter(kind, nn.Parameter(weight, requires_grad=False))
                continue
        raise InputError(
            f"{name} is {list(empty.shape)} in {empty.dtype}, and the engine has {there}"
        )


def linear_4bit(linear: nn.Linear, weight: NF4Weight) -> Any:
    """bitsandbytes' layer in place of a linear one, whose bias it takes over."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    state = weight.state
    layer = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=linear.weight.dtype,
        quant_type=state.quant_type,
        device="meta",
    )
    layer.bias = linear.bias
    layer.quant_state = state
    layer.weight = Params4bit(
        weight.packed,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        bnb_quantized=True,
        module=layer,
    )
    return layer


@torch.no_grad()
def check_weights(base: Any, model: str) -> None:
    """Compare each weight with the checkpoint's file, which is read part by part.

    Raises:
        InputError: one is not there, or differs.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, allow_patterns="*.safetensors"))
    missing = dict(base.named_parameters())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in missing.keys() & set(file.keys()):
                layer = base.get_submodule(name.rpartition(".")[0])
                check_weight(name, layer, missing.pop(name), file.get_slice(name))
    if missing:
        raise InputError(f"the checkpoint's files do not hold {min(missing)}")


def check_weight(name: str, layer: Any, parameter: Any, stored: Any) -> None:
    """Compare a parameter with its values in a file.

    Args:
        stored: safetensors' slice.

    Raises:
        InputError: they differ; for a quantised weight, by more than rounding explains.
    """
    values, allowed = parameter.data, 0.0
    in_8_bits = isinstance(layer, FP8Linear) and parameter is layer.weight
    if in_8_bits:
        allowed = ROUNDING_IN_8_BITS
    elif hasattr(parameter, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        values, allowed = dequantize_4bit(values, parameter.quant_state), ROUNDING_IN_4_BITS
    if list(values.shape) != stored.get_shape():
        raise InputError(f"{name} is {list(values.shape)}, and {stored.get_shape()} in the file")
    rows = max(1, COMPARED_AT_ONCE * len(values) // values.numel())
    difference = norm = 0.0
    for start in range(0, len(values), rows):
        some = slice(start, start + rows)
        part: Tensor = layer.dequantised(some) if in_8_bits else values[some]
        expected = stored[some].to(part)
        difference += (part - expected).float().square().sum().item()
        norm += expected.float().square().sum().item()
    if not difference <= allowed**2 * norm:  # also catches NaN
        raise InputError(f"{name} in the engine differs from the checkpoint's file")
