"""A base model on the rollout engine's weights: one copy in memory for trainer and engine.

LoRA never changes the base, so both may read the same bytes. transformers' model is built without
weights, and each of its parameters becomes a view of the engine's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from stapo_lite.errors import InputError
from stapo_lite.model.attention import attention_for
from stapo_lite.model.loading import build_model, load_model_config, ready
from stapo_lite.types import BaseWeights, NF4Weight


def base_on(weights: BaseWeights, model: str, dtype: str, device: torch.device) -> Any:
    """Build a causal language model on weights that are in memory.

    Args:
        weights: on `device`; they are not copied.
        model: folder or Hub name of the checkpoint that the weights are from.

    Raises:
        InputError: one of the model's parameters has no counterpart of its shape and dtype.
    """
    from accelerate import init_empty_weights

    config = load_model_config(model)
    # 1. A model without weights. Its buffers, such as rotary frequencies, are in no checkpoint, so
    #    they are computed.
    with init_empty_weights(include_buffers=False):
        base = build_model(
            config, dtype=getattr(torch, dtype), attn_implementation=attention_for(device)
        )
    # 2. Layers in 4 bits become bitsandbytes' layers, with their weights.
    for path, module in list(base.named_modules()):
        weight = weights.get(f"{path}.weight")
        if isinstance(module, nn.Linear) and isinstance(weight, NF4Weight):
            base.set_submodule(path, linear_4bit(module, weight))
            base.is_loaded_in_4bit = True  # transformers' flag, which PEFT reads
    # 3. All other parameters become views. A tied head has none of its own.
    tied = base.get_output_embeddings() if base.config.tie_word_embeddings else None
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
        InputError: a parameter has no counterpart.
    """
    for kind, empty in list(module.named_parameters(recurse=False)):
        if not empty.is_meta:  # a layer in 4 bits was made with its weight
            continue
        name = f"{path}.{kind}"
        weight = weights.get(name)
        counterpart = "no such weight"
        if isinstance(weight, Tensor):
            # vLLM has some of Qwen3.5's in float32, in which transformers computes with them.
            if weight.shape == empty.shape and weight.dtype in (empty.dtype, torch.float32):
                module.register_parameter(kind, nn.Parameter(weight, requires_grad=False))
                continue
            counterpart = f"one of {list(weight.shape)} in {weight.dtype}"
        raise InputError(
            f"{name} is {list(empty.shape)} in {empty.dtype}, and the engine has {counterpart}"
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
