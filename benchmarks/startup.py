"""Seconds until a command answers what needs no weights: help, a dry run, a mistake in the YAML, a plan.

    python benchmarks/startup.py [--model FOLDER] [--runs 5] [--out FILE]

Each figure is the median of whole processes, started one after the other, the commands in turn; `user` is processor
time, which other work on the machine changes least.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import QUICKSTART, save

from stapo_lite.tools.quickstart import fetch_model

COMMANDS = {
    "train --help": ["train", "--help"],
    "train --dry-run": ["train", str(QUICKSTART), "--dry-run"],
    "an unknown key": ["train", str(QUICKSTART), "train.batch=3"],
    "evaluate, a value out of range": ["evaluate", str(QUICKSTART.with_name("eval.yaml")), "rollout.temperature=0"],
    "serve --help": ["serve", "--help"],
    "grade --help": ["grade", "--help"],
    "plan": ["plan", str(QUICKSTART.with_name("qwen8b_qlora.yaml")), "--gpu-memory", "24"],
}


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds of the wall and of the processor."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "stapo_lite", *command], check=False, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the plan's; default: SmolLM2-135M-Instruct")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    COMMANDS["plan"].append(f"model={arguments.model or fetch_model()}")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs + 1):  # the first one fills caches
        for name, command in COMMANDS.items():
            seconds[name].append(measure(command))
    result = {
        name: {"wall": statistics.median(w for w, _ in times[1:]), "user": statistics.median(u for _, u in times[1:])}
        for name, times in seconds.items()
    }
    save({"runs": arguments.runs, "seconds": result}, arguments.out)


if __name__ == "__main__":
    main()
