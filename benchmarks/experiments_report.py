"""Report what the experiments found: a table, paired differences and a figure.

    python benchmarks/experiments_report.py [STUDY] [--minus METHOD]
    [--figure docs/experiments.png]

Reads `results/STUDY.parquet`, by default that of `writing`, and cuts all runs to the shortest. Each
run is reduced to a few numbers first; methods are then compared seed by seed. Training rewards and
entropies at a step are means over five steps, entropy is the sampled negative log-probability in
nats, and "first steps" are the first five. The test of a difference is the exact paired permutation
test (the sign of each seed's difference is flipped). Its smallest p with n seeds is 2 / 2^n, so
nothing can be significant with three seeds, and the p in the table shows that.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.stats import permutation_test
from study_file import Row, add_results_option, read_rows, run_key, study_path

from stapo_lite.extras.evaluation.results import markdown

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999",
)  # fmt: skip
WINDOW = 5
"""Steps that curves and last values are averaged over."""
FIGURE = (
    ("stapo", "justrl", "grpo", "20-entropy", "trl-dapo"),
    ("stapo", "full", "high-entropy", "random", "lower-half", "upper-half"),
)
"""Methods in each row of the figure: the paper's methods, then the ablations of the mask."""
COMPARED = (
    "held-out reward",
    "reward, all steps",
    "entropy at reward 0.3",
    "entropy at the end",
    "NLL under the base",
)
"""Measures whose differences are tested: the final reward, how fast a run learns, the entropy on
the way and at the end, and how improbable the last answers are to the untrained base."""
Steps = list[Row]
"""The rows of one run, in order; values that a step does not have are left out."""
Runs = dict[str, dict[int, dict[str, float]]]
"""Method -> seed -> measure -> value."""


def load(path: Path) -> dict[str, dict[int, Steps]]:
    """Read a study's runs by method and seed, each up to the last step that all of them have."""
    found: dict[str, dict[int, Steps]] = {}
    for row in read_rows(path):
        method, seed = run_key(row)
        found.setdefault(method, {}).setdefault(seed, []).append(row)
    runs = [steps for seeds in found.values() for steps in seeds.values()]
    end = min((steps[-1]["step"] for steps in runs), default=0)
    for steps in runs:
        steps[:] = [row for row in steps if row["step"] <= end]
    return found


def trained(steps: Steps) -> Steps:
    """The training steps: step 0, which is the untrained model, is none."""
    return [row for row in steps if row["step"] > 0]


def column(rows: Steps, name: str) -> list[float]:
    """A metric at the steps that have it."""
    return [row[name] for row in rows if name in row]


def mean(rows: Steps, name: str) -> float:
    """The mean of a metric over the steps that have it; NaN if none does."""
    found = column(rows, name)
    return fmean(found) if found else math.nan


def smooth(rows: Steps, name: str, window: int = WINDOW) -> list[float]:
    """Means of a metric over `window` steps each, the first ones over fewer; NaN if none of them
    has it."""
    values = pd.Series([row.get(name) for row in rows], dtype=float)
    return values.rolling(window, min_periods=1).mean().tolist()


def first_reaching(level: float, smoothed: Sequence[float]) -> int | None:
    """The first step, from WINDOW on, at which the smoothed values reach a level."""
    for step, value in enumerate(smoothed, start=1):
        if step >= WINDOW and value >= level:
            return step
    return None


def measures(steps: Steps) -> dict[str, float]:
    """One run in numbers; NaN if it does not reach the level, or did not measure the value."""
    rows = trained(steps)
    reward, entropy = smooth(rows, "reward"), smooth(rows, "sampled_nll")
    evaluations = [row for row in steps if "held_out_reward" in row]
    last = evaluations[-1] if evaluations else {}
    halfway = [row for row in evaluations if row["step"] == 20]
    learned = first_reaching(0.3, reward)
    base_nll = last.get("held_out_base_nll", math.nan)
    return {
        "held-out reward": last.get("held_out_reward", math.nan),
        "greedy, step 20": mean(halfway, "held_out_greedy_reward"),
        "reward, all steps": mean(rows, "reward"),
        "steps to 0.5": first_reaching(0.5, reward) or math.nan,
        "entropy at reward 0.3": entropy[learned - 1] if learned else math.nan,
        "entropy at the end": entropy[-1],
        "KL from the base": base_nll - last.get("held_out_nll", math.nan),
        "NLL under the base": base_nll,
        "spurious, %, first steps": 100 * mean(rows[:WINDOW], "spurious_share"),
        "norm share, %, first steps": 100 * mean(rows[:WINDOW], "spurious_gradient_share"),
        "silenced, %": 100 * mean(rows, "silenced_share"),
    }


def measure_runs(found: dict[str, dict[int, Steps]]) -> Runs:
    """Each run in numbers."""
    return {
        method: {seed: measures(steps) for seed, steps in seeds.items()}
        for method, seeds in found.items()
    }


def table(runs: Runs) -> str:
    """Mean and standard deviation of each measure over the seeds that have it."""
    names = list(next(iter(next(iter(runs.values())).values())))
    rows = [["method", "seeds", *names]]
    for method, seeds in runs.items():
        cells = [cell([run[name] for run in seeds.values()]) for name in names]
        rows.append([method, str(len(seeds)), *cells])
    return markdown(rows)


def cell(of_seeds: Sequence[float]) -> str:
    """Mean and standard deviation, and how many seeds have the measure if not all do."""
    values = [value for value in of_seeds if not math.isnan(value)]
    if not values:
        return "none"
    text = f"{fmean(values):.2f}"
    if len(values) > 1:
        text += f" ± {stdev(values):.2f}"
    if len(values) < len(of_seeds):
        text += f" ({len(values)} of {len(of_seeds)})"
    return text


def mean_difference(a: np.ndarray, b: np.ndarray, axis: int) -> Any:
    """The statistic of the permutation test."""
    return (a - b).mean(axis)


def differences(runs: Runs, base: str) -> str:
    """Paired differences of every method from one: mean, standard deviation, and the permutation
    test's p; empty if a seed lacks the measure."""
    header = ["minus " + base, "pairs"]
    for name in COMPARED:
        header += [name, "p"]
    rows = [header]
    for method, seeds in runs.items():
        common = sorted(seeds.keys() & runs.get(base, {}).keys())
        if method == base or len(common) < 2:
            continue
        cells = []
        for name in COMPARED:
            ours = np.array([seeds[seed][name] for seed in common])
            theirs = np.array([runs[base][seed][name] for seed in common])
            cells += difference(ours, theirs)
        rows.append([method, str(len(common)), *cells])
    return markdown(rows)


def difference(ours: np.ndarray, theirs: np.ndarray, digits: int = 2) -> tuple[str, str]:
    """Mean with standard deviation, and p, of the differences of pairs.

    Args:
        digits: decimals; p has one more.
    """
    if np.isnan(ours).any() or np.isnan(theirs).any():
        return "", ""
    test = permutation_test(
        [ours, theirs], mean_difference, vectorized=True, permutation_type="samples"
    )
    value = f"{test.statistic:+.{digits}f} ± {stdev(ours - theirs):.{digits}f}"
    return value, f"{test.pvalue:.{digits + 1}f}"


def draw(
    found: dict[str, dict[int, Steps]], path: Path, lines: Sequence[Sequence[str]] = FIGURE
) -> None:
    """Draw reward and entropy over the steps, a row of panels for each line of methods: each run as
    a thin line, the median of a method as a thick one, named at its end. Runs of hundreds of steps
    are smoothed over more than WINDOW, or nothing is seen for the noise."""
    rows = [[method for method in line if method in found] for line in lines]
    rows = [row for row in rows if row]
    size = (10, 0.5 + 3.5 * len(rows))
    figure, panels = plt.subplots(
        len(rows), 2, figsize=size, layout="constrained", squeeze=False, sharey="col"
    )
    curves = (("reward", "reward"), ("sampled_nll", "-ln pi of the sampled tokens [nats]"))
    for methods, line in zip(rows, panels, strict=True):
        colours = dict(zip(dict.fromkeys(("stapo", "justrl", *methods)), COLOURS, strict=False))
        for axes, (name, label) in zip(line, curves, strict=True):
            ends = [draw_runs(axes, found[m], name, m, colours[m]) for m in methods]
            axes.set(xlabel="step", ylabel=label)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.02)
            place_names(axes, ends)
    figure.savefig(path, dpi=130)
    plt.close(figure)


class End(NamedTuple):
    """The last point of a method's curve."""

    method: str
    colour: str
    step: int
    value: float


def draw_runs(axes: Axes, seeds: dict[int, Steps], name: str, method: str, colour: str) -> End:
    """Draw the runs of one method, and their median."""
    runs = [trained(steps) for steps in seeds.values()]
    window = max(WINDOW, len(runs[0]) // 32)
    curves = np.array([smooth(run, name, window) for run in runs])
    steps, middle = np.arange(1, curves.shape[1] + 1), np.median(curves, axis=0)
    axes.plot(steps, curves.T, color=colour, linewidth=0.7, alpha=0.35)
    axes.plot(steps, middle, color=colour, linewidth=1.8)
    return End(method, colour, int(steps[-1]), float(middle[-1]))


def place_names(axes: Axes, ends: Sequence[End]) -> None:
    """Write each method's name at the end of its curve, with gaps between the names, none of them
    above the axes."""
    low, high = axes.get_ylim()
    apart = 0.06 * (high - low)
    upwards = sorted(ends, key=lambda end: end.value)
    heights: list[float] = []
    for end in upwards:
        lowest = heights[-1] + apart if heights else end.value
        heights.append(max(end.value, lowest))
    down = max(0.0, heights[-1] - high)
    for end, height in zip(upwards, heights, strict=True):
        axes.annotate(
            end.method,
            (end.step, height - down),
            (4, 0),
            textcoords="offset points",
            color=end.colour,
            va="center",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", nargs="?", default="writing", metavar="STUDY")
    add_results_option(parser)
    parser.add_argument(
        "--minus", default="stapo", metavar="METHOD", help="compare the others with this one"
    )
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    found = load(study_path(given.results, given.study))
    if not found:
        raise SystemExit(f"{given.study}: no finished run")
    runs = measure_runs(found)
    if given.minus not in runs:
        parser.error(f"--minus {given.minus}: choose from {', '.join(runs)}")
    print(f"{table(runs)}\n\n{differences(runs, given.minus)}")
    if given.figure:
        draw(found, given.figure)


if __name__ == "__main__":
    main()
