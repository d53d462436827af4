"""The weights of a model in vLLM, under the names that transformers gives them.

Nothing is copied: each weight is a view of vLLM's own tensor. vLLM fuses layers that read the same
input: the rows of `qkv_proj` are those of `q_proj`, `k_proj` and `v_proj`, one after the other. The
layouts are those of vLLM 0.31 to 0.33 (vllm/model_executor/layers/linear.py) and of its
bitsandbytes plugin.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from stapo_lite.types import BaseWeights, NF4Weight


def named_weights(model: Any) -> BaseWeights | None:
    """Views of a model's weights, which never change, by the names of transformers' parameters.

    Args:
        model: the `nn.Module` of vLLM's worker; its layers may have adapters around them.

    Returns:
        None if vLLM's CPU build has repacked the weights, which it does in 16 and 32 bits.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    weights: dict[str, Tensor | NF4Weight] = {}
    for path, layer in model.named_modules():
        parent, _, name = path.removesuffix(".base_layer").rpartition(".")
        parts = packed.get(name, [name])
        for kind, parameter in layer.named_parameters(recurse=False):
            if not parameter.numel():
                return None
            views = split(layer, parameter, len(parts))
            if len(views) != len(parts):
                continue  # unknown layout: `take_weights` reports the missing name
            for part, view in zip(parts, views, strict=True):
                weights[transformers_name(f"{parent}.{part}.{kind}".removeprefix("."))] = view
    return weights


def transformers_name(name: str) -> str:
    """The name of a weight in transformers. Of a larger model, vLLM keeps the language model
    together: `language_model.model.norm.weight` for `model.language_model.norm.weight`, and
    `language_model.lm_head.weight` for `lm_head.weight`."""
    name = name.replace("language_model.model.", "model.language_model.")
    return name.removeprefix("language_model.")


def split(layer: Any, parameter: Any, parts: int) -> Sequence[Tensor | NF4Weight]:
    """Views of the weights of the layers that one vLLM layer fuses; a single view of all rows if
    their sizes are unknown."""
    if hasattr(parameter, "bnb_quant_state"):
        ranges = pairwise(map(int, parameter.bnb_shard_offsets))
        return [
            NF4Weight(parameter.data[start:end], parameter.bnb_quant_state[part])
            for part, (start, end) in enumerate(ranges)
        ]
    if hasattr(layer, "_cpu_unpacked_conv_weight"):  # a CPU's kernel has another layout
        return [layer._cpu_unpacked_conv_weight.unsqueeze(1)]
    if hasattr(layer, "org_vocab_size"):  # an embedding or a head, padded with further rows
        return [parameter.data[: layer.org_vocab_size]]
    sizes = list(getattr(layer, "output_sizes", []))
    if parts == 1 or sum(sizes) != len(parameter):
        return [parameter.data]
    # Of Qwen3.5's queries, keys, values and gates, transformers fuses all but the last.
    fused = len(sizes) - parts + 1
    return parameter.data.split([sum(sizes[:fused]), *sizes[fused:]])
