"""Log-probability, entropy and collision probability from hidden states, never holding [tokens, vocab].

With a frozen head W, a token's log-probability is one number, so its gradient with respect to the
hidden state is one vector, known as soon as the softmax is:

    d log pi(y) / d h = (W[y] - sum_v p_v W_v) / T

The sum is formed in the forward pass by the online softmax of flash attention (hidden states as
queries, rows of W as both keys and values). Two matrix products in all, and a backward pass that only
scales rows; recomputing the logits in the backward pass takes three. Where the head is trained, or
entropy needs a gradient, the recomputing path below does the same sweep.

Logits are accumulated in fp32: rounding them to bf16 moves a probability near tau_p by per cents.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stapo_lite.types import TokenStatistics


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
        TokenStatistics of [N] fp32. Gradients flow from `logprobs` to `hidden`; and from all three to
        hidden, weight and bias where the head is trained or `differentiable_entropy` is set.

    Raises:
        ValueError: the shapes do not fit together, or hidden and weight differ in dtype.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"need hidden [N, D], weight [V, D], targets [N]; got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)}, {tuple(targets.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}: cast one")
    head_is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not torch.is_grad_enabled():
        hidden = hidden.detach()  # then only the first product runs
    head = _RecomputedHead if head_is_trained or differentiable_entropy else _FrozenHead
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the fp32 products
        return TokenStatistics(*head.apply(hidden, weight, bias, targets, temperature, memory_bytes))


def chunk_sizes(tokens: int, vocabulary: int, width: int, memory_bytes: int) -> tuple[int, int]:
    """Rows of hidden and of weight per tile, so that the fp32 workspace stays within the budget.

    The workspace of a tile of n tokens x v vocabulary rows: logits and exponentials (2 n v), the
    running expectation (n D) and, where the product needs one, an fp32 copy of the rows (v D).
    Square tiles are the best use of it when tokens are plenty.
    """
    floats = memory_bytes / 4
    square = (math.sqrt(width**2 + 2 * floats) - width) / 2  # 2 n^2 + 2 n D = floats
    n = max(1, min(tokens, int(square)))
    v = max(1, min(vocabulary, int((floats - n * width) / (2 * n + width))))
    return n, v


class _FrozenHead(torch.autograd.Function):
    """Gradient from log-probability to hidden only, formed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, temperature, memory_bytes):
        want_gradient = ctx.needs_input_grad[0]
        n, v = chunk_sizes(len(hidden), len(weight), weight.shape[1], memory_bytes)
        statistics = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        direction = torch.empty_like(hidden) if want_gradient else None
        for start in range(0, len(hidden), n):
            rows = slice(start, start + n)
            *chunk, _, expected = _sweep(hidden[rows], weight, bias, targets[rows], temperature, v, want_gradient)
            statistics[:, rows] = torch.stack(chunk)
            if direction is not None:
                direction[rows] = (weight[targets[rows]].float() - expected) / temperature
        ctx.save_for_backward(direction)
        logprobs, entropy, collision = statistics.unbind()
        ctx.mark_non_differentiable(entropy, collision)
        return logprobs, entropy, collision

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        (direction,) = ctx.saved_tensors
        return (gradients[0][:, None] * direction).to(direction.dtype), None, None, None, None, None


class _RecomputedHead(torch.autograd.Function):
    """Gradients from all statistics to hidden, weight and bias; logits recomputed tile by tile.

    With p the softmax of the logits a:  d log p_y / da = 1[y] - p;  dH / da = -p (log p + H);
    d(sum p^2) / da = 2 p (p - sum p^2).
    """

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, temperature, memory_bytes):
        n, v = chunk_sizes(len(hidden), len(weight), weight.shape[1], memory_bytes // 3)  # backward holds more
        outputs = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), n):
            rows = slice(start, start + n)
            *chunk, _ = _sweep(hidden[rows], weight, bias, targets[rows], temperature, v, want_expectation=False)
            outputs[:, rows] = torch.stack(chunk)
        ctx.save_for_backward(hidden, weight, bias, targets, outputs)
        ctx.temperature, ctx.tile = temperature, (n, v)
        logprobs, entropy, collision, _ = outputs.unbind()
        return logprobs, entropy, collision

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        hidden, weight, bias, targets, outputs = ctx.saved_tensors
        n, v = ctx.tile
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(hidden), n):
            rows = slice(start, start + n)
            chunk = hidden[rows]
            _, entropy, collision, log_normaliser = outputs[:, rows, None].unbind()
            d_logprobs, d_entropy, d_collision = (g[rows, None] for g in gradients)
            for columns, tile, logits in _logit_tiles(chunk, weight, bias, ctx.temperature, v):
                log_p = logits - log_normaliser
                p = log_p.exp()
                d_logits = d_collision * 2 * p * (p - collision) - d_entropy * p * (log_p + entropy) - d_logprobs * p
                local, inside = _locate(targets[rows], columns)
                d_logits.scatter_add_(1, local, torch.where(inside, d_logprobs, 0.0))
                if d_bias is not None:
                    d_bias[columns] += d_logits.sum(0) / ctx.temperature
                if d_hidden is not None:
                    d_hidden[rows] += _product(d_logits.to(tile.dtype), tile) / ctx.temperature
                if d_weight is not None:
                    d_weight[columns] += _product(d_logits.to(tile.dtype).T, chunk.to(tile.dtype)) / ctx.temperature
        cast = (None if d is None else d.to(hidden.dtype) for d in (d_hidden, d_weight, d_bias))
        return *cast, None, None, None


def _sweep(hidden, weight, bias, targets, temperature, v, want_expectation: bool):
    """One pass over the vocabulary with a running maximum m, for s = sum e^(a-m) and its kin.

    Returns logprobs, entropy, collision, log-normaliser, each [n] fp32, and sum_v p_v W_v [n, D] fp32
    (None unless wanted).
    """
    m = hidden.new_full((len(hidden),), -1e30, dtype=torch.float32)  # finite: 0 * (m - m') stays 0
    s, shifted, squares, target_logit = (torch.zeros_like(m) for _ in range(4))
    expected = torch.zeros_like(hidden, dtype=torch.float32) if want_expectation else None
    for columns, tile, logits in _logit_tiles(hidden, weight, bias, temperature, v):
        local, inside = _locate(targets, columns)
        target_logit = torch.where(inside, logits.gather(1, local), target_logit[:, None]).squeeze(1)
        higher = torch.maximum(m, logits.amax(1))
        scale = torch.exp(m - higher)
        logits -= higher[:, None]
        weights = logits.exp()
        # torch's sum adds in pairs: over 150,000 columns a BLAS dot product would be 60 times less exact.
        shifted = scale * (shifted + s * (m - higher)) + logits.mul_(weights).sum(1)  # sum e^(a-m) (a-m)
        squares = scale.square() * squares + torch.mul(weights, weights, out=logits).sum(1)
        s = scale * s + weights.sum(1)
        m = higher
        if expected is not None:
            expected *= scale[:, None]
            expected += _product(weights.to(tile.dtype), tile)
    log_normaliser = m + s.log()
    if expected is not None:
        expected /= s[:, None]
    return target_logit - log_normaliser, s.log() - shifted / s, squares / s.square(), log_normaliser, expected


def _logit_tiles(hidden, weight, bias, temperature, v) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(columns, their rows of weight, logits [n, v] fp32) over the vocabulary; the last tile may be narrower.

    The CPU rounds a half-precision product to its operands' type, so there the tiles are fp32 copies.
    """
    operand = weight.dtype if weight.is_cuda else torch.float32
    hidden = hidden.to(operand)
    for start in range(0, len(weight), v):
        columns = slice(start, min(start + v, len(weight)))
        tile = weight[columns].to(operand)
        logits = _product(hidden, tile.T)
        if bias is not None:
            logits += bias[columns]
        yield columns, tile, logits.div_(temperature)


def _locate(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Index of each target within the tile, clamped into it, and whether it lies there; both [n, 1]."""
    local = targets[:, None] - columns.start
    width = columns.stop - columns.start
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, from fp32 or (CUDA only) half-precision operands."""
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)
