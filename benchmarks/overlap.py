"""Does sampling ahead hide the shorter phase? A server on one core, a trainer on the other, `rollout.max_lag` 0 and 1.

    python benchmarks/overlap.py [--out benchmarks/results/overlap.json]

Runs of the quickstart's task in alternation; medians over their steps, less the first two. At best a step takes as long
as the longer of its two phases takes alone, which is what max_lag=0 measures.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import save

from stapo_lite.quickstart import fetch_model
from stapo_lite.tracking import read_metrics

CONFIG = "configs/quickstart.yaml"
PORT = 8765


def run(folder: Path, lag: int, steps: int, model: str) -> dict[str, float]:
    """Median seconds of a run's steps and phases."""
    overrides = [f"model={model}", f"output_dir={folder}", "rollout.engine=server", f"rollout.max_lag={lag}"]
    overrides += [f"rollout.servers=[http://127.0.0.1:{PORT}]", f"train.max_steps={steps}"]
    trainer = [sys.executable, "-m", "stapo_lite.train", CONFIG, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(["taskset", "-c", "1", *trainer], check=True, stdout=subprocess.DEVNULL, env=environment)
    metrics = read_metrics(folder)[2:]
    names = ("seconds_rollout", "seconds_update", "seconds_step", "lag_mean")
    return {name: statistics.median(m[name] for m in metrics) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = str(fetch_model())
    server = [sys.executable, "-m", "stapo_lite.rollout.serve", CONFIG, "--port", str(PORT)]
    server += [f"model={model}", "rollout.engine=server", "rollout.max_lag=1"]
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["taskset", "-c", "0", *server], env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
        )
        try:
            for pair in range(arguments.pairs):
                for lag in (0, 1):
                    runs[lag].append(run(Path(folder) / f"{pair}-{lag}", lag, arguments.steps, model))
                    print(lag, runs[lag][-1], flush=True)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    apart, ahead = ({name: statistics.median(r[name] for r in runs[lag]) for name in runs[lag][0]} for lag in (0, 1))
    ratios = [one["seconds_step"] / zero["seconds_step"] for zero, one in zip(runs[0], runs[1], strict=True)]
    result = {
        "max_lag=0": apart,
        "max_lag=1": ahead,
        "step, max_lag=1 / max_lag=0, median of pairs": statistics.median(ratios),
        "the longer phase / the step of max_lag=0": max(apart["seconds_rollout"], apart["seconds_update"])
        / apart["seconds_step"],
        "pairs": ratios,
    }
    save(result, arguments.out)


if __name__ == "__main__":
    main()
