"""Time the trainer's pass over a Qwen3.5 and over a Qwen3 of the same size.

    python benchmarks/hybrids.py [--sizes 0.8B 4B] [--pairs 5] [--out FILE]

Four layers of each with random weights, three of the Qwen3.5's with linear attention: forward and
backward with checkpointed layers on a micro-batch of 2,048 tokens, in the machine's dtype. Both
have the same hidden size, MLP and heads, and a vocabulary of 260, so that the layers are what is
timed. Without flash-linear-attention this is transformers' own gated delta rule.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import save, seconds
from random_model import QWEN3_5, VOCABULARY, build, qwen3, qwen3_5

from stapo_lite.config import load_config
from stapo_lite.model.loading import load_weights
from stapo_lite.model.policy import Policy, make_policy
from stapo_lite.model.processes import resolve_dtype
from stapo_lite.types import Completion, Prompt

LAYERS = 4


def make(model: Any, folder: Path, dtype: str, device: str) -> Policy:
    """A policy on a random model, with checkpointed layers.

    Args:
        model: transformers' config.
    """
    build(folder, model, getattr(torch, dtype))
    keys = {"model": str(folder), "output_dir": "unused", "data": {"source": "unused.jsonl"}}
    config = load_config(keys | {"dtype": dtype})
    policy = make_policy(load_weights(str(folder), dtype, device), config)
    policy.save_memory(checkpointing=True, offload=False)
    return policy


def work(policy: Policy, completions: list[Completion]) -> None:
    """Forward and backward."""
    policy.statistics(completions).logprobs.sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=QWEN3_5, default=["0.8B", "4B"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = resolve_dtype("auto", None)
    ids = [5] * (given.length - 8)
    row = Completion(Prompt("", [5] * 8, None), ids, [0.0] * len(ids), False, 0)
    result: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "flash-linear-attention": find_spec("fla") is not None,
    }
    for size in given.sizes:
        hybrid = qwen3_5(size, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
        text = hybrid.text_config
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        same = {name: getattr(text, name) for name in (*names, "head_dim", "num_hidden_layers")}
        models = {"Qwen3.5": hybrid, "Qwen3": qwen3("0.6B", vocab_size=VOCABULARY, **same)}
        calls: dict[str, Callable[[], None]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, model in models.items():
                policy = make(model, Path(folder) / name, dtype, device)
                calls[name] = partial(work, policy, [row] * given.rows)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(given.pairs):
            for name, call in calls.items():
                times[name].append(seconds(call))
        tokens = given.rows * given.length
        ratios = [a / b for a, b in zip(times["Qwen3.5"], times["Qwen3"], strict=True)]
        result[size] = {
            "tokens/s": {
                name: tokens / statistics.median(values) for name, values in times.items()
            },
            "seconds, Qwen3.5 / Qwen3": statistics.median(ratios),
        }
    save(result, given.out)


if __name__ == "__main__":
    main()
