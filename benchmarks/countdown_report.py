"""Report what the study of countdown found (docs/results.md): when rewards break, and entropy by
then.

    python benchmarks/countdown_report.py [STUDY] [--entropy entropy] [--figure docs/countdown.png]

Rewards and entropies are means over five steps. The outcomes' entropy is, as the rules had it,
`sampled_nll`, the negative log-probability of all sampled tokens in nats; `--entropy entropy` takes
the exact one, over the tokens that have an advantage. A run breaks at the first step whose reward
is below half of the highest before it. A run that does not is censored: it counts as one step more
than the study has, so that p is exact but the mean difference is a lower bound.

The two primary outcomes compare each method with `justrl`, seed by seed: the step of the break; and
the entropy at the earlier break of the two, or at the end if neither breaks. Both have the exact
paired permutation test, and Holm's correction for the two.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from experiments_report import Steps, column, difference, draw, load, mean, smooth, trained
from study_csv import add_results_option, steps_paths

from stapo_lite.extras.evaluation.results import markdown

BASE = "justrl"
LAST, EVERY = slice(-50, None), slice(None)
ROUNDING = 1e-5
"""Most by which the five digits of the CSVs can move a reward against half of another. Rewards are
multiples of 1 / 128, so that many are exactly the half."""
FIGURE = (
    ("justrl", "stapo", "window", "full", "random", "stare"),
    ("justrl", "grpo", "20-entropy", "cispo", "dppo"),
)


def break_step(reward: Sequence[float]) -> int:
    """The first step whose smoothed reward is below half of the highest up to it; one more than
    there are steps if none is."""
    highest = list(itertools.accumulate(reward, max))
    for step, (value, peak) in enumerate(zip(reward, highest, strict=True), start=1):
        if value < peak / 2 - ROUNDING:
            return step
    return len(reward) + 1


def entropy_at(steps: Steps, step: int, name: str) -> float:
    """The smoothed entropy at a step, or at the last one if there are fewer."""
    entropy = smooth(trained(steps), name)
    return entropy[min(step, len(entropy)) - 1]


def describe(seeds: dict[int, Steps]) -> dict[str, str]:
    """What a method's runs did, in cells of a table."""
    runs = [trained(steps) for steps in seeds.values()]
    rewards = [smooth(run, "reward") for run in runs]
    broken = [step for step in map(break_step, rewards) if step <= len(runs[0])]
    sums = [column(steps, "held_out_wrong_sums") for steps in seeds.values()]

    def average(name: str, steps: slice) -> float:
        return fmean(mean(run[steps], name) for run in runs)

    steps_of_breaks = f" (median step {median(broken):g})" if broken else ""
    return {
        "seeds": str(len(runs)),
        "breaks": f"{len(broken)}{steps_of_breaks}",
        "reward, last 50": f"{average('reward', LAST):.2f}",
        "entropy, last 50": f"{average('entropy', LAST):.2f}",
        "silenced, %": f"{100 * average('silenced_share', EVERY):.3f}",
        "wrong sums, %": f"{100 * fmean(run[-1] for run in sums):.1f}",
    }


def table(found: dict[str, dict[int, Steps]]) -> str:
    """What each method's runs did."""
    cells = {method: describe(seeds) for method, seeds in found.items()}
    rows = [["method", *next(iter(cells.values()))]]
    for method, of_method in cells.items():
        rows.append([method, *of_method.values()])
    return markdown(rows)


def primary(found: dict[str, dict[int, Steps]], entropy_name: str) -> str:
    """The primary outcomes of each method minus those of BASE."""
    rows = [
        [
            f"minus {BASE}",
            "pairs",
            "step of the break",
            "p",
            "entropy by then",
            "p",
            "p of both by Holm",
        ]
    ]
    for method, seeds in found.items():
        common = sorted(seeds.keys() & found[BASE].keys())
        if method == BASE or len(common) < 2:
            continue
        breaks, entropies = [], []
        for seed in common:
            pair = (seeds[seed], found[BASE][seed])
            at = [break_step(smooth(trained(steps), "reward")) for steps in pair]
            breaks.append(at)
            entropies.append([entropy_at(steps, min(at), entropy_name) for steps in pair])
        step = difference(*np.array(breaks, dtype=float).T)
        entropy = difference(*np.array(entropies).T)
        low, high = sorted((float(step[1]), float(entropy[1])))
        holm = f"{min(1.0, 2 * low):.2f}, {min(1.0, max(2 * low, high)):.2f}"
        rows.append([method, str(len(common)), *step, *entropy, holm])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", nargs="?", default="countdown")
    add_results_option(parser)
    parser.add_argument("--entropy", choices=["sampled_nll", "entropy"], default="sampled_nll")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    found = load(steps_paths(given.results, given.study))
    if BASE not in found:
        raise SystemExit(f"{given.study}: no finished run of {BASE}")
    print(f"{table(found)}\n\n{primary(found, given.entropy)}")
    if given.figure:
        draw(found, given.figure, FIGURE)


if __name__ == "__main__":
    main()
