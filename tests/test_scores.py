"""Statistics of an evaluation, by hand."""

import itertools
import random

import pytest

from stapo_lite.scores import (
    Sample,
    average_scores,
    benchmark_scores,
    bootstrap,
    comparison_table,
    majority,
    paired_difference,
    pass_at_k,
    pass_table,
    results_table,
)


def samples(pattern, **changes):
    """`a`, `b`, ...: wrong answers; `+`: right; `-`: none."""
    return [Sample(c == "+", None if c == "-" else c, tokens=10, truncated=c == "-", **changes) for c in pattern]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n, correct in ((4, 1), (5, 2), (6, 0), (6, 6)):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("++a", 1), ("+aa", 0), ("+a", 0.5), ("+ab", 1 / 3), ("aabb", 0), ("+---", 1), ("----", 0), ("++aab", 0.5)],
)
def test_majority(pattern, expected):
    assert majority(samples(pattern)) == pytest.approx(expected)


def test_right_answers_count_as_one_however_they_are_written():
    group = [Sample(True, "1/2", 1, False), Sample(True, "\\half", 1, False), *samples("aab")]
    assert majority(group) == 0.5


def test_scores_of_a_benchmark():
    scores = benchmark_scores([samples("+aa-bb"), samples("++++-+"), samples("abcdef")])
    assert scores == {
        "problems": 3,
        "samples": 6,
        "avg": pytest.approx((1 + 5 + 0) / 18),
        "low": scores["low"],
        "high": scores["high"],
        "pass": {
            "1": pytest.approx(6 / 18),
            "2": pytest.approx((1 - 10 / 15 + 1 + 0) / 3),
            "4": pytest.approx((1 - 5 / 15 + 1 + 0) / 3),
            "6": pytest.approx(2 / 3),
        },
        "maj": pytest.approx((0 + 1 + 0) / 3),
        "length": 10.0,
        "truncated": pytest.approx(2 / 18),
        "no_answer": pytest.approx(2 / 18),
    }
    assert 0 <= scores["low"] < 1 / 3 < scores["high"] <= 1


def test_what_a_second_judge_accepts_is_kept_apart():
    group = [*samples("+"), *samples("a", accepted=True), *samples("b", accepted=False), *samples("-")]
    scores = benchmark_scores([group])
    assert (scores["avg"], scores["verified"], scores["asked"]) == (0.25, 0.5, 2)


def test_the_bootstrap_against_the_normal_approximation():
    rng = random.Random(0)
    values = [rng.random() for _ in range(400)]
    mean = sum(values) / 400
    error = (sum((v - mean) ** 2 for v in values) / 400 / 400) ** 0.5
    low, high = bootstrap(values)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert bootstrap(values) == (low, high)
    assert bootstrap([0.5] * 10) == (0.5, 0.5)


def test_the_average_counts_each_benchmark_the_same():
    first, second = [0.0, 1.0] * 50, [0.2] * 4
    average = average_scores([first, second])
    assert average["avg"] == pytest.approx((0.5 + 0.2) / 2)
    low, high = bootstrap(first)
    assert average["high"] - average["low"] == pytest.approx((high - low) / 2, rel=0.02)


def test_the_difference_is_paired():
    """Two runs that differ by the same on every problem: no uncertainty, however hard the problems differ."""
    a = [[0.0, 0.25, 0.5, 0.75]]
    b = [[0.25, 0.5, 0.75, 1.0]]
    assert paired_difference(a, b) == {"avg": 0.25, "low": 0.25, "high": 0.25}


def results(**benchmarks):
    scores = {name: benchmark_scores([samples(p) for p in patterns]) for name, patterns in benchmarks.items()}
    rates = {
        name: {str(i): p.count("+") / len(p) for i, p in enumerate(patterns)} for name, patterns in benchmarks.items()
    }
    return {"benchmarks": scores, "average": average_scores([list(r.values()) for r in rates.values()]), "rates": rates}


def test_tables():
    run = results(aime=["++", "+a"], amc=["++++", "aaaa"])
    table = results_table(run).splitlines()
    assert [cell.strip() for cell in table[2].split("|")[1:-1]] == (
        ["aime", "2", "2", "75.0", "50.0 to 100.0", "75.0", "10", "0.0", "0.0"]
    )
    assert [cell.strip() for cell in table[-1].split("|")[1:5]] == ["average", "", "", "62.5"]
    assert len({len(line) for line in table}) == 1
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in pass_table(run).splitlines()[2:]] == [
        ["aime", "75.0", "100.0", ""],
        ["amc", "50.0", "50.0", "50.0"],
    ]


def test_runs_side_by_side():
    runs = {
        "base": results(aime=["a", "+"], amc=["+"]),
        "stapo": results(aime=["+", "+"], amc=["+"]),
        "other": results(aime=["a", "a"], amc=["+"], more=["+"]),
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in comparison_table(runs).splitlines()]
    assert rows[0] == ["run", "aime", "amc", "average", "less base", "95 % interval"]
    assert rows[2] == ["base", "50.0", "100.0", "75.0", "", ""]
    assert rows[3] == ["stapo", "100.0", "100.0", "100.0", "+25.0", "0.0 to 50.0"]
    assert rows[4] == ["other", "0.0", "100.0", "50.0", "-25.0", "-50.0 to 0.0"]
    assert comparison_table({"a": results(x=["+"]), "b": results(x=["+", "+"])}) is None
