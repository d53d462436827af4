"""Compare time, memory and error of several ways to compute log-probability and entropy from hidden
states.

    python benchmarks/lm_head.py [--tokens 512] [--hidden 2048 4096] [--vocabulary 151936]
    [--pairs 5] [--out FILE]

In bfloat16 where the card or the CPU has hardware for it, float32 elsewhere, with a frozen head, as
with LoRA. Each round runs all ways one after the other. Times are
medians over the rounds; ratios are taken within a round. The memory budget of ours is TRL's peak
less the size of the results. Errors are measured against float64 on 32 tokens.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from common import save, seconds
from memory import peak_bytes
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from stapo_lite.method.lm_head import Head, token_statistics
from stapo_lite.model.processes import resolve_dtype


def ours(hidden, weight, targets, memory_bytes):
    result = token_statistics(hidden, Head(weight, memory_bytes=memory_bytes), targets)
    return result.logprobs, result.entropy


def dense(hidden, weight, targets):
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return logprobs, entropy


def trl(hidden, weight, targets):
    return ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, 8192, None, 1.0, ("entropy",)
    )[:2]


def liger(hidden, weight, targets):
    """Liger's fused cross-entropy: log-probability and its gradient, no entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
    return -loss, torch.full_like(loss, torch.nan, requires_grad=False)


class Recomputed(torch.autograd.Function):
    """The way of verl's torch version: all logits of a chunk of tokens at once, recomputed in the
    backward pass."""

    CHUNK = 512

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        logprob_parts, entropy_parts = [], []
        hidden_chunks = hidden.split(Recomputed.CHUNK)
        target_chunks = targets.split(Recomputed.CHUNK)
        for h, y in zip(hidden_chunks, target_chunks, strict=True):
            log_p = torch.log_softmax((h @ weight.T).float(), -1)
            logprob_parts.append(log_p.gather(1, y[:, None]).squeeze(1))
            entropy_parts.append(-(log_p.exp() * log_p).sum(-1))
        ctx.save_for_backward(hidden, weight, targets)
        logprobs, entropy = torch.cat(logprob_parts), torch.cat(entropy_parts)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, d_logprobs, _):
        hidden, weight, targets = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        for start in range(0, len(hidden), Recomputed.CHUNK):
            rows = slice(start, start + Recomputed.CHUNK)
            d_logits = -torch.softmax((hidden[rows] @ weight.T).float(), -1)
            d_logits.scatter_add_(1, targets[rows, None], torch.ones_like(d_logits[:, :1]))
            d_logits *= d_logprobs[rows, None]
            d_hidden[rows] = d_logits.to(weight.dtype) @ weight
        return d_hidden, None, None


def run(way: Callable, hidden, weight, targets, backward: bool):
    """Log-probabilities, entropies, and the gradient of the sum of the log-probabilities; all [N]
    but the gradient, [N, hidden]."""
    hidden = hidden.detach().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        logprobs, entropy = way(hidden, weight, targets)
    if backward:
        logprobs.sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad


def errors(way: Callable, hidden, weight, targets) -> dict[str, float]:
    """Largest error against float64 of log-probability, entropy, and gradient; the latter's is
    relative to its largest entry."""
    h = hidden.double().requires_grad_()
    log_p = torch.log_softmax(h @ weight.double().T, -1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    logprobs.sum().backward()
    exact = (logprobs.detach(), -(log_p.exp() * log_p).sum(-1).detach(), h.grad)
    scales = (1.0, 1.0, h.grad.abs().max().item())
    actual = run(way, hidden, weight, targets, backward=True)
    names = ("logprob", "entropy", "gradient")
    largest = {}
    for name, a, e, scale in zip(names, actual, exact, scales, strict=True):
        largest[name] = (a.double() - e).abs().max().item() / scale
    return largest


def compare(tokens: int, width: int, vocabulary: int, pairs: int, device: str) -> dict:
    """Measure all ways at one hidden size; return seconds, ratios, peaks and errors."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator) * width**-0.5
    dtype = getattr(torch, resolve_dtype("auto", None))
    weight = weight.to(device, dtype)
    hidden = torch.randn(tokens, width, generator=generator) * 3
    hidden = hidden.to(device, dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    peers: dict[str, Callable] = {"trl": trl, "recomputed": Recomputed.apply, "dense": dense}
    if device == "cuda" and find_spec("liger_kernel"):
        peers["liger"] = liger
    result: dict = {}
    for name, backward in (("forward+backward", True), ("forward", False)):
        inputs = (hidden, weight, targets, backward)
        budget = peak_bytes(partial(run, trl, *inputs)) - 2 * hidden.nbytes
        ways = {"ours": partial(ours, memory_bytes=budget)} | peers
        calls = {way: partial(run, function, *inputs) for way, function in ways.items()}
        peaks = {way: peak_bytes(call) / 2**20 for way, call in calls.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(pairs):
            for way, call in calls.items():
                times[way].append(seconds(call))
        result[name] = {}
        for way in ways:
            ratios = [a / b for a, b in zip(times["ours"], times[way], strict=True)]
            result[name][way] = {
                "seconds": statistics.median(times[way]),
                "ours / this": statistics.median(ratios),
                "peak MiB beyond the inputs": round(peaks[way], 1),
            }
        if backward:
            largest = {}
            for way, function in ways.items():
                largest[way] = errors(function, hidden[:32], weight, targets[:32])
            result["largest error"] = largest
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"tokens": arguments.tokens, "vocabulary": arguments.vocabulary, "device": device}
    shape["dtype"] = resolve_dtype("auto", None)
    result = {}
    for width in arguments.hidden:
        result[f"hidden {width}"] = compare(
            arguments.tokens, width, arguments.vocabulary, arguments.pairs, device
        )
    save(shape | {"threads": torch.get_num_threads()} | result, arguments.out)


if __name__ == "__main__":
    main()
