"""The same short runs with two versions of the package: what a rewrite must leave as it was, and what it may speed up.

    python benchmarks/compare_commits.py [COMMIT] [--cases NAME ...] [--out FILE]
    python benchmarks/compare_commits.py COMMIT --time "update.py --pairs 1" --key "zero 0.0" seconds ours [--pairs 5]

COMMIT (by default HEAD) is unpacked beside the working tree. Each case trains a tiny random model for a few steps with
both: every preset, both engines, the token log, a resumed run, two processes, dynamic sampling, half precision.
Metrics, adapters and token logs are compared number by number; both must know the config keys of the cases.

`--time` runs one of `benchmarks/`, as it is in each tree, and compares the number that its JSON has at `--key`: medians
over pairs in alternating order. Several keys may be given.
"""

import argparse
import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import zipfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from common import save
from random_model import VOCABULARY, build, qwen3
from safetensors.torch import load_file

from stapo_lite.files import read_lines

ROOT = Path(__file__).parent.parent
TIMES = {"tokens_per_second", "seconds_rollout", "seconds_reward", "seconds_update", "seconds_step"}
REWARD = """
def even(completion_ids, **columns):
    return [float(sum(i % 2 == 0 for i in ids)) for ids in completion_ids]

def rarely(completion_ids, **columns):
    return [float(ids[0] % 6 == 0) for ids in completion_ids]
"""
RARELY = {"reward.functions": ["rewards_of_cases:rarely"]}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ("stapo", "justrl", "grpo", "dr-grpo", "20-entropy")},
    "dapo": {"algorithm": "dapo", **RARELY},
    **{f"s2t {name}": {"objective.s2t.preset": name} for name in ("paper-v1", "full", "high-entropy", "random")},
    "s2t article": {"objective.s2t.preset": "article", "objective.s2t.tau_p": 0.05},
    "s2t current": {"objective.s2t.statistics": "current"},
    "s2t adaptive": {"objective.s2t.target_share": 1e-4, "objective.s2t.tau_p": 0.002},
    "large steps": {"train.learning_rate": 0.02},
    "sequence-mask": {"objective.sampler_correction": "sequence-mask"},
    "old_logprobs rollout": {"objective.old_logprobs": "rollout"},
    "everything": {
        "objective.beta": 0.1,
        "objective.entropy_coef": 0.05,
        "objective.aggregation": "sequence-mean",
        "objective.top_entropy_quantile": 0.7,
    },
    "nf4": {"quantization": "nf4", "dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "checkpointing": {"train.gradient_checkpointing": True, "train.offload_activations": True},
    "audit": {"log.audit_tokens": 5},
    "resumed": {"log.audit_tokens": 5, "first": {"train.max_steps": 1}},
    "two processes": {"log.audit_tokens": 5, "processes": 2, "rollout.dynamic_sampling": True, **RARELY},
    "vllm": {"rollout.engine": "vllm"},
    "vllm float16": {"rollout.engine": "vllm", "dtype": "float16"},
}

KV_CACHE = {"rollout.vllm.kv_cache_memory_bytes": 10 << 20}


def config(folder: Path) -> dict[str, Any]:
    """A run of three steps, two updates each."""
    return {
        "model": str(folder / "model"),
        "dtype": "float32",
        "lora": {"r": 8},
        "data": {"source": str(folder / "prompts.jsonl"), "max_prompt_length": 64},
        "reward": {"functions": ["rewards_of_cases:even"]},
        "rollout": {"engine": "transformers", "num_generations": 4, "max_completion_length": 12},
        "objective": {"s2t": {"tau_p": 0.01}},
        "train": {
            "max_steps": 3,
            "batch_size": 4,
            "mini_batch_size": 2,
            "max_tokens_per_microbatch": 256,
            "learning_rate": 1e-4,
            "warmup_steps": 0,
            "gradient_checkpointing": False,
        },
        "log": {"save_steps": 0, "log_completions_steps": 0},
    }


def run_cases(tree: Path, folder: Path, names: list[str], out: Path) -> None:
    """Run cases with the package of `tree`; those of one process share one, which imports it once."""
    together: list[list[Any]] = []
    for name in names:
        changes = dict(CASES[name])
        processes = changes.pop("processes", 1)
        first = changes.pop("first", None)
        runs = []
        for part in [first, {}] if first else [{}]:
            keys = {"output_dir": str(out / name)} | changes | part | KV_CACHE
            runs.append([[f"{key}={json.dumps(value)}" for key, value in keys.items()], len(runs) > 0])
        if processes == 1:
            together += runs
        else:
            options = ["--num_processes", str(processes), "--num_machines", "1", "--main_process_port", "0"]
            options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
            launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *options]
            child(tree, folder, launcher, runs)
    if together:
        child(tree, folder, [sys.executable], together)


def child(tree: Path, folder: Path, launcher: list[str], runs: list[list[Any]]) -> None:
    script = folder / "child.py"
    script.write_text(
        "import json, sys\nfrom stapo_lite import load_config\nfrom stapo_lite.training.loop import train\n"
        "tree, runs = json.loads(sys.argv[1])\n"
        "for overrides, resume in runs:\n    list(train(load_config(tree, overrides), resume))\n"
    )
    done = subprocess.run(
        [*launcher, str(script), json.dumps([config(folder), runs])],
        env=os.environ | {"PYTHONPATH": f"{tree}:{folder}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{tree}: {done.stderr[-4000:]}")


def difference(old: Any, new: Any) -> float:
    """The largest relative difference of two numbers, lists or dictionaries; infinite where anything else differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = (old.keys() | new.keys()) - TIMES
        return max((difference(old.get(key), new.get(key)) for key in keys), default=0.0)
    if isinstance(old, list) and isinstance(new, list):
        return max((difference(a, b) for a, b in zip_longest(old, new)), default=0.0)
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) / max(abs(old), abs(new), 1e-3)  # differences of nothing are rounding
    return 0.0 if old == new else float("inf")


def compare(old: Path, new: Path) -> dict[str, Any]:
    """What differs between two run folders; every number is 0 where they agree to the bit."""
    metrics = [read_lines(folder / "metrics.jsonl") for folder in (old, new)]
    adapters = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (old, new)]
    weights = [torch.cat([adapter[name].flatten() for name in sorted(adapter)]) for adapter in adapters]
    worst = {name: difference(*([line.get(name) for line in side] for side in metrics)) for name in metrics[0][0]}
    return {
        "first step": difference(*(side[0] for side in metrics)),
        "metrics": difference(*metrics),
        "worst metric": max(worst.keys() - TIMES, key=worst.__getitem__),
        "adapter": ((weights[0] - weights[1]).norm() / weights[0].norm()).item(),
        "token log": difference(*(read_lines(folder / "tokens.jsonl") for folder in (old, new))),
        "planes": difference(*(read_lines(folder / "quadrants.jsonl") for folder in (old, new))),
    }


def time_benchmark(trees: list[Path], folder: Path, command: str, keys: list[list[str]], pairs: int) -> dict[str, Any]:
    """Seconds of the old and the new tree, and the new by the old, for each of the keys of the benchmark's JSON."""
    script, *options = shlex.split(command)
    seconds: dict[str, list[list[float]]] = {" / ".join(key): [[], []] for key in keys}
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            out = folder / "timed.json"
            subprocess.run(
                [sys.executable, str(trees[side] / "benchmarks" / script), *options, "--out", str(out)],
                env=os.environ | {"PYTHONPATH": str(trees[side])},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            for key in keys:
                value = json.loads(out.read_text())
                for name in key:
                    value = value[name]
                seconds[" / ".join(key)][side].append(value)
        print(f"pair {pair + 1} of {pairs}: {seconds}", file=sys.stderr, flush=True)
    return {
        key: {
            "old": statistics.median(old),
            "new": statistics.median(new),
            "new / old": statistics.median(b / a for a, b in zip(old, new, strict=True)),
            "new / old of each pair": [round(b / a, 3) for a, b in zip(old, new, strict=True)],
        }
        for key, (old, new) in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--time", metavar="COMMAND", help="a script of benchmarks/ and its options, without --out")
    parser.add_argument("--key", nargs="+", action="append", help="path of a number in its JSON")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", arguments.commit], check=True, capture_output=True, text=True)
    archive = subprocess.run(
        [*git, "archive", "--format=zip", arguments.commit], check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zipfile.ZipFile(io.BytesIO(archive)).extractall(folder / "tree")
        trees = [folder / "tree", ROOT]
        if arguments.time:
            timed = time_benchmark(trees, folder, arguments.time, arguments.key, arguments.pairs)
            result: dict[str, Any] = {"command": arguments.time, "seconds": timed}
        else:
            initial = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            initial |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
            shape = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, "initializer_range": 0.2}
            build(folder / "model", qwen3("1.7B", **initial, **shape))
            (folder / "rewards_of_cases.py").write_text(REWARD)
            prompts = [{"prompt": f"say {word}", "answer": "a"} for word in ("one", "two", "three", "four")]
            (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
            for side, tree in zip(("old", "new"), trees, strict=True):
                (folder / side).mkdir()
                run_cases(tree, folder, arguments.cases, folder / side)
            result = {"differences": {n: compare(folder / "old" / n, folder / "new" / n) for n in arguments.cases}}
        save({"old": commit.stdout.strip()} | result, arguments.out)


if __name__ == "__main__":
    main()
