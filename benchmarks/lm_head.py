"""Log-probability and entropy from hidden states: time, memory and error of several ways to compute them.

    python benchmarks/lm_head.py [--tokens 512] [--hidden 2048 4096] [--vocabulary 151936] [--pairs 5] [--out FILE]

Bfloat16, frozen head, as with LoRA. All ways run one after the other in each pair; times are medians over the pairs,
ratios are taken within a pair. Ours gets TRL's peak memory, less its results, as its budget. Errors are against float64
on 32 tokens.
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

from stapo_lite.algorithm.lm_head import token_statistics


def ours(hidden, weight, targets, memory_bytes):
    result = token_statistics(hidden, weight, targets, memory_bytes=memory_bytes)
    return result.logprobs, result.entropy


def dense(hidden, weight, targets):
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return logprobs, entropy


def trl(hidden, weight, targets):
    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8192, None, 1.0, ("entropy",))[:2]


def liger(hidden, weight, targets):
    """Its fused cross-entropy: the log-probability's gradient only, no entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
    return -loss, torch.full_like(loss, torch.nan, requires_grad=False)


class Recomputed(torch.autograd.Function):
    """In the manner of verl's torch version: chunks of tokens, all logits of a chunk at once, computed again in the
    backward pass."""

    CHUNK = 512

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        outputs = []
        for h, y in zip(hidden.split(Recomputed.CHUNK), targets.split(Recomputed.CHUNK), strict=True):
            log_p = torch.log_softmax((h @ weight.T).float(), -1)
            outputs.append((log_p.gather(1, y[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)))
        ctx.save_for_backward(hidden, weight, targets)
        logprobs, entropy = (torch.cat(parts) for parts in zip(*outputs, strict=True))
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
    """Log-probabilities, entropies and the gradient of the former's sum."""
    hidden = hidden.detach().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        logprobs, entropy = way(hidden, weight, targets)
    if backward:
        logprobs.sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad


def errors(way: Callable, hidden, weight, targets) -> dict[str, float]:
    """Largest error of log-probability, entropy and gradient (relative to its largest entry) against float64."""
    h = hidden.double().requires_grad_()
    log_p = torch.log_softmax(h @ weight.double().T, -1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    logprobs.sum().backward()
    exact = (logprobs.detach(), -(log_p.exp() * log_p).sum(-1).detach(), h.grad)
    scales = (1.0, 1.0, h.grad.abs().max().item())
    actual = run(way, hidden, weight, targets, backward=True)
    return {
        name: (a.double() - e).abs().max().item() / scale
        for name, a, e, scale in zip(("logprob", "entropy", "gradient"), actual, exact, scales, strict=True)
    }


def compare(tokens: int, width: int, vocabulary: int, pairs: int, device: str) -> dict:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(vocabulary, width, generator=generator) * width**-0.5).bfloat16().to(device)
    hidden = (torch.randn(tokens, width, generator=generator) * 3).bfloat16().to(device)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    peers: dict[str, Callable] = {"trl": trl, "recomputed": Recomputed.apply, "dense": dense}
    if device == "cuda" and find_spec("liger_kernel"):
        peers["liger"] = liger
    result: dict = {}
    for name, backward in (("forward+backward", True), ("forward", False)):
        budget = peak_bytes(partial(run, trl, hidden, weight, targets, backward)) - 2 * hidden.nbytes
        ways = {"ours": partial(ours, memory_bytes=budget)} | peers
        peaks = {w: peak_bytes(partial(run, f, hidden, weight, targets, backward)) / 2**20 for w, f in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(pairs):
            for way, function in ways.items():
                times[way].append(seconds(partial(run, function, hidden, weight, targets, backward)))
        result[name] = {
            way: {
                "seconds": statistics.median(times[way]),
                "ours / this": statistics.median(a / b for a, b in zip(times["ours"], times[way], strict=True)),
                "peak MiB beyond the inputs": round(peaks[way], 1),
            }
            for way in ways
        }
        if backward:
            result["largest error"] = {w: errors(f, hidden[:32], weight, targets[:32]) for w, f in ways.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"tokens": arguments.tokens, "vocabulary": arguments.vocabulary, "device": device}
    result = {
        f"hidden {width}": compare(arguments.tokens, width, arguments.vocabulary, arguments.pairs, device)
        for width in arguments.hidden
    }
    save(shape | {"threads": torch.get_num_threads()} | result, arguments.out)


if __name__ == "__main__":
    main()
