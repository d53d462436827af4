"""Statistics of an evaluation: avg@N, pass@k, maj@N, bootstrap intervals; their tables are in `results.py`."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stapo_lite.rewards.grading import UNREADABLE

RESAMPLES = 10_000


@dataclass(frozen=True)
class Sample:
    """One graded response.

    Attributes:
        answer: in one spelling; None where there is none.
        accepted: by the second judge; None where it was not asked.
    """

    correct: bool
    answer: str | None
    tokens: int
    truncated: bool
    accepted: bool | None = None


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(samples: Sequence[Sample]) -> float:
    """Whether the most frequent answer is right; where some are equally frequent, the share of them that is.

    Right answers count as one however they are written; a sample without an answer, or whose answer could not be read,
    has no vote.
    """
    votes = Counter("" if s.correct else f"={s.answer}" for s in samples if s.answer not in (None, UNREADABLE))
    if not votes:
        return 0.0
    most = max(votes.values())
    return (votes[""] == most) / sum(count == most for count in votes.values())


def benchmark_scores(problems: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Scores of one benchmark, from the N samples of each problem.

    Returns:
        `avg`, its 95 % interval `low` and `high`, `maj`, `pass` by k = 1, 2, 4, ... and N, mean `length` in tokens,
        `truncated` and `no_answer` as shares, `samples` N, `problems`; where a second judge was asked also `verified`
        (avg with what it accepted) and `asked`, the number of its questions.
    """
    n = len(problems[0])
    everything = [sample for samples in problems for sample in samples]
    right = [sum(sample.correct for sample in samples) for samples in problems]
    powers = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    scores = {
        "problems": len(problems),
        "samples": n,
        **average_scores([[count / n for count in right]]),
        "pass": {str(k): fmean(pass_at_k(n, count, k) for count in right) for k in powers},
        "maj": fmean(majority(samples) for samples in problems),
        "length": fmean(sample.tokens for sample in everything),
        "truncated": fmean(sample.truncated for sample in everything),
        "no_answer": fmean(sample.answer is None for sample in everything),
    }
    asked = [sample for sample in everything if sample.accepted is not None]
    if asked:
        scores |= {"verified": fmean(s.correct or bool(s.accepted) for s in everything), "asked": len(asked)}
    return scores


def average_scores(per_problem: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean of the benchmarks' means (`avg`), each counting the same as in the paper, and its 95 % interval.

    The interval is that of the percentile bootstrap, which resamples the problems of each benchmark.

    Args:
        per_problem: for each benchmark the share of right samples of each problem.
    """
    from scipy.stats import bootstrap  # slow to import

    def statistic(*samples: Any, axis: int) -> Any:
        return sum(sample.mean(axis) for sample in samples) / len(samples)

    data = [[*values] * (2 if len(values) == 1 else 1) for values in per_problem]  # scipy refuses a single observation
    options: Any = {"n_resamples": RESAMPLES, "batch": 100, "method": "percentile", "rng": 0}  # a batch is in memory
    found = bootstrap(data, statistic, **options).confidence_interval
    return {"avg": fmean(map(fmean, per_problem)), "low": float(found.low), "high": float(found.high)}


def paired_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, float]:
    """The lead of `b` over `a`, two runs on the same problems, with a 95 % interval.

    Args:
        a, b: as in `average_scores`, in the same order; problems are resampled together.
    """
    return average_scores([[y - x for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)])
