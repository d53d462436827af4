"""Statistics of an evaluation: avg@N, pass@k, maj@N, bootstrap intervals (tables: `results.py`)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stapo_lite.extras.math.grading import UNREADABLE

RESAMPLES = 10_000


@dataclass(frozen=True)
class Sample:
    """One graded response.

    Attributes:
        answer: in one spelling; None if the response states none.
        tokens: of the completion.
        truncated: whether the completion was cut off.
        accepted: by the verifier; None if it was not asked.
    """

    correct: bool
    answer: str | None
    tokens: int
    truncated: bool
    accepted: bool | None = None


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate, from n samples, of the probability that at least one of k is right (Chen
    et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(samples: Sequence[Sample]) -> float:
    """1 if the most frequent answer is right, else 0; if answers tie, the share of them that is
    right.

    All right answers count as one answer. Samples without a readable answer do not vote.
    """
    right = "right"  # wrong answers begin with "="
    votes: Counter[str] = Counter()
    for sample in samples:
        if sample.answer not in (None, UNREADABLE):
            votes[right if sample.correct else f"={sample.answer}"] += 1
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return (right in winners) / len(winners)


def benchmark_scores(problems: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Scores of one benchmark, from the N samples of each problem.

    Returns:
        `avg`, its 95 % interval `low` and `high`, `maj`, `pass` by k = 1, 2, 4, ... and N, mean
        `length` in tokens, `truncated` and `no_answer` as shares, `samples` N, `problems`; if the
        verifier was asked, also `verified` (avg with the answers that it accepted) and `asked`, the
        number of answers that it judged.
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
    asked = sum(sample.accepted is not None for sample in everything)
    if asked:
        scores["verified"] = fmean(s.correct or bool(s.accepted) for s in everything)
        scores["asked"] = asked
    return scores


def average_scores(per_problem: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean of the benchmarks' means (`avg`) and its 95 % interval (`low`, `high`).

    Each benchmark counts the same, as in the paper. The interval is a percentile bootstrap over the
    problems of each benchmark.

    Args:
        per_problem: for each benchmark the share of right samples of each problem.
    """
    from scipy.stats import bootstrap  # slow to import

    def statistic(*samples: Any, axis: int) -> Any:
        return sum(sample.mean(axis) for sample in samples) / len(samples)

    # scipy refuses a single observation
    data = [[*values] * 2 if len(values) == 1 else [*values] for values in per_problem]
    options: Any = {"n_resamples": RESAMPLES, "method": "percentile", "rng": 0}
    options["batch"] = 100  # resamples in memory
    low, high = bootstrap(data, statistic, **options).confidence_interval
    return {"avg": fmean(map(fmean, per_problem)), "low": float(low), "high": float(high)}


def paired_difference(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The lead of run `b` over run `a` on the same problems, in the form of `average_scores`.

    Args:
        a, b: as in `average_scores`, with problems in the same order; resampled in pairs.
    """
    differences = []
    for before, after in zip(a, b, strict=True):
        differences.append([y - x for x, y in zip(before, after, strict=True)])
    return average_scores(differences)
