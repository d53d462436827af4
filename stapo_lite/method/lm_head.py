"""Log-probability, entropy and collision probability from hidden states, without ever holding all
[tokens, vocab] logits.

With a frozen head W, a token's log-probability is one number, so its gradient with respect to the
hidden state is one vector, known as soon as the softmax is:

    d log pi(y) / d h = (W[y] - sum_v p_v W_v) / T

The sum is formed in the forward pass by the online softmax of flash attention (hidden states as
queries, rows of W as both keys and values). This takes two matrix products in total, and the
backward pass only scales rows; recomputing the logits there would take three. The entropy's
gradient comes out of the same sweep. The head itself is never trained.

Logits are accumulated in fp32: rounding them to bf16 changes a probability near tau_p by a few
percent.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stapo_lite.types import TokenStatistics

TILE = 128
"""Row and column counts of a tile of logits are multiples of this."""


class Head(NamedTuple):
    """The frozen LM head: logits = (hidden W^T + bias) / temperature. In the functions below,
    `hidden` is [n, D], `targets` [n], and `v` the maximum number of weight rows in a tile."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    temperature: float = 1.0
    memory_bytes: int = 256 << 20
    """Workspace; sets the chunk sizes."""


def token_statistics(
    hidden: Tensor, head: Head, targets: Tensor, differentiable_entropy: bool = False
) -> TokenStatistics:
    """Statistics of softmax((hidden W^T + bias) / temperature) for each token.

    Args:
        hidden: [n, D] fp32, bf16 or fp16; row i predicts `targets[i]`.
        head: its weight is of the dtype of `hidden`, tied or not.
        targets: [n] int64 in [0, V).
        differentiable_entropy: give entropy a gradient too, for a third product.

    Returns:
        TokenStatistics of [n] fp32. Gradients flow to `hidden` from `logprobs`, and with
        `differentiable_entropy` from `entropy`.

    Raises:
        ValueError: the head requires a gradient.
    """
    if head.weight.requires_grad or (head.bias is not None and head.bias.requires_grad):
        raise ValueError(
            "the head is frozen here, and gets no gradient: set its requires_grad to False"
        )
    if not torch.is_grad_enabled():
        hidden = hidden.detach()  # then only the first product runs
    # autocast would round to bf16
    with torch.autocast(hidden.device.type, enabled=False), _bf16_products(head.weight):
        values = _FrozenHead.apply(hidden, head, targets, differentiable_entropy)
        return TokenStatistics(*values)


@torch.no_grad()
def top_tokens(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of a few hidden states, the most probable first. Arguments are as
    in `token_statistics`, but all logits are in memory, [n, V] fp32.

    Returns:
        ids [n, k] int64, and their probabilities at the temperature, [n, k] fp32.
    """
    _, v = chunk_sizes(len(hidden), head)
    with torch.autocast(hidden.device.type, enabled=False), _bf16_products(head.weight):
        logits = torch.cat([part.clone() for *_, part in _logit_tiles(hidden, head, v)], 1)
    best = logits.softmax(1).topk(k)
    return best.indices, best.values


def chunk_sizes(tokens: int, head: Head, count: int = 1) -> tuple[int, int]:
    """Rows of hidden and of weight per tile, so that the fp32 workspace stays within the budget.

    The workspace of a tile of n tokens x v vocabulary rows: logits and exponentials (2 n v), a copy
    of the hidden states and `count` running sums of rows ((1 + count) n D), and what the product
    needs in its own type: the rows on a CPU, the exponentials on a GPU (at most v D). With many
    tokens, square tiles use it best. Sizes are multiples of 128 unless everything fits, since
    cuBLAS has fast kernels only for such leading dimensions. A budget smaller than one such tile is
    exceeded.
    """
    vocabulary, width = head.weight.shape
    floats = head.memory_bytes / 4
    # A square tile, n = v, takes 2 n^2 + wide n numbers: solve for n.
    wide = (2 + count) * width
    square = (math.sqrt(wide**2 + 8 * floats) - wide) / 4
    n = min(tokens, _tile(square))
    # With that n, as many columns as still fit: few tokens leave room for more of them.
    v = min(vocabulary, _tile((floats - (wide - width) * n) / (2 * n + width)))
    return max(1, n), v


def _tile(size: float) -> int:
    return max(TILE, int(size) // TILE * TILE)


class _FrozenHead(torch.autograd.Function):
    """Log-probability, and entropy if asked, get a gradient with respect to hidden, computed in
    forward: with E[W] = sum_v p_v W_v

        d log pi(y) / d h = (W[y] - E[W]) / T
        d H / d h         = sum_v p_v (E[W] - W_v) log p_v / T
    """

    @staticmethod
    def forward(ctx: Any, hidden, head, targets, with_entropy):
        # Gradients: of the log-probability, and of the entropy if asked.
        count = 2 if with_entropy else 1
        n, v = chunk_sizes(len(hidden), head, count)
        if not ctx.needs_input_grad[0]:
            count = 0
        statistics = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        gradients = hidden.new_empty(count, *hidden.shape)
        for start in range(0, len(hidden), n):
            rows = slice(start, start + n)
            part, sums = _sweep(hidden[rows], head, targets[rows], v, count)
            statistics[:, rows] = part
            gradients[:, rows] = sums.div_(head.temperature)
        ctx.save_for_backward(gradients)
        logprobs, entropy, collision = statistics.unbind()
        ctx.mark_non_differentiable(collision)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy, collision)
        return logprobs, entropy, collision

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        # The chain rule: what the loss asks of each token, times what the forward pass has found.
        (of_statistics,) = ctx.saved_tensors
        d_hidden = torch.zeros_like(of_statistics[0])
        for of_statistic, gradient in zip(of_statistics, gradients, strict=False):
            d_hidden.addcmul_(of_statistic, gradient[:, None])
        return d_hidden, None, None, None


def _sweep(hidden, head, targets, v, count: int):
    """One pass over the vocabulary: the online softmax.

    Returns:
        Log-probability, entropy and collision probability, [3, n] fp32; and T times the gradients
        of the first `count` of them with respect to hidden, [count, n, D] fp32.
    """
    # The largest logit a so far. It starts finite, so that 0 * (m - higher) is 0.
    m = torch.full(targets.shape, -1e30, device=hidden.device)
    # Over the columns so far: sum e^(a-m), sum e^(a-m) (a-m), sum e^(2(a-m)), the target's logit.
    s, shifted, squares, target_logit = torch.zeros(4, len(hidden), device=hidden.device)
    # sum e^(a-m) W and sum e^(a-m) (a-m) W
    sums = torch.zeros(count, *hidden.shape, device=hidden.device)
    for columns, tile, logits in _logit_tiles(hidden, head, v):
        # Pick the target's logit from the one tile that has it.
        local = (targets - columns.start)[:, None]
        column = local.clamp(0, len(tile) - 1)
        here = logits.gather(1, column)[:, 0]
        target_logit = torch.where((column == local)[:, 0], here, target_logit)
        # A larger maximum scales all sums so far down. Exponents never exceed 0, so that nothing
        # overflows.
        higher = torch.maximum(m, logits.amax(1))
        moved = m - higher
        scale = torch.exp(moved)
        logits -= higher[:, None]
        exponentials = logits.exp()
        weighted = logits.mul_(exponentials)
        # torch.sum adds pairwise; a BLAS dot product over 150,000 columns would have 60 times the
        # error.
        shifted = scale * (shifted + s * moved) + weighted.sum(1)
        if count == 2:
            sums[1].addcmul_(moved[:, None], sums[0])
            _add_product(weighted.to(tile.dtype), tile, sums[1], scale)
        # The norm reads the tile once. Products would be written first, and read again.
        norm = torch.linalg.vector_norm(exponentials, dim=1)
        squares = scale.square() * squares + norm.square()
        s = scale * s + exponentials.sum(1)
        m = higher
        if count:
            _add_product(exponentials.to(tile.dtype), tile, sums[0], scale)
        del exponentials  # its memory serves the next tile
    # From sums to expectations: divide by the softmax's denominator.
    log_s = s.log()
    sums /= s[:, None]
    if count == 2:
        sums[1].neg_().addcmul_((shifted / s)[:, None], sums[0])
    if count:
        sums[0].neg_().add_(head.weight[targets])
    entropy = log_s - shifted / s
    return torch.stack([target_logit - (m + log_s), entropy, squares / s**2]), sums


def _logit_tiles(hidden, head, v) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(columns, their rows of weight, logits [n, v] fp32) over the vocabulary. The last tile may be
    narrower. Each overwrites the one before in memory."""
    if not head.weight.is_cuda:
        hidden = hidden.float()
    buffer = hidden.new_empty(len(hidden) * v, dtype=torch.float32)
    for columns, tile in _weight_tiles(head.weight, v):
        logits = buffer[: len(hidden) * len(tile)].view(len(hidden), len(tile))
        _product(hidden, tile.T, logits)
        if head.bias is not None:
            logits += head.bias[columns]
        if head.temperature != 1:
            logits /= head.temperature
        yield columns, tile, logits


def _weight_tiles(weight, v) -> Iterator[tuple[slice, Tensor]]:
    """(columns, their rows of weight), at most v at a time.

    The CPU rounds a half-precision product to its operands' type, so there the rows are fp32
    copies, each overwriting the one before.
    """
    copy = None
    if not weight.is_cuda and weight.dtype != torch.float32:
        copy = torch.empty(v, weight.shape[1])
    for start in range(0, len(weight), v):
        tile = weight[start : start + v]
        if copy is not None:
            tile = copy[: len(tile)].copy_(tile)
        yield slice(start, start + len(tile)), tile


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b in fp32, from fp32 or (CUDA only) half-precision operands."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def _add_product(a: Tensor, b: Tensor, out: Tensor, scale: Tensor) -> None:
    """out = scale * out + a @ b in fp32, from operands as in `_product`.

    Args:
        scale: of each row of `out`.
    """
    out *= scale[:, None]
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


@contextmanager
def _bf16_products(weight: Tensor) -> Iterator[None]:
    """Let a CPU multiply the fp32 copies of bf16 values in its bf16 units, which accumulate in
    fp32: nothing is lost, and it is three times as fast. The exponentials are rounded to bf16, as
    on a GPU."""
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    if weight.dtype == torch.bfloat16 and not weight.is_cuda:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
