"""Does sampling ahead hide the shorter phase? A server on one core, a trainer on the other, `rollout.max_lag` 0 and 1.

    python benchmarks/overlap.py [CONFIG] [--pairs 3] [--steps 8] [--out benchmarks/results/overlap.json]

Runs of the quickstart, or of another config, in alternation; medians over their steps, less the first two. At best a
step takes as long as the longer of its two phases takes alone, which is what max_lag=0 measures.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import QUICKSTART, save

from stapo_lite.training.tracking import read_metrics

CORES = sorted(os.sched_getaffinity(0))


def on_core(core: int, program: str, *arguments: str | Path) -> list[str]:
    """The command of one of the package's programs, pinned to a core."""
    return ["taskset", "-c", str(core), sys.executable, "-m", f"stapo_lite.{program}", *map(str, arguments)]


def run(config: Path, folder: Path, port: int, lag: int, steps: int) -> dict[str, float]:
    """Median seconds of a run's steps and phases."""
    overrides = [f"output_dir={folder}", "rollout.engine=server", f"rollout.max_lag={lag}"]
    overrides += [f"rollout.servers=[http://127.0.0.1:{port}]", f"train.max_steps={steps}"]
    subprocess.run(on_core(CORES[-1], "train", config, *overrides), check=True, stdout=subprocess.DEVNULL)
    metrics = read_metrics(folder)[2:]
    names = ("seconds_rollout", "seconds_update", "seconds_step", "lag_mean")
    return {name: statistics.median(m[name] for m in metrics) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=QUICKSTART)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="at least 3")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    overrides = ["rollout.engine=server", "rollout.max_lag=1"]
    server = on_core(CORES[0], "serve", arguments.config, *overrides, "--port", str(port))
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(server, start_new_session=True)
        try:
            for pair in range(arguments.pairs):
                for lag in (0, 1):
                    runs[lag].append(run(arguments.config, Path(folder) / f"{pair}-{lag}", port, lag, arguments.steps))
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
