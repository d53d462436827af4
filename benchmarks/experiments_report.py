"""What the experiments found: a table, paired differences and a figure, from the results of `experiments.py`.

    python benchmarks/experiments_report.py [--results FOLDER ...] [--less METHOD] [--figure docs/experiments.png]

Several folders are read as one study, cut to its shortest run: `--results results/writing results/sensitivity`.
Everything is a number per run first; methods are compared seed by seed. The training's rewards and entropies at a step
are means of five, entropy is the sampled negative log-probability in nats, and "first steps" are five. The test of a
difference is the exact paired permutation test (the sign of each seed's difference is flipped), whose smallest p with n
seeds is 2 / 2^n: with three seeds nothing can be significant, and the table says so by its p.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from scipy.stats import permutation_test

from stapo_lite.evaluation.results import markdown
from stapo_lite.files import read_lines
from stapo_lite.training.charts import COLOURS

HERE = Path(__file__).parent
WINDOW = 5
"""Steps over which curves and last values are means."""
FIGURE = (
    ("stapo", "justrl", "grpo", "20-entropy", "trl-dapo"),
    ("stapo", "full", "high-entropy", "random", "lower-half", "upper-half"),
)
"""Methods in each row of the figure."""
COMPARED = ("held-out reward", "reward, all steps", "entropy at reward 0.3", "entropy at the end", "NLL under the base")
"""Measures whose differences are tested: where a run ends, how fast it learns, entropy on the way and at the end, how
improbable its last answers are to the untrained base."""
Runs = dict[str, dict[int, dict[str, float]]]
"""Method -> seed -> measure -> value."""


def load(folders: Sequence[Path]) -> dict[str, dict[int, tuple[list[dict], list[dict]]]]:
    """Metrics and held-out lines by method and seed, as far as all runs go."""
    found: dict[str, dict[int, tuple[list[dict], list[dict]]]] = {}
    for run in sorted(path for folder in folders for path in folder.glob("*/environment.json")):
        method, _, seed = run.parent.name.rpartition("-")
        lines = read_lines(run.parent / "metrics.jsonl"), read_lines(run.parent / "held_out.jsonl")
        found.setdefault(method, {})[int(seed)] = lines
    end = min((len(metrics) for seeds in found.values() for metrics, _ in seeds.values()), default=0)

    def cut(lines: list[dict]) -> list[dict]:
        return [line for line in lines if line["step"] <= end]

    return {
        method: {seed: (cut(metrics), cut(held_out)) for seed, (metrics, held_out) in seeds.items()}
        for method, seeds in found.items()
    }


def smooth(metrics: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Means of a metric over WINDOW steps, the first ones over fewer; a step without a value is left out."""
    windows = [metrics[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(metrics))]
    return [fmean([m[name] for m in window if m[name] is not None] or [math.nan]) for window in windows]


def measures(metrics: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> dict[str, float]:
    """One run in numbers; NaN for what it does not reach, or did not measure."""
    reward, entropy = smooth(metrics, "reward"), smooth(metrics, "sampled_nll")
    last = defaultdict(lambda: math.nan, held_out[-1] if held_out else {})

    def reaches(level: float) -> int | None:
        """The first step where the mean reward does."""
        return next((step for step, value in enumerate(reward, start=1) if step >= WINDOW and value >= level), None)

    def percent(name: str, steps: int | None = None) -> float:
        """Mean over the steps that have it."""
        return 100 * fmean([m[name] for m in metrics[:steps] if m.get(name) is not None] or [math.nan])

    learned, halfway = reaches(0.3), next((look for look in held_out if look["step"] == 20), {})
    return {
        "held-out reward": last["reward"],
        "greedy, step 20": halfway.get("greedy_reward", math.nan),
        "reward, all steps": fmean(m["reward"] for m in metrics),
        "steps to 0.5": reaches(0.5) or math.nan,
        "entropy at reward 0.3": entropy[learned - 1] if learned else math.nan,
        "entropy at the end": entropy[-1],
        "KL from the base": last["base_nll"] - last["nll"],
        "NLL under the base": last["base_nll"],
        "spurious, %, first steps": percent("spurious_share", WINDOW),
        "norm share, %, first steps": percent("spurious_gradient_share", WINDOW),
        "silenced, %": percent("silenced_share"),
    }


def table(runs: Runs) -> str:
    """Mean and standard deviation of each measure over seeds; over those that have it, where not all do."""
    names = list(next(iter(next(iter(runs.values())).values())))
    rows = [["method", "seeds", *names]]
    for method, seeds in runs.items():
        cells = []
        for name in names:
            values = [value for run in seeds.values() if (value := run[name]) == value]
            spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            missing = f" ({len(values)} of {len(seeds)})" if len(values) < len(seeds) else ""
            cells.append(f"{fmean(values):.2f}{spread}{missing}" if values else "none")
        rows.append([method, str(len(seeds)), *cells])
    return markdown(rows)


def mean_difference(a: np.ndarray, b: np.ndarray, axis: int) -> Any:
    """The statistic of the permutation test."""
    return (a - b).mean(axis)


def differences(runs: Runs, base: str) -> str:
    """Paired differences of every method from one: mean, standard deviation, and the permutation test's p; none where a
    seed lacks the measure."""
    rows = [["less " + base, "pairs", *(cell for name in COMPARED for cell in (name, "p"))]]
    for method, seeds in runs.items():
        common = sorted(seeds.keys() & runs.get(base, {}).keys())
        if method == base or len(common) < 2:
            continue
        cells = []
        for name in COMPARED:
            pairs = [np.array([side[seed][name] for seed in common]) for side in (seeds, runs[base])]
            if np.isnan(pairs).any():
                cells += ["", ""]
                continue
            test = permutation_test(pairs, mean_difference, vectorized=True, permutation_type="samples")
            cells += [f"{test.statistic:+.2f} ± {stdev(pairs[0] - pairs[1]):.2f}", f"{test.pvalue:.2f}"]
        rows.append([method, str(len(common)), *cells])
    return markdown(rows)


def draw(found: dict[str, dict[int, tuple[list[dict], list[dict]]]], path: Path) -> None:
    """Reward and entropy over the steps, the paper's methods above and the ablations of the mask below: the mean over
    seeds in a band of one standard deviation, named at its end."""
    rows = [present for row in FIGURE if (present := [method for method in row if method in found])]
    size = (10, 0.5 + 3.5 * len(rows))
    figure, panels = plt.subplots(len(rows), 2, figsize=size, layout="constrained", squeeze=False, sharey="col")
    for methods, line in zip(rows, panels, strict=True):
        colours = dict(zip(methods, COLOURS, strict=False))
        for axes, (name, label) in zip(line, (("reward", "reward"), ("sampled_nll", "entropy [nats]")), strict=True):
            ends = {method: band(axes, found[method], name, colours[method]) for method in methods}
            axes.set(xlabel="step", ylabel=label)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.02)
            place_names(axes, ends, colours)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def band(axes: Axes, seeds: dict[int, tuple[list[dict], list[dict]]], name: str, colour: str) -> tuple[int, float]:
    """Draw one method; return where its line ends."""
    curves = np.array([smooth(metrics, name) for metrics, _ in seeds.values()])
    steps, middle = np.arange(1, curves.shape[1] + 1), curves.mean(0)
    axes.plot(steps, middle, color=colour, linewidth=1.6)
    if len(curves) > 1:
        spread = curves.std(0, ddof=1)
        axes.fill_between(steps, middle - spread, middle + spread, color=colour, alpha=0.15, linewidth=0)
    return int(steps[-1]), float(middle[-1])


def place_names(axes: Axes, ends: dict[str, tuple[int, float]], colours: dict[str, str]) -> None:
    """Write each method's name where its line ends, apart from the others and not above the axes."""
    low, high = axes.get_ylim()
    apart = 0.06 * (high - low)
    heights: list[float] = []
    for _, value in sorted(ends.values(), key=lambda end: end[1]):
        heights.append(max(value, heights[-1] + apart) if heights else value)
    down = max(0.0, heights[-1] - high)
    for (method, (step, _)), height in zip(sorted(ends.items(), key=lambda end: end[1][1]), heights, strict=True):
        axes.annotate(
            method, (step, height - down), (4, 0), textcoords="offset points", color=colours[method], va="center"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", default=[HERE / "results/writing"], metavar="FOLDER")
    parser.add_argument("--less", default="stapo", metavar="METHOD", help="which the others are compared with")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    found = load(given.results)
    if not found:
        raise SystemExit(f"{' '.join(map(str, given.results))}: no finished run")
    runs = {method: {seed: measures(*lines) for seed, lines in seeds.items()} for method, seeds in found.items()}
    if given.less not in runs:
        parser.error(f"--less {given.less}: choose from {', '.join(runs)}")
    print(f"{table(runs)}\n\n{differences(runs, given.less)}")
    if given.figure:
        draw(found, given.figure)


if __name__ == "__main__":
    main()
