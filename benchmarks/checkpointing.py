"""What checkpointing fewer layers saves, and compiling them: time and memory of a forward and backward pass.

    python benchmarks/checkpointing.py [--model FOLDER] [--tokens 2048] [--rounds 5] [--out FILE]

Without `--model` SmolLM2-135M and a random model of the shape of Qwen3-0.6B, in bfloat16 with LoRA of rank 16. None,
half and all of the layers checkpointed, and none and all compiled, take turns; seconds are medians over the rounds, and
ratios are to all layers of the same round. Memory is the most that is allocated at one time beyond weights and
gradients, of layers that are not compiled, next to what `stapo plan` counts.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import save, seconds
from memory import peak_bytes
from random_model import build, qwen3
from transformers import AutoConfig

from stapo_lite.config import load_config
from stapo_lite.model.policy import Policy, load_policy
from stapo_lite.planning.plan import count_activations
from stapo_lite.tools.quickstart import fetch_model
from stapo_lite.types import Completion, Prompt


def make_policy(model: str, tokens: int, checkpointed: int, compiled: bool) -> tuple[Policy, int]:
    """A policy, and the bytes that its pass is planned to take."""
    tree = {
        "model": model,
        "output_dir": "unused",
        "dtype": "bfloat16",
        "data": {"source": "unused", "max_prompt_length": 1},
    }
    tree |= {"rollout": {"max_completion_length": tokens // 4 - 1}}
    tree["train"] = {"max_tokens_per_microbatch": tokens, "gradient_checkpointing": checkpointed or False}
    tree["train"]["compile"] = compiled
    config = load_config(tree, ["train.lm_head_memory_gb=0.0625"])
    policy = load_policy(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    policy.model.train()
    _, decoder, head = count_activations(config, policy.model.config)
    return policy, decoder + head


def compare(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds and bytes by the number of layers checkpointed, and whether they are compiled."""
    shape = AutoConfig.from_pretrained(model)
    layers = shape.num_hidden_layers
    kinds = [(0, False), (layers // 2, False), (layers, False), (0, True), (layers, True)]
    made = {kind: make_policy(model, tokens, *kind) for kind in kinds}
    ids = torch.randint(shape.vocab_size, (4, tokens // 4), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [Completion(Prompt("", row[:1], answer=""), row[1:], [], truncated=False, adapter_version=0) for row in ids]

    def run(policy: Policy) -> None:
        policy.model.zero_grad(set_to_none=False)
        policy.statistics(rows).logprobs.sum().backward()

    taken: dict[tuple[int, bool], list[float]] = {kind: [] for kind in made}
    first = {kind: seconds(partial(run, policy)) for kind, (policy, _) in made.items()}  # makes the gradients; compiles
    for number in range(rounds):
        for kind in kinds if number % 2 else kinds[::-1]:
            taken[kind].append(seconds(partial(run, made[kind][0])))
    result = {}
    for kind, (policy, planned) in made.items():
        count, compiled = kind
        times = zip(taken[kind], taken[layers, False], strict=True)
        result[f"{count} of {layers} layers{', compiled' if compiled else ''}"] = {
            "seconds of the first pass": first[kind],
            "seconds": median(taken[kind]),
            "of the time with all": median(one / all_layers for one, all_layers in times),
        }
        if not compiled:  # what counts the memory keeps torch from compiling
            memory = {"MiB": peak_bytes(partial(run, policy)) / 2**20, "MiB planned": planned / 2**20}
            result[f"{count} of {layers} layers"] |= memory
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=2048, help="in a micro-batch of four rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {"model": given.model} if given.model else {"SmolLM2-135M": fetch_model()}
        if not given.model:
            models["Qwen3-0.6B"] = build(Path(folder), qwen3("0.6B"), torch.bfloat16)
        save({name: compare(str(path), given.tokens, given.rounds) for name, path in models.items()}, given.out)


if __name__ == "__main__":
    main()
