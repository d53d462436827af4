"""Statistics of an evaluation, by hand."""

import itertools
import random
import tracemalloc

import pytest

from stapo_lite.extras.evaluation.results import pass_table, results_table
from stapo_lite.extras.evaluation.scores import average_scores, pass_at_k, summarise


def evaluation(**benchmarks):
    """The summary of patterns, one per problem: `+` is right, `-` no answer, others are wrong."""
    samples = []
    for name, patterns in benchmarks.items():
        for number, pattern in enumerate(patterns):
            for mark in pattern:  # right answers are spelled in several ways
                answer = {"+": str(len(samples)), "-": None}.get(mark, mark)
                sample = {"benchmark": name, "id": str(number), "tokens": 10, "answer": answer}
                samples.append(sample | {"truncated": mark == "-", "correct": mark == "+"})
    return summarise(samples)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n, correct in ((4, 1), (5, 2), (6, 0), (6, 6)):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_scores_of_a_benchmark():
    results = evaluation(b=["+aa-bb", "++++-+", "abcdef"])
    scores = results["benchmarks"]["b"]
    assert scores == {
        "problems": 3,
        "samples": 6,
        "avg": pytest.approx((1 + 5 + 0) / 18),
        "low": scores["low"],
        "high": scores["high"],
        "pass": pytest.approx(
            {"1": 6 / 18, "2": (1 - 10 / 15 + 1) / 3, "4": (1 - 5 / 15 + 1) / 3, "6": 2 / 3}
        ),
        "length": 10.0,
        "truncated": pytest.approx(2 / 18),
        "no_answer": pytest.approx(2 / 18),
    }
    assert 0 <= scores["low"] < 1 / 3 < scores["high"] <= 1
    assert results["rates"] == {"b": pytest.approx({"0": 1 / 6, "1": 5 / 6, "2": 0})}
    assert results["average"] == {name: scores[name] for name in ("avg", "low", "high")}


def test_intervals_of_many_problems_take_little_memory():
    """All draws of 12,000 problems at once took 1.9 GiB."""
    tracemalloc.start()
    scores = average_scores([[k / 32 for k in range(33)] * 364])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**25
    assert scores["avg"] == pytest.approx(0.5)
    assert 0.49 < scores["low"] < 0.5 < scores["high"] < 0.51


def test_intervals_are_those_of_the_normal_approximation():
    rng = random.Random(0)
    values = [rng.random() for _ in range(400)]
    mean = sum(values) / 400
    error = (sum((v - mean) ** 2 for v in values) / 400 / 400) ** 0.5
    scores = average_scores([values])
    expected = {"avg": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}
    assert scores == pytest.approx(expected, abs=0.1 * error)
    assert average_scores([values]) == scores
    both = average_scores([values, [0.2] * 4])
    width = scores["high"] - scores["low"]
    assert both["high"] - both["low"] == pytest.approx(width / 2, rel=0.02)


def cells(table):
    head, line, *rows = table.splitlines()
    assert {len(row) for row in (head, *rows)} == {len(line)}
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in (head, *rows)]


def test_tables_are_in_per_cent():
    results = evaluation(aime=["++", "+a"], amc=["++++", "aaaa"])
    rows = cells(results_table(results))
    assert rows[1] == ["aime", "2", "2", "75.0", "50.0 to 100.0", "10", "0.0", "0.0"]
    assert [*rows[-1][:4], *rows[-1][5:]] == ["average", "", "", "62.5", *[""] * 3]
    assert cells(pass_table(results)) == [
        ["benchmark", "pass@1", "pass@2", "pass@4"],
        ["aime", "75.0", "100.0", ""],
        ["amc", "50.0", "50.0", "50.0"],
    ]
