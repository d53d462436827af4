"""How the cost of an update grows with the length and the number of completions, and with
processes: ours against TRL's GRPOTrainer.

    python benchmarks/scaling.py [--lengths 128 512 2048 4096] [--completions 4 16 64]
    [--processes 2] [--pairs 3] [--model FOLDER] [--out FILE]
    python benchmarks/scaling.py --figure docs/scaling.png --out benchmarks/results/scaling.json

Each point is a run of `update.py`, in which the sides alternate: four completions of each length,
and each number of completions of 256 tokens at most. Seconds and peak memory beyond the model are
given for a completion token. The model is by default a random one with six layers of 512 features
and a vocabulary of 32,000; a micro-batch of 4,112 tokens has room for the longest.

`--figure` draws what is in `--out` and measures nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save
from random_model import build, qwen3

SIDES = ("ours", "TRL")
GENERATIONS = 4
LENGTH = 256
"""Tokens of the longest completion where the number of completions grows."""
MICRO_BATCH = 4112
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}


def measure(model: Path, length: int, completions: int, processes: int, pairs: int) -> Any:
    """Run `update.py` at one point; its result for groups that all have an advantage."""
    sizes = ["--num_processes", str(processes), "--num_machines", "1", "--main_process_port", "0"]
    if processes > 1:
        sizes.append("--multi_gpu")  # one process for each device; on a CPU they share it
    sizes += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *sizes]
    prompts = max(1, completions // GENERATIONS)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = {
            "model": model,
            "prompts": prompts,
            "generations": completions // prompts,
            "longest": length,
            "max-tokens": MICRO_BATCH,
            "zero": 0,
            "pairs": pairs,
            "out": out,
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        script = Path(__file__).with_name("update.py")
        subprocess.run([*launch, str(script), *words], check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text("utf-8"))["zero 0.0"]


def point(result: dict[str, Any]) -> dict[str, Any]:
    """What one run of `update.py` says for a completion token."""
    tokens = result["completion tokens"]
    return {
        "completion tokens": tokens,
        "TRL / ours": result["TRL / ours"],
        "TRL / ours of each pair": result["TRL / ours of each pair"],
        "ms": {side: 1000 * result["seconds"][side] / tokens for side in SIDES},
        "peak KiB": {
            side: 1024 * result["peak MiB beyond the models"][side] / tokens for side in SIDES
        },
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Milliseconds and KiB for a completion token, against length and number of completions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for column, (key, label) in enumerate(
        [
            ("lengths", "longest of 4 completions, tokens"),
            ("completions", "completions of 256 tokens"),
        ]
    ):
        points = result[key]
        sizes = list(map(int, points))
        for row, quantity in enumerate(("ms", "peak KiB")):
            panel = axes[row][column]
            for side in SIDES:
                values = [points[str(size)][quantity][side] for size in sizes]
                panel.plot(sizes, values, marker="o", label=side)
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
        axes[1][column].set_xlabel(label)
        axes[1][column].set_xticks(sizes, list(map(str, sizes)))
    for row in axes:
        row[0].set_ylim(bottom=0)  # once all curves are there
    axes[0][0].set_ylabel("ms for a completion token")
    axes[1][0].set_ylabel("KiB at the peak")
    axes[0][0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512, 2048, 4096])
    parser.add_argument("--completions", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    if given.figure:
        draw(json.loads(given.out.read_text("utf-8")), given.figure)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or build(Path(folder), qwen3("0.6B", **SMALL))

        def run(length: int, completions: int, processes: int = 1) -> dict[str, Any]:
            return point(measure(model, length, completions, processes, given.pairs))

        result: dict[str, Any] = {
            "lengths": {length: run(length, 4) for length in given.lengths},
            "completions": {count: run(LENGTH, count) for count in given.completions},
        }
        if given.processes > 1:
            many = max(given.completions)
            shared = run(LENGTH, many, given.processes)
            result["processes"] = {1: result["completions"][many], given.processes: shared}
    save({"pairs": given.pairs} | result, given.out)


if __name__ == "__main__":
    main()
