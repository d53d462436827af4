"""Attention for cards before Ampere, such as a T4."""

from typing import Any

import torch
from torch import Tensor


def attention_for(device: torch.device) -> str | None:
    """The name of the attention for a device; None for transformers' own choice."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return use_repeated_keys()
    return None


def use_repeated_keys() -> str:
    """Register an SDPA that repeats keys and values for grouped queries; returns its name.

    transformers leaves the repetition to torch, but torch's fast kernels for cards before Ampere
    (T4, RTX 20) do not support it. Attention would fall back to a kernel that holds
    [rows, heads, length, length].
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("repeated_keys", _attend_with_repeated_keys)
    AttentionMaskInterface.register("repeated_keys", sdpa_mask)
    return "repeated_keys"


def _attend_with_repeated_keys(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = query.shape[1] // key.shape[1]
    keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
    no_module: Any = None  # a module would tell transformers to repeat them again
    return sdpa_attention_forward(no_module, query, keys, values, *mask, **options)
