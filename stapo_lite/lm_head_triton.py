"""A tile of logits folded into the running sums by one Triton kernel: two reads and one write, where torch takes ten
passes over the tile. The matrix products stay with `lm_head.py`.

Runs on CUDA, and on a CPU through Triton's interpreter (`TRITON_INTERPRET=1`, set before Triton is imported).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stapo_lite.lm_head import Running


def fold(logits: Tensor, local: Tensor, running: Running, dtype: torch.dtype | None) -> tuple[Tensor | None, Tensor]:
    """`lm_head.fold` by Triton; the logits are left as they are."""
    rows, width = logits.shape
    scale = torch.empty_like(running.m)
    exponentials = None if dtype is None else torch.empty_like(logits, dtype=dtype)
    outputs = logits if exponentials is None else exponentials
    _kernel[(rows,)](logits, local, *running, scale, outputs, width, WRITE=exponentials is not None, BLOCK=1024)
    return exponentials, scale


@triton.jit
def _kernel(
    logits, local, m, s, shifted, squares, target_logit, scale, exponentials, width,
    WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token per program. Sums run in BLOCK lanes and are added in pairs at the end."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    tile = logits + row * width

    top = tl.full((BLOCK,), -1e30, tl.float32)
    for start in range(0, width, BLOCK):
        top = tl.maximum(top, tl.load(tile + start + column, mask=start + column < width, other=-1e30))
    before = tl.load(m + row)
    higher = tl.maximum(before, tl.max(top, axis=0))

    sum_0 = tl.zeros((BLOCK,), tl.float32)
    sum_1 = tl.zeros((BLOCK,), tl.float32)
    sum_2 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        a = tl.load(tile + start + column, mask=inside, other=-1e30) - higher
        e = tl.exp(a)
        sum_0 += e
        sum_1 += e * a
        sum_2 += e * e
        if WRITE:
            out = exponentials + row * width + start + column
            tl.store(out, e.to(exponentials.dtype.element_ty), mask=inside)

    factor = tl.exp(before - higher)
    old = tl.load(s + row)
    tl.store(shifted + row, factor * (tl.load(shifted + row) + old * (before - higher)) + tl.sum(sum_1, axis=0))
    tl.store(squares + row, factor * factor * tl.load(squares + row) + tl.sum(sum_2, axis=0))
    tl.store(s + row, factor * old + tl.sum(sum_0, axis=0))
    tl.store(m + row, higher)
    tl.store(scale + row, factor)
    target = tl.load(local + row)
    if (target >= 0) & (target < width):
        tl.store(target_logit + row, tl.load(tile + target))
