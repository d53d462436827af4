"""Report whether STAPO's mask delays the break of a run (docs/results.md).

    python benchmarks/experiments.py break --seeds 0 1 2 3 4 5 6 7 8 9 10 11
    python benchmarks/break_report.py [--figure docs/break.png]

The rules, set down before any of these runs. Model, task, rollouts and code are those of
`countdown` (README.md); a run breaks at the first step whose reward, a mean over five steps, is
below half of the highest before it.

1. Calibration, with `justrl` alone, seeds 100 to 105, 800 steps, at 2.25e-3, 2.5e-3 and 2.75e-3:
   the rate is the lowest at which at least four of six runs break after step 100 and before 800. If
   there is none, it is the one with the most such breaks (the lowest of equals), and the report
   says so; if all eighteen break before step 100, it is 2.1e-3, without calibration.
2. The study `break`: twelve fresh seeds, 0 to 11, of `justrl`, `stapo`, `random` and `full`.
3. Primary outcome: the step of the break, `stapo` against `justrl`, by the exact two-sided sign
   test of pairs of one seed. A run that does not break by step 800 is censored: it counts as later
   than any that does, and a pair of two such runs is left out.
4. Secondary, with the exact permutation test of pairs and without correction: the mean entropy up
   to the earlier break of a pair, slips in fixed answers at step 800, reward of the last 50 steps;
   and how many of the broken runs come back to half of their highest reward.
5. No arm, seed or outcome is added afterwards. What else is looked at is called exploratory.

Power: for breaks drawn from those of `justrl`, independently for the two runs of a pair, the
probability that a mask that delays each break by a factor is found, in the mask's favour.
"""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiments_report import COLOURS, Steps, column, difference, load, mean, smooth, trained
from matplotlib.figure import Figure
from scipy.stats import CensoredData, binomtest, ecdf
from study_file import add_results_option, study_path

from stapo_lite.extras.evaluation.results import markdown

STUDY = "break"
BASE, MASK = "justrl", "stapo"
METHODS = (MASK, BASE, "random", "full")
STYLES = ("-", "--", "-.", ":")
"""Of the curves, which may lie on each other."""
LAST = slice(-50, None)
ROUNDING = 1e-5
"""Most by which the five digits of the kept rewards can move one against half of another. Rewards
are multiples of 1 / 128, so that many are exactly the half."""
DRAWS = 2000
FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, math.inf)
"""Of the delay; inf: no run breaks."""


def break_step(reward: Sequence[float]) -> int:
    """The first step whose smoothed reward is below half of the highest up to it; one more than
    there are steps if none is."""
    highest = list(itertools.accumulate(reward, max))
    for step, (value, peak) in enumerate(zip(reward, highest, strict=True), start=1):
        if value < peak / 2 - ROUNDING:
            return step
    return len(reward) + 1


def sign_test(base: Sequence[int], mask: Sequence[int]) -> tuple[int, int, float]:
    """Pairs in which the mask's run breaks later, pairs in which it breaks earlier, and the exact
    two-sided p. Censored runs have one step more than the study."""
    later = sum(m > b for b, m in zip(base, mask, strict=True))
    earlier = sum(m < b for b, m in zip(base, mask, strict=True))
    if later + earlier == 0:
        return 0, 0, 1.0
    return later, earlier, float(binomtest(later, later + earlier).pvalue)


def power(base: Sequence[int], censored: int, factor: float) -> float:
    """Probability that the sign test finds a delay by a factor, for pairs of independent draws from
    the breaks of the base; one of those that were censored stays so."""
    generator = np.random.default_rng(0)
    found = 0
    for _ in range(DRAWS):
        ours, theirs = generator.choice(base, (2, len(base)))
        delayed = np.minimum(np.where(ours < censored, factor * ours, censored), censored)
        later, earlier, p = sign_test(theirs.tolist(), delayed.tolist())
        found += p < 0.05 and later > earlier
    return found / DRAWS


def came_back(reward: Sequence[float], step: int) -> bool:
    """Whether the smoothed reward after a break reaches half of its highest value before it."""
    return max(reward[step:], default=0.0) >= max(reward[: step - 1]) / 2 - ROUNDING


def median_step(steps: Sequence[int], censored: int) -> str:
    """The first step by which half of the runs have broken (the Kaplan-Meier median)."""
    step = sorted(steps)[(len(steps) - 1) // 2]
    return str(step) if step < censored else f"> {censored - 1}"


def describe(seeds: Mapping[int, Steps]) -> list[str]:
    """What a method's runs did, in cells of a table."""
    runs = [trained(steps) for steps in seeds.values()]
    rewards = [smooth(run, "reward") for run in runs]
    steps = [break_step(reward) for reward in rewards]
    broken = [
        (reward, step) for reward, step in zip(rewards, steps, strict=True) if step <= len(reward)
    ]
    back = sum(came_back(*pair) for pair in broken)
    return [
        f"{len(broken)} of {len(runs)}",
        median_step(steps, len(runs[0]) + 1),
        f"{back} of {len(broken)}",
        f"{np.mean([mean(run[LAST], 'reward') for run in runs]):.2f}",
        f"{np.mean([mean(run[LAST], 'entropy') for run in runs]):.2f}",
        f"{100 * np.mean([column(own, 'held_out_wrong_sums')[-1] for own in seeds.values()]):.1f}",
    ]


def secondary(seeds: Mapping[int, Steps], base: Mapping[int, Steps]) -> list[str]:
    """Differences from the base, seed by seed, with their p. The entropy is the mean up to and with
    the step of the earlier break, or over all steps if neither run breaks."""
    pairs = []
    for seed in sorted(seeds.keys() & base.keys()):
        runs = [trained(study[seed]) for study in (seeds, base)]
        first = min(break_step(smooth(run, "reward")) for run in runs)
        sums = [100 * column(study[seed], "held_out_wrong_sums")[-1] for study in (seeds, base)]
        entropy = [mean(run[:first], "entropy") for run in runs]
        pairs.append([entropy, sums, [mean(run[LAST], "reward") for run in runs]])
    cells = []
    for outcome in np.array(pairs).transpose(1, 2, 0):
        value, p = difference(*outcome, digits=3)
        cells.append(f"{value} (p {p})")
    return cells


def draw(breaks: Mapping[str, Sequence[int]], censored: int, path: Path) -> None:
    """Kaplan-Meier curves: the share of runs that have not broken yet."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for colour, style, (method, steps) in zip(COLOURS, STYLES, breaks.items(), strict=False):
        known = np.array(steps)
        data = CensoredData.right_censored(known, known >= censored)
        curve = ecdf(data).sf
        at, share = [0, *curve.quantiles, censored], [1.0, *curve.probabilities]
        label = f"{method}: {sum(known < censored)} of {len(known)} break"
        look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 2}
        axes.step(at, [*share, share[-1]], where="post", label=label, **look)
    axes.set(xlabel="step", ylabel="share of runs that have not broken", ylim=(-0.03, 1.03))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.savefig(path, dpi=130)


def compare(
    found: Mapping[str, Mapping[int, Steps]], breaks: Mapping[str, Mapping[int, int]], censored: int
) -> str:
    """Each method against the base, in a table. Only MASK's break is a primary outcome."""
    counted = "later, earlier, equal, neither breaks"
    rows = [[f"against {BASE}", counted, "p", "entropy until then", "wrong sums, %", "reward"]]
    for method in found:
        if method == BASE:
            continue
        theirs, ours = (
            [breaks[name][seed] for seed in sorted(breaks[name])] for name in (BASE, method)
        )
        later, earlier, p = sign_test(theirs, ours)
        neither = sum(min(pair) == censored for pair in zip(theirs, ours, strict=True))
        equal = len(ours) - later - earlier - neither
        name = method if method == MASK else f"{method} (exploratory)"
        counts = f"{later}, {earlier}, {equal}, {neither}"
        rows.append([name, counts, f"{p:.4f}", *secondary(found[method], found[BASE])])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_results_option(parser)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    loaded = load(study_path(given.results, STUDY))
    found = {method: loaded[method] for method in METHODS if method in loaded}
    if BASE not in found:
        raise SystemExit(f"{STUDY}: no finished run of {BASE}")
    if any(seeds.keys() != found[BASE].keys() for seeds in found.values()):
        raise SystemExit(f"{STUDY}: not every method has the same seeds")
    breaks = {
        method: {
            seed: break_step(smooth(trained(steps), "reward")) for seed, steps in seeds.items()
        }
        for method, seeds in found.items()
    }
    censored = 1 + int(max(steps[-1]["step"] for steps in found[BASE].values()))
    head = [
        "",
        "breaks",
        "median step",
        "come back",
        "reward, last 50",
        "entropy, last 50",
        "wrong sums, %",
    ]
    print(markdown([head, *([method, *describe(seeds)] for method, seeds in found.items())]))
    print(f"\n{compare(found, breaks, censored)}\n")
    base = list(breaks[BASE].values())
    powers = {factor: power(base, censored, factor) for factor in FACTORS}
    for factor, probability in powers.items():
        print(f"delayed by a factor of {factor:g}: found in {100 * probability:.0f} % of studies")
    if given.figure:
        draw(
            {method: list(seeds.values()) for method, seeds in breaks.items()},
            censored,
            given.figure,
        )


if __name__ == "__main__":
    main()
