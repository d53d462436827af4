"""Time the commands that need no weights: help, a dry run, a mistake in the config, a plan.

    python benchmarks/startup.py [--model FOLDER] [--runs 5] [--out FILE]

Each figure is the median in seconds over whole processes, started one after the other, with the
commands in turn. `user` is processor time, which depends least on other work on the machine.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import QUICKSTART, save

from stapo_lite.extras.quickstart.model import fetch_model

COMMANDS = {
    "train --help": ["train", "--help"],
    "train --dry-run": ["train", str(QUICKSTART), "--dry-run"],
    "an unknown key": ["train", str(QUICKSTART), "train.batch=3"],
    "evaluate, a value out of range": [
        "evaluate",
        str(QUICKSTART.with_name("eval.yaml")),
        "rollout.temperature=0",
    ],
    "serve --help": ["serve", "--help"],
    "plan": ["plan", str(QUICKSTART.with_name("qwen8b_qlora.yaml")), "--gpu-memory", "24"],
}


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds of wall clock and of processor time that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "stapo_lite", *command], check=False, capture_output=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, user


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="model of the plan; default: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    COMMANDS["plan"].append(f"model={arguments.model or fetch_model()}")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs + 1):  # the first round fills caches and does not count
        for name, command in COMMANDS.items():
            seconds[name].append(measure(command))
    result = {}
    for name, times in seconds.items():
        walls, users = zip(*times[1:], strict=True)
        result[name] = {"wall": statistics.median(walls), "user": statistics.median(users)}
    save({"runs": arguments.runs, "seconds": result}, arguments.out)


if __name__ == "__main__":
    main()
