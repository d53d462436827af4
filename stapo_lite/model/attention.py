"""Attention on cards before Ampere, such as a T4."""

from typing import Any

import torch
from torch import Tensor


def attention_for(device: torch.device) -> str | None:
    """The name of the attention for a device; None for transformers' own choice."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return use_repeated_keys()
    return None


def use_repeated_keys() -> str:
    """Register an SDPA that repeats keys and values for grouped queries; return its name.

    transformers leaves the repetition to torch. Torch's fast kernels do not support it on cards
    before Ampere (T4, RTX 20), and its slow kernel holds [rows, heads, length, length] in memory.
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
    keys = repeat_kv(key, groups)
    values = repeat_kv(value, groups)
    no_module: Any = None  # a module would make transformers repeat the keys a second time
    return sdpa_attention_forward(no_module, query, keys, values, *mask, **options)
