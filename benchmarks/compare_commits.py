"""Compare short runs of two versions of the package: a rewrite must not change their numbers, and
may change their speed.

    python benchmarks/compare_commits.py [COMMIT] [--cases NAME ...] [--out FILE]
    python benchmarks/compare_commits.py COMMIT --time "update.py --pairs 1" --key "zero 0.0"
    seconds ours [--pairs 5]

COMMIT (by default HEAD) is unpacked to a temporary folder and compared with the working tree. Each
case trains a tiny random model for a few steps with both: every preset, both engines, the token
log, a resumed run, two processes, dynamic sampling, half precision. Metrics, adapters and the
candidates of token logs are compared number by number; metrics and fields that only one version has
are named. Both versions must know the config keys of the cases.

`--time` runs a script of `benchmarks/`, each tree its own copy, and compares the number at `--key`
of its JSON: medians over pairs in alternating order. `--key` may be given several times.
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

from stapo_lite.files import read_lines, write_lines

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
    **{
        f"s2t {name}": {"objective.s2t.preset": name}
        for name in ("paper-v1", "full", "high-entropy", "random")
    },
    "s2t article": {"objective.s2t.preset": "article", "objective.s2t.tau_p": 0.05},
    "s2t current": {"objective.s2t.statistics": "current"},
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
    "two processes": {
        "log.audit_tokens": 5,
        "processes": 2,
        "rollout.dynamic_sampling": True,
        **RARELY,
    },
    "vllm": {"rollout.engine": "vllm"},
    "vllm float16": {"rollout.engine": "vllm", "dtype": "float16"},
}

KV_CACHE = {"rollout.vllm.kv_cache_memory_bytes": 10 << 20}
CHILD = """
import json, sys
from stapo_lite import Trainer, load_config

config, runs = json.loads(sys.argv[1])
for overrides, resume in runs:
    Trainer(config=load_config(config, overrides)).train(resume)
"""


def config(folder: Path) -> dict[str, Any]:
    """The config of a run of three steps with two updates each."""
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
    """Run cases with the package of `tree`. All single-process cases share one process, which
    imports the package once."""
    together: list[list[Any]] = []
    for name in names:
        changes = dict(CASES[name])
        processes = changes.pop("processes", 1)
        first = changes.pop("first", None)
        runs = []
        for part in [first, {}] if first else [{}]:
            keys = {"output_dir": str(out / name)} | changes | part | KV_CACHE
            overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
            resume = len(runs) > 0
            runs.append([overrides, resume])
        if processes == 1:
            together += runs
        else:
            options = ["--num_processes", str(processes), "--num_machines", "1"]
            options += ["--main_process_port", "0"]
            options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
            launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *options]
            child(tree, folder, launcher, runs)
    if together:
        child(tree, folder, [sys.executable], together)


def child(tree: Path, folder: Path, launcher: list[str], runs: list[list[Any]]) -> None:
    """Make runs, given as overrides and whether to resume, with the package of `tree`."""
    script = folder / "child.py"
    script.write_text(CHILD)
    own = {"PYTHONPATH": f"{tree}:{folder}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*launcher, str(script), json.dumps([config(folder), runs])],
        env=os.environ | own,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{tree}: {done.stderr[-4000:]}")


def difference(old: Any, new: Any) -> float:
    """The largest relative difference of two numbers, lists or dictionaries (of the keys that both
    have); infinite if anything else differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = (old.keys() & new.keys()) - TIMES
        return max((difference(old[key], new[key]) for key in keys), default=0.0)
    if isinstance(old, list) and isinstance(new, list):
        return max((difference(a, b) for a, b in zip_longest(old, new)), default=0.0)
    if isinstance(old, float) and isinstance(new, float):
        # The floor keeps rounding errors of values near zero small.
        return abs(old - new) / max(abs(old), abs(new), 1e-3)
    return 0.0 if old == new else float("inf")


def compare(old: Path, new: Path) -> dict[str, Any]:
    """Relative differences between two run folders; a number is 0 if they agree to the bit."""
    metrics = [read_lines(folder / "metrics.jsonl") for folder in (old, new)]
    tokens = [candidates(folder) for folder in (old, new)]
    adapters = [adapter_weights(folder) for folder in (old, new)]
    worst = {}
    for name in set.intersection(*map(names, metrics)) - TIMES:
        values = [[line[name] for line in lines if name in line] for lines in metrics]
        worst[name] = difference(*values)
    return {
        "first step": difference(metrics[0][0], metrics[1][0]),
        "metrics": difference(*metrics),
        "worst metric": max(worst, key=worst.__getitem__),
        "metrics of one only": sorted(names(metrics[0]) ^ names(metrics[1])),
        "adapter": ((adapters[0] - adapters[1]).norm() / adapters[0].norm()).item(),
        "token log": difference(*tokens),
        "fields of the token log of one only": sorted(names(tokens[0]) ^ names(tokens[1])),
    }


def names(lines: list[dict[str, Any]]) -> set[str]:
    """All keys of the lines."""
    return set().union(*lines)


def candidates(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's token log that show a candidate."""
    return [line for line in read_lines(run / "tokens.jsonl") if "token" in line]


def adapter_weights(run: Path) -> torch.Tensor:
    """All weights of a run's adapter, flat, in the order of their names."""
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    return torch.cat([adapter[name].flatten() for name in sorted(adapter)])


def time_benchmark(
    trees: list[Path], folder: Path, command: str, keys: list[list[str]], pairs: int
) -> dict[str, Any]:
    """For each key of the benchmark's JSON the seconds in the old and the new tree, and the ratio
    new / old."""
    script, *options = shlex.split(command)
    out = folder / "timed.json"
    options += ["--out", str(out)]
    seconds: dict[str, list[list[float]]] = {" / ".join(key): [[], []] for key in keys}
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            subprocess.run(
                [sys.executable, str(trees[side] / "benchmarks" / script), *options],
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
    result = {}
    for key, (old, new) in seconds.items():
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        result[key] = {
            "old": statistics.median(old),
            "new": statistics.median(new),
            "new / old": statistics.median(ratios),
            "new / old of each pair": [round(ratio, 3) for ratio in ratios],
        }
    return result


def write_inputs(folder: Path) -> None:
    """Write the model, the reward functions and the prompts of the cases."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    build(folder / "model", qwen3("1.7B", **shape))
    (folder / "rewards_of_cases.py").write_text(REWARD)
    words = ("one", "two", "three", "four")
    prompts = [{"prompt": f"say {word}", "answer": "a"} for word in words]
    write_lines(folder / "prompts.jsonl", prompts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--time", metavar="COMMAND", help="a script of benchmarks/ and its options, without --out"
    )
    parser.add_argument("--key", nargs="+", action="append", help="path of a number in its JSON")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", arguments.commit], check=True, capture_output=True, text=True
    )
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
            write_inputs(folder)
            for side, tree in zip(("old", "new"), trees, strict=True):
                (folder / side).mkdir()
                run_cases(tree, folder, arguments.cases, folder / side)
            found = {}
            for case in arguments.cases:
                found[case] = compare(folder / "old" / case, folder / "new" / case)
            result = {"differences": found}
        save({"old": commit.stdout.strip()} | result, arguments.out)


if __name__ == "__main__":
    main()
