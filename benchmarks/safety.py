"""What it costs that a run is not lost: the snapshot at the end of each step, and a checkpoint.

    python benchmarks/safety.py [CONFIG] [--steps 7] --out benchmarks/results/safety.json

Runs the quickstart, or another config, with a checkpoint after each step.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from common import QUICKSTART, save, timed

from stapo_lite import Trainer
from stapo_lite.training import checkpoint

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=QUICKSTART)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=7, help="at least 2")
    arguments = parser.parse_args()
    steps, snapshots, checkpoints = [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        timed(checkpoint, "take_snapshot") as in_snapshots,
        timed(checkpoint, "save_checkpoint") as in_checkpoints,
    ):
        overrides = [f"output_dir={folder}", f"train.max_steps={arguments.steps}", "log.save_steps=1"]
        for metrics in Trainer(arguments.config, overrides):
            steps.append(metrics["seconds_step"])
            for spent, found in ((in_snapshots, snapshots), (in_checkpoints, checkpoints)):
                found.append(spent[0])
                spent[0] = 0.0
        size = sum(path.stat().st_size for path in checkpoint.list_checkpoints(Path(folder))[-1].iterdir())
    result = {
        "seconds_step": median(steps[1:]),
        "seconds_snapshot": median(snapshots[1:]),
        "seconds_checkpoint": median(checkpoints[1:]),
        "checkpoint_mb": size / 1e6,
    }
    save(result, arguments.out)
