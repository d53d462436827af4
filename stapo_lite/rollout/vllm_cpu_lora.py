"""CPU only: vLLM's LoRA layers as two matrix products per adapter instead of one gather per token.

vLLM's CPU fallback copies the adapter's weights once for each token. This takes several times as
long as the model itself, and orders of magnitude longer in prefill. GPUs have kernels of
their own. vLLM's worker imports this module for `WorkerExtension`; the import replaces
`PunicaWrapperCPU.add_lora_linear` (vLLM 0.32's signature).
"""

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def _add_lora_linear(
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """y[:, slice] += scale * x A^T B^T for the rows of each adapter slot.

    Args:
        y: [rows, sum of output_slices], changed in place.
        x: [rows, in].
        lora_a_stacked, lora_b_stacked: per slice [slots, 1, r, in] and [slots, 1, out, r].
    """
    x = x.view(-1, x.shape[-1])
    y = y.view(-1, y.shape[-1])
    slots = self.token_lora_indices[: len(x)]
    for slot in slots.unique().tolist():
        if slot < 0:  # rows of the base model
            continue
        rows = (slots == slot).nonzero().flatten()
        whole = len(rows) == len(x)  # the usual case; up to a third faster without indices
        inputs = x if whole else x[rows]
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            update = (inputs @ a[slot, 0].T) @ b[slot, 0].T
            target = y[:, start : start + width]
            if whole:
                target.add_(update, alpha=scale)
            else:
                target.index_add_(0, rows, update, alpha=scale)
            start += width


class WorkerExtension:
    """Empty; named as `worker_extension_cls` so that vLLM's worker imports this module."""


wrapper: Any = PunicaWrapperCPU
wrapper.add_lora_linear = _add_lora_linear
