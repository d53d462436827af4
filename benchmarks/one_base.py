"""Compare a run whose trainer computes on vLLM's weights with one that loads a copy of its own.

    python benchmarks/one_base.py [--steps 4] [--pairs 3] [--set KEY=VALUE ...] [--out FILE]

Both are the quickstart in 4 bits (on a CPU vLLM packs other weights away), each in a process of its
own, in turn. Medians of: seconds until the first step's updates are done, and a step's; the largest
resident memory, and the memory at the end, in GiB; of a card, the most that was allocated.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from common import QUICKSTART, save

from stapo_lite import Trainer, load_config
from stapo_lite.extras.quickstart.model import fetch_model

SETTINGS = [
    "quantization=nf4",
    "rollout.quantization=bitsandbytes",
    "train.batch_size=4",
    "train.mini_batch_size=2",
    "train.gradient_checkpointing=true",
    "log.log_completions_steps=0",
]


def run(share_base: str, settings: list[str]) -> dict[str, Any]:
    """One run, in this process."""
    start, seconds, first = time.perf_counter(), [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"rollout.share_base={share_base}", f"output_dir={folder}/run", *settings]
        rewards = []
        for metrics in Trainer(config=load_config(QUICKSTART, changes)):
            first = first or time.perf_counter() - start
            seconds.append(metrics["seconds_step"])
            compared = ("reward", "grad_norm", "sampler_gap_mean")
            rewards.append([metrics.get(name) for name in compared])
            resident = psutil.Process().memory_info().rss / 2**30
    result = {
        "first step": first,
        "step": statistics.median(seconds[1:] or seconds),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "resident": resident,
        "metrics": rewards,
    }
    if torch.cuda.is_available():
        result["card"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = [*SETTINGS, f"train.max_steps={arguments.steps}", *arguments.set]
    if arguments.one:
        print(json.dumps(run(arguments.one, settings)))
        return
    fetch_model()
    command = [sys.executable, __file__, "--steps", str(arguments.steps)]
    runs: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    for pair in range(arguments.pairs):
        for side in list(runs)[:: (-1) ** pair]:  # the first one alternates
            asked = [*command, "--one", side, "--set", *arguments.set]
            done = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True)
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    metrics = [run.pop("metrics") for side in runs.values() for run in side]
    medians = {
        side: {key: statistics.median(run[key] for run in done) for key in done[0]}
        for side, done in runs.items()
    }
    same = all(values == metrics[0] for values in metrics)
    save({"medians": medians, "metrics equal to the bit": same, "runs": runs}, arguments.out)


if __name__ == "__main__":
    main()
