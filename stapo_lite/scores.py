"""Statistics of an evaluation: avg@N, pass@k, maj@N, bootstrap intervals, and their tables."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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

    Right answers count as one however they are written; a sample without an answer has no vote.
    """
    votes = Counter("" if s.correct else f"={s.answer}" for s in samples if s.answer is not None)
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
    low, high = bootstrap([count / n for count in right])
    powers = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    scores = {
        "problems": len(problems),
        "samples": n,
        "avg": _mean(sample.correct for sample in everything),
        "low": low,
        "high": high,
        "pass": {str(k): _mean(pass_at_k(n, count, k) for count in right) for k in powers},
        "maj": _mean(majority(samples) for samples in problems),
        "length": _mean(sample.tokens for sample in everything),
        "truncated": _mean(sample.truncated for sample in everything),
        "no_answer": _mean(sample.answer is None for sample in everything),
    }
    asked = [sample for sample in everything if sample.accepted is not None]
    if asked:
        scores |= {"verified": _mean(s.correct or bool(s.accepted) for s in everything), "asked": len(asked)}
    return scores


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean of `values`, by resampling them (percentile method)."""
    return _interval(_resampled_means(values, seed))


def average_scores(per_problem: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean of the benchmarks' means, each counting the same as in the paper, with its 95 % interval.

    Args:
        per_problem: for each benchmark the share of right samples of each problem.
    """
    means = torch.stack([_resampled_means(values, seed) for seed, values in enumerate(per_problem)]).mean(0)
    low, high = _interval(means)
    return {"avg": _mean(_mean(values) for values in per_problem), "low": low, "high": high}


def paired_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, float]:
    """The lead of `b` over `a`, two runs on the same problems, with a 95 % interval.

    Args:
        a, b: as in `average_scores`, in the same order; problems are resampled together.
    """
    return average_scores([[y - x for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)])


def _resampled_means(values: Sequence[float], seed: int) -> torch.Tensor:
    """[RESAMPLES] means of as many draws with replacement as there are values."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    return tensor[draws].mean(1)


def _interval(means: torch.Tensor) -> tuple[float, float]:
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def results_table(results: dict[str, Any]) -> str:
    """Markdown, in per cent; reads well on a terminal too."""
    head = ["benchmark", "problems", "N", "avg@N", "95 % interval", "maj@N", "tokens", "cut off", "no answer"]
    rows = [head]
    for name, s in results["benchmarks"].items():
        shares = [_percent(s[key]) for key in ("truncated", "no_answer")]
        count = [str(s["problems"]), str(s["samples"])]
        rows.append([name, *count, _percent(s["avg"]), _range(s), _percent(s["maj"]), f"{s['length']:.0f}", *shares])
    average = results["average"]
    rows.append(["average", "", "", _percent(average["avg"]), _range(average), "", "", "", ""])
    if "verified" in average:
        head += ["with verifier", "asked"]
        for row, s in zip(rows[1:-1], results["benchmarks"].values(), strict=True):
            row += [_percent(s["verified"]), str(s["asked"])] if "verified" in s else [_percent(s["avg"]), "0"]
        rows[-1] += [_percent(average["verified"]), ""]
    return markdown(rows)


def pass_table(results: dict[str, Any]) -> str:
    """Markdown: pass@k in per cent."""
    benchmarks = results["benchmarks"]
    powers = sorted({int(k) for s in benchmarks.values() for k in s["pass"]})
    rows = [["benchmark", *(f"pass@{k}" for k in powers)]]
    for name, s in benchmarks.items():
        rows.append([name, *(_percent(s["pass"][str(k)]) if str(k) in s["pass"] else "" for k in powers)])
    return markdown(rows)


def comparison_table(runs: dict[str, dict[str, Any]]) -> str | None:
    """Markdown: avg@N of runs side by side, and how each differs from the first; None with nothing to compare.

    Args:
        runs: results by the run's name. Benchmarks that all have, with the same problems, are compared.
    """
    first, *others = runs.values()
    names = [
        name
        for name, rates in first["rates"].items()
        if all(rates.keys() == other["rates"].get(name, {}).keys() for other in others)
    ]
    if not names:
        return None
    base = [list(first["rates"][name].values()) for name in names]
    rows = [["run", *names, "average", f"less {next(iter(runs))}", "95 % interval"]]
    for label, run in runs.items():
        rates = [[run["rates"][name][problem] for problem in first["rates"][name]] for name in names]
        difference = paired_difference(base, rates)
        against = ["", ""] if run is first else [f"{100 * difference['avg']:+.1f}", _range(difference)]
        averages = [*(_mean(values) for values in rates), average_scores(rates)["avg"]]
        rows.append([label, *(_percent(average) for average in averages), *against])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head, its columns aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _range(scores: dict[str, float]) -> str:
    return f"{100 * scores['low']:.1f} to {100 * scores['high']:.1f}"
