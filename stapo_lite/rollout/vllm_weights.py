"""The weights of a model in vLLM, under the names that transformers gives them.

Nothing is copied: each is a view of vLLM's own tensor. vLLM fuses layers that read the same input:
the rows of `qkv_proj` are those of `q_proj`, `k_proj` and `v_proj`, one after the other. Layouts as
in vLLM 0.31 to 0.33 (vllm/model_executor/layers/linear.py) and in its bitsandbytes plugin.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stapo_lite.types import BaseWeights, FP8Weight, NF4Weight


def named_weights(model: Any) -> BaseWeights | None:
    """Views of a model's weights, which never change, by the names of transformers' parameters.

    Args:
        model: the `nn.Module` of vLLM's worker; its layers may have adapters around them.

    Returns:
        None if vLLM's CPU build has repacked the weights, as it does in 16 and 32 bits.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Tensor | NF4Weight | FP8Weight] = {}
    for path, layer in model.named_modules():
        parent, _, name = path.removesuffix(".base_layer").rpartition(".")
        parts = packed.get(name, [name])
        for kind, parameter in layer.named_parameters(recurse=False):
            if not parameter.numel():
                return None
            if kind == "weight_scale":  # comes with its weight
                continue
            weights = split(layer, parameter, len(parts))
            if len(weights) != len(parts):
                continue  # unknown layout: `take_weights` reports the missing name
            for part, weight in zip(parts, weights, strict=True):
                found[f"{parent}.{part}.{kind}".removeprefix(".")] = weight
    return found


def split(layer: Any, parameter: Any, parts: int) -> Sequence[Tensor | NF4Weight | FP8Weight]:
    """Views of the weights of the layers that one vLLM layer fuses."""
    if hasattr(parameter, "bnb_quant_state"):
        offsets, states = parameter.bnb_shard_offsets, parameter.bnb_quant_state
        ranges = pairwise(map(int, offsets))
        return [
            NF4Weight(parameter.data[start:end], states[part])
            for part, (start, end) in enumerate(ranges)
        ]
    if parameter.dtype == torch.float8_e4m3fn:
        return split_fp8(layer, parameter, parts)
    if hasattr(layer, "org_vocab_size"):  # an embedding or a head: the rows after these pad it
        return [parameter.data[: layer.org_vocab_size]]
    return parameter.data.split(row_counts(layer, parameter.data, parts))


def row_counts(layer: Any, values: Tensor, parts: int) -> list[int]:
    """Rows of each part of a fused layer; one part with all rows if the layer gives no sizes."""
    sizes = getattr(layer, "output_sizes", [])
    return list(sizes) if parts > 1 and sum(sizes) == len(values) else [len(values)]


def split_fp8(layer: Any, parameter: Any, parts: int) -> list[FP8Weight]:
    """Like `split`, for a weight that vLLM rounded to fp8, [in, out], with one scale, [1], or one
    per output, [out, 1] (vllm/model_executor/layers/quantization/online/fp8.py)."""
    values, scale = parameter.data.T, getattr(layer, "weight_scale", None)
    if scale is None or scale.numel() not in (1, len(values)):
        return []  # scales of blocks: the checkpoint was already quantised
    scale = scale.data
    sizes = row_counts(layer, values, parts)
    scales = [scale] * len(sizes) if scale.numel() == 1 else scale.split(sizes)
    return [FP8Weight(*part) for part in zip(values.split(sizes), scales, strict=True)]
