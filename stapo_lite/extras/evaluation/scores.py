"""Statistics of graded samples: avg@N, pass@k, bootstrap intervals."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from pandas import DataFrame

RESAMPLES = 10_000


def summarise(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of each benchmark, their average, and each problem's share of right samples
    (`rates`).

    Args:
        samples: as `samples.grade` returns them.
    """
    benchmarks = {}
    rates = {}
    for name, rows in DataFrame(samples).groupby("benchmark", sort=False):
        benchmarks[name] = benchmark_scores(rows)
        problems = rows.groupby("id", sort=False)
        rates[name] = problems["correct"].mean().to_dict()
    average = average_scores([list(shares.values()) for shares in rates.values()])
    return {"benchmarks": benchmarks, "average": average, "rates": rates}


def benchmark_scores(samples: DataFrame) -> dict[str, Any]:
    """Scores of one benchmark, from the N samples of each problem.

    Returns:
        `avg`, its 95 % interval `low` and `high`, `pass` by k = 1, 2, 4, ... and N, mean
        `length` in tokens, `truncated` and `no_answer` as shares, `samples` N, `problems`.
    """
    right = samples.groupby("id", sort=False)["correct"].sum()  # of each problem's n samples
    n = len(samples) // len(right)
    passes = {}
    powers = {2**i for i in range(n.bit_length())}
    for k in sorted(powers | {n}):
        passes[str(k)] = fmean(pass_at_k(n, count, k) for count in right)
    return {
        "problems": len(right),
        "samples": n,
        **average_scores([list(right / n)]),
        "pass": passes,
        "length": samples["tokens"].mean(),
        "truncated": samples["truncated"].mean(),
        "no_answer": samples["answer"].isna().mean(),
    }


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate, from n samples, of the probability that at least one of k is right (Chen
    et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def average_scores(rates: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean of the benchmarks' means (`avg`) and its 95 % interval (`low`, `high`).

    Each benchmark counts the same, as in the paper. The interval is a percentile bootstrap over the
    problems of each benchmark.

    Args:
        rates: for each benchmark the share of right samples of each problem.
    """
    rng = np.random.default_rng(0)
    means = []
    for shares in rates:
        # How often each share occurs among as many problems drawn with replacement.
        values, counts = np.unique(shares, return_counts=True)
        resampled = rng.multinomial(len(shares), counts / len(shares), RESAMPLES)
        means.append(resampled @ values / len(shares))
    low, high = np.quantile(np.mean(means, 0), [0.025, 0.975])
    return {"avg": fmean(map(fmean, rates)), "low": low, "high": high}
