"""Every algorithm on one config, one after the other: what changes by one word.

    python benchmarks/presets.py configs/quickstart.yaml [key.sub=value ...] --out FILE

Prints reward and the spurious tokens of each run, means over its first and last five steps; FILE gets it as JSON.
One seed of a toy problem shows that each preset trains; it says nothing about which is better.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

from common import save

from stapo_lite.config import Config
from stapo_lite.training.report import mean
from stapo_lite.training.tracking import read_metrics

ALGORITHMS = get_args(Config.model_fields["algorithm"].annotation)
METRICS = ("reward", "entropy", "completion_length", "spurious_share", "spurious_gradient_share", "silenced_share",
           "sampling_rounds", "kl", "seconds_step")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_intermixed_args()
    results = {}
    for algorithm in arguments.algorithms:
        with tempfile.TemporaryDirectory() as folder:
            overrides = [*arguments.overrides, f"algorithm={algorithm}", f"output_dir={folder}/run"]
            command = [sys.executable, "-m", "stapo_lite.train", arguments.config, *overrides]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            metrics = read_metrics(Path(folder) / "run")
        results[algorithm] = {name: [mean(metrics[:5], name), mean(metrics[-5:], name)] for name in METRICS}
        print(algorithm, results[algorithm], file=sys.stderr, flush=True)
    document = {"first and last five steps": results, "config": arguments.config, "overrides": arguments.overrides}
    save(document, arguments.out)


if __name__ == "__main__":
    main()
