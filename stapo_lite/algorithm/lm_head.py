"""Log-probability, entropy and collision probability from hidden states, never holding [tokens, vocab].

With a frozen head W, a token's log-probability is one number, so its gradient with respect to the
hidden state is one vector, known as soon as the softmax is:

    d log pi(y) / d h = (W[y] - sum_v p_v W_v) / T

The sum is formed in the forward pass by the online softmax of flash attention (hidden states as
queries, rows of W as both keys and values). Two matrix products in all, and a backward pass that only
scales rows; recomputing the logits in the backward pass takes three. Where entropy needs a gradient, the
logits of a few tokens at a time are computed again in the backward pass. The head itself is never trained.

Logits are accumulated in fp32: rounding them to bf16 changes a probability near tau_p by some per cent.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stapo_lite.types import TokenStatistics

TILE = 128
"""The numbers of rows and columns of a tile of logits are multiples of this."""
DENSE_COPIES = 6
"""Values per token and vocabulary entry that are in memory at a time if entropy has a gradient."""


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    memory_bytes: int = 256 << 20,
    differentiable_entropy: bool = False,
) -> TokenStatistics:
    """Statistics of softmax((hidden W^T + bias) / temperature) for each token.

    Args:
        hidden: [N, D] fp32, bf16 or fp16; row n predicts `targets[n]`.
        weight: [V, D], the dtype of `hidden`; the rows of the LM head, tied or not.
        targets: [N] int64 in [0, V).
        bias: [V] or None.
        temperature: the sampling temperature, > 0.
        memory_bytes: workspace, from which the chunk sizes follow.
        differentiable_entropy: give entropy and collision probability a gradient too.

    Returns:
        TokenStatistics of [N] fp32. Gradients flow to `hidden`, from `logprobs` or with `differentiable_entropy` from
        all three.

    Raises:
        ValueError: the shapes do not fit together, hidden and weight differ in dtype, or the head requires a gradient.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"need hidden [N, D], weight [V, D], targets [N]; got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)}, {tuple(targets.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}: cast one")
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("the head is frozen here, and gets no gradient: set its requires_grad to False")
    if not torch.is_grad_enabled():
        hidden = hidden.detach()  # then only the first product runs
    arguments = (hidden, weight, bias, targets, temperature, memory_bytes)
    with torch.autocast(hidden.device.type, enabled=False):  # which would round to bf16
        if differentiable_entropy and hidden.requires_grad:
            return _differentiable(*arguments)
        with _bf16_products(weight):
            return TokenStatistics(*_FrozenHead.apply(*arguments))


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    memory_bytes: int = 256 << 20,
) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of a few hidden states, the most probable first; arguments as in `token_statistics`.

    Unlike there, all logits are in memory, [N, V] fp32.

    Returns:
        ids [N, k] int64, and their probabilities at the temperature, [N, k] fp32.
    """
    _, v = chunk_sizes(len(hidden), len(weight), weight.shape[1], memory_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        best = _all_logits(hidden, weight, bias, temperature, v).softmax(1).topk(k)
    return best.indices, best.values


def chunk_sizes(tokens: int, vocabulary: int, width: int, memory_bytes: int) -> tuple[int, int]:
    """Rows of hidden and of weight per tile, so that the fp32 workspace stays within the budget.

    The workspace of a tile of n tokens x v vocabulary rows: logits and exponentials (2 n v), the running
    expectation and a copy of the hidden states (2 n D), and what the product needs in its own type: the rows
    on a CPU, the exponentials on a GPU (at most v D). Square tiles are the best use of it when tokens are plenty.
    Where they are cut, they are multiples of 128: other leading dimensions keep cuBLAS from its fast kernels. A budget
    smaller than one such tile is exceeded.
    """
    floats = memory_bytes / 4
    square = (math.sqrt(9 * width**2 + 8 * floats) - 3 * width) / 4  # 2 n^2 + 3 n D = floats
    n = min(tokens, _tile(square))
    v = min(vocabulary, _tile((floats - 2 * n * width) / (2 * n + width)))
    return max(1, n), v


def _tile(size: float) -> int:
    return max(TILE, int(size) // TILE * TILE)


class _FrozenHead(torch.autograd.Function):
    """Gradient from log-probability to hidden only, formed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, temperature, memory_bytes):
        want_gradient = ctx.needs_input_grad[0]
        n, v = chunk_sizes(len(hidden), len(weight), weight.shape[1], memory_bytes)
        statistics = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        direction = torch.empty_like(hidden) if want_gradient else None
        for start in range(0, len(hidden), n):
            rows = slice(start, start + n)
            part, expected = _sweep(hidden[rows], weight, bias, targets[rows], temperature, v, want_gradient)
            statistics[:, rows] = part
            if direction is not None:
                torch.sub(weight[targets[rows]], expected, out=expected)
                direction[rows] = expected.div_(temperature)
        ctx.save_for_backward(direction)
        logprobs, entropy, collision, _ = statistics.unbind()
        ctx.mark_non_differentiable(entropy, collision)
        return logprobs, entropy, collision

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        (direction,) = ctx.saved_tensors
        d_hidden = torch.mul(direction, gradients[0][:, None], out=torch.empty_like(direction))
        return d_hidden, None, None, None, None, None


def _differentiable(hidden, weight, bias, targets, temperature, memory_bytes) -> TokenStatistics:
    """Statistics that all have a gradient: of a few tokens at a time, whose logits are computed again in the backward
    pass."""
    n = max(1, memory_bytes // (4 * DENSE_COPIES * len(weight)))
    _, v = chunk_sizes(n, len(weight), weight.shape[1], memory_bytes // DENSE_COPIES)
    chunks = [
        checkpoint(
            _dense_statistics, hidden[start : start + n], weight, bias, targets[start : start + n], temperature, v,
            use_reentrant=False,
        )
        for start in range(0, max(1, len(hidden)), n)
    ]  # fmt: skip
    return TokenStatistics(*map(torch.cat, zip(*chunks, strict=True)))


def _dense_statistics(hidden, weight, bias, targets, temperature, v) -> tuple[Tensor, Tensor, Tensor]:
    log_p = _Logits.apply(hidden, weight, bias, temperature, v).log_softmax(1)
    p = log_p.exp()
    return log_p.gather(1, targets[:, None])[:, 0], -(p * log_p).sum(1), p.square().sum(1)


class _Logits(torch.autograd.Function):
    """All logits, [n, V] fp32; products accumulate in fp32 in both passes."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, temperature, v):
        ctx.save_for_backward(weight)
        ctx.temperature, ctx.tile, ctx.dtype = temperature, v, hidden.dtype
        return _all_logits(hidden, weight, bias, temperature, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        (weight,) = ctx.saved_tensors
        (d_logits,) = gradients
        d_hidden = torch.zeros(len(d_logits), weight.shape[1], device=weight.device)
        with _bf16_products(weight):
            for columns, tile in _weight_tiles(weight, ctx.tile):
                part = d_logits[:, columns] / ctx.temperature
                _product(part.to(tile.dtype), tile, d_hidden, add=True)
        return d_hidden.to(ctx.dtype), None, None, None, None


def _all_logits(hidden, weight, bias, temperature, v) -> Tensor:
    """[n, V] fp32, computed in tiles of v columns."""
    with _bf16_products(weight):
        tiles = [logits.clone() for _, _, logits in _logit_tiles(hidden, weight, bias, temperature, v)]
    return torch.cat(tiles, 1)


def _sweep(hidden, weight, bias, targets, temperature, v, want_expectation: bool):
    """One pass over the vocabulary: the online softmax.

    Returns log-probability, entropy, collision probability and log-normaliser, [4, n] fp32; and the expected row of
    weight, sum_v p_v W_v, [n, D] fp32, or None unless wanted.
    """
    m = torch.full(targets.shape, -1e30, device=hidden.device)  # the largest logit a; finite: 0 * (m - m') stays 0
    # sum e^(a-m), sum e^(a-m) (a-m), sum e^(2(a-m)) over the columns seen so far, and the target's logit.
    s, shifted, squares, target_logit = torch.zeros(4, len(hidden), device=hidden.device)
    expected = torch.zeros_like(hidden, dtype=torch.float32) if want_expectation else None
    for columns, tile, logits in _logit_tiles(hidden, weight, bias, temperature, v):
        column, inside = _locate(targets - columns.start, logits)
        target_logit = torch.where(inside, logits.gather(1, column), target_logit[:, None])[:, 0]
        higher = torch.maximum(m, logits.amax(1))
        scale = torch.exp(m - higher)
        logits -= higher[:, None]
        exponentials = logits.exp()
        # torch's sum adds in pairs: over 150,000 columns a BLAS dot product would be 60 times less exact.
        shifted = scale * (shifted + s * (m - higher)) + logits.mul_(exponentials).sum(1)
        squares = scale.square() * squares + torch.mul(exponentials, exponentials, out=logits).sum(1)
        s = scale * s + exponentials.sum(1)
        m = higher
        if expected is not None:
            expected *= scale[:, None]
            exponentials = exponentials.to(tile.dtype)
            _product(exponentials, tile, expected, add=True)
        del exponentials  # its memory serves the next tile
    log_s = s.log()
    log_normaliser = m + log_s
    if expected is not None:
        expected /= s[:, None]
    entropy = log_s - shifted / s
    return torch.stack([target_logit - log_normaliser, entropy, squares / s**2, log_normaliser]), expected


def _logit_tiles(hidden, weight, bias, temperature, v) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(columns, their rows of weight, logits [n, v] fp32) over the vocabulary; the last tile may be narrower. What is
    yielded lives in the same memory each time."""
    if not weight.is_cuda:
        hidden = hidden.float()
    buffer = hidden.new_empty(len(hidden) * v, dtype=torch.float32)
    for columns, tile in _weight_tiles(weight, v):
        logits = buffer[: len(hidden) * len(tile)].view(len(hidden), len(tile))
        _product(hidden, tile.T, logits, add=False)
        if bias is not None:
            logits += bias[columns]
        yield columns, tile, logits if temperature == 1 else logits.div_(temperature)


def _weight_tiles(weight, v) -> Iterator[tuple[slice, Tensor]]:
    """(columns, their rows of weight), at most v at a time.

    The CPU rounds a half-precision product to its operands' type, so there they are fp32 copies, in the same memory
    each time.
    """
    copy = None
    if not weight.is_cuda and weight.dtype != torch.float32:
        copy = torch.empty(v, weight.shape[1])
    for start in range(0, len(weight), v):
        tile = weight[start : start + v]
        columns = slice(start, start + len(tile))
        yield columns, tile if copy is None else copy[: len(tile)].copy_(tile)


def _locate(local: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each target clamped into the tile, and whether it lies there; both [n, 1]."""
    local, width = local[:, None], logits.shape[1]
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def _product(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """out = a @ b or out += a @ b, in fp32, from fp32 or (CUDA only) half-precision operands."""
    if a.dtype == torch.float32:
        out.addmm_(a, b, beta=float(add))
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


@contextmanager
def _bf16_products(weight: Tensor) -> Iterator[None]:
    """Let a CPU multiply the fp32 copies of bf16 values in its bf16 units, which accumulate in fp32: nothing is lost,
    and it is three times as fast. The exponentials are rounded to bf16, as on a GPU."""
    settings: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (its type stub lacks it)
    before = settings.fp32_precision
    if weight.dtype == torch.bfloat16 and not weight.is_cuda:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
