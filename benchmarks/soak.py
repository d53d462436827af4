"""What a long run holds on to: 500 steps of a tiny model with vLLM, a checkpoint every tenth.

    python benchmarks/soak.py --out benchmarks/results/soak.json

Every tenth step: memory of the run and of its child processes, file descriptors, threads, shared memory, and files in
vLLM's adapter folder. What the last fifth of the run has more than the second is growth.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from common import save
from random_model import VOCABULARY, build, qwen3

from stapo_lite import Trainer
from stapo_lite.files import write_lines

TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # fmt: skip


def soak(steps: int) -> dict[str, dict[str, float]]:
    """Of each quantity, its median over the second and over the last fifth of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # for the engine's adapters
        build(Path(folder) / "model", qwen3("1.7B", **TINY))
        write_lines(Path(folder) / "prompts.jsonl", ({"prompt": f"say {i}"} for i in range(64)))
        source = (
            "def even(completion_ids, **_): return [float(sum(i % 2 == 0 for i in ids)) for ids in completion_ids]\n"
        )
        (Path(folder) / "parity.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, folder)
        trainer = Trainer(
            {
                "model": str(Path(folder) / "model"),
                "output_dir": str(Path(folder) / "run"),
                "dtype": "float32",
                "lora": {"r": 8},
                "data": {"source": str(Path(folder) / "prompts.jsonl"), "max_prompt_length": 64},
                "reward": {"functions": ["parity:even"]},
                "rollout": {
                    "engine": "vllm", "num_generations": 4, "max_completion_length": 16,
                    "vllm": {"kv_cache_memory_bytes": 1 << 27},
                },
                "train": {"max_steps": steps, "batch_size": 8, "mini_batch_size": 4, "max_tokens_per_microbatch": 512},
                "log": {"save_steps": 10, "log_completions_steps": 0, "audit_tokens": 64},
            }
        )  # fmt: skip
        found = [measure(Path(folder)) for metrics in trainer if metrics["step"] % 10 == 0]
    fifth = len(found) // 5
    return {
        name: {
            "second fifth": median(values[name] for values in found[fifth : 2 * fifth]),
            "last fifth": median(values[name] for values in found[-fifth:]),
        }
        for name in found[0]
    }


def measure(folder: Path) -> dict[str, Any]:
    process = psutil.Process()
    children = process.children(recursive=True)
    return {
        "memory [MiB]": process.memory_info().rss / 2**20,
        "memory of children [MiB]": sum(child.memory_info().rss for child in children) / 2**20,
        "processes": 1 + len(children),
        "file descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "shared memory [MiB]": psutil.disk_usage("/dev/shm").used / 2**20,
        "files of adapters": sum(path.is_file() for path in folder.glob("stapo_lite-adapters-*/**/*")),
        "checkpoints": len(list((folder / "run").glob("checkpoint-*"))),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=500, help="at least 50")
    arguments = parser.parse_args()
    save({"steps": arguments.steps, "growth": soak(arguments.steps)}, arguments.out)
