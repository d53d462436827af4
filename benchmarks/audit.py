"""What the token log costs: the share of a step's time that is spent in it.

    python benchmarks/audit.py [CONFIG] [--steps 7] --out benchmarks/results/audit.json

Runs the quickstart, or another config, with the audit on, once as it is and once with ten times as many candidates. On
a CPU nothing runs beside, so the time inside the log's methods is all that it takes.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import QUICKSTART, save, timed

from stapo_lite import Trainer
from stapo_lite.files import read_lines
from stapo_lite.training.token_log import TokenLog


def measure(config: Path, steps: int, **s2t: float) -> dict[str, Any]:
    shares = []
    with tempfile.TemporaryDirectory() as folder, timed(TokenLog, "see", "note", "write") as spent:
        overrides = [f"output_dir={folder}", "log.audit_tokens=64", f"train.max_steps={steps}", "log.save_steps=0"]
        overrides += [f"objective.s2t.{key}={value}" for key, value in s2t.items()]
        for metrics in Trainer(config, overrides):
            shares.append(spent[0] / metrics["seconds_step"])
            spent[0] = 0.0
        candidates = [sum(line["tokens"][:2]) for line in read_lines(Path(folder) / "quadrants.jsonl")]
        size = sum((Path(folder) / name).stat().st_size for name in ("tokens.jsonl", "quadrants.jsonl"))
    shares = shares[1:]  # the first step warms up
    return {
        "steps": len(shares),
        "candidates_per_step": median(candidates),
        "share_of_step_median": median(shares),
        "share_of_step_largest": max(shares),
        "bytes_per_step": size / steps,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=QUICKSTART)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=7, help="at least 2")
    arguments = parser.parse_args()
    config, steps = arguments.config, arguments.steps
    save({config.stem: measure(config, steps), "many candidates": measure(config, steps, tau_p=0.3)}, arguments.out)
