"""Statistics of an evaluation, by hand."""

import itertools
import json
import random
import tracemalloc

import pytest
from helpers import command

from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.results import compare_evaluations, pass_table, results_table
from stapo_lite.extras.evaluation.scores import (
    Sample,
    average_scores,
    benchmark_scores,
    majority,
    paired_difference,
    pass_at_k,
)


def samples(pattern, **changes):
    """`a`, `b`, ...: wrong answers; `?`: one that was not read; `+`: right; `-`: none."""
    return [
        Sample(c == "+", None if c == "-" else c, tokens=10, truncated=c == "-", **changes)
        for c in pattern
    ]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n, correct in ((4, 1), (5, 2), (6, 0), (6, 6)):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("+??", 1),
        ("?", 0),
        ("++a", 1),
        ("+aa", 0),
        ("+a", 0.5),
        ("+ab", 1 / 3),
        ("aabb", 0),
        ("+---", 1),
        ("----", 0),
        ("++aab", 0.5),
    ],
)
def test_majority(pattern, expected):
    """Right answers count as one however they are written."""
    group = samples(pattern)
    assert majority(group) == pytest.approx(expected)
    spelt = [
        Sample(s.correct, f"{i}" if s.correct else s.answer, 1, False) for i, s in enumerate(group)
    ]
    assert majority(spelt) == pytest.approx(expected)


def test_scores_of_a_benchmark():
    """Answers that only a second judge accepts are kept apart."""
    scores = benchmark_scores([samples("+aa-bb"), samples("++++-+"), samples("abcdef")])
    assert scores == {
        "problems": 3,
        "samples": 6,
        "avg": pytest.approx((1 + 5 + 0) / 18),
        "low": scores["low"],
        "high": scores["high"],
        "pass": pytest.approx(
            {"1": 6 / 18, "2": (1 - 10 / 15 + 1) / 3, "4": (1 - 5 / 15 + 1) / 3, "6": 2 / 3}
        ),
        "maj": pytest.approx((0 + 1 + 0) / 3),
        "length": 10.0,
        "truncated": pytest.approx(2 / 18),
        "no_answer": pytest.approx(2 / 18),
    }
    assert 0 <= scores["low"] < 1 / 3 < scores["high"] <= 1
    scores = benchmark_scores(
        [samples("+-") + samples("a", accepted=True) + samples("b", accepted=False)]
    )
    assert (scores["avg"], scores["verified"], scores["asked"]) == (0.25, 0.5, 2)


def test_intervals_against_the_normal_approximation_and_paired():
    rng = random.Random(0)
    values = [rng.random() for _ in range(400)]
    mean = sum(values) / 400
    error = (sum((v - mean) ** 2 for v in values) / 400 / 400) ** 0.5
    scores = average_scores([values])
    assert scores["avg"] == pytest.approx(mean)
    assert scores["low"] == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert scores["high"] == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert average_scores([values]) == scores
    assert average_scores([[0.5] * 10, [0.25]]) == {
        "avg": 0.375,
        "low": 0.375,
        "high": 0.375,
    }  # each counts the same
    both = average_scores([values, [0.2] * 4])
    assert both["high"] - both["low"] == pytest.approx(
        (scores["high"] - scores["low"]) / 2, rel=0.02
    )
    # Two runs that differ by the same on every problem: no uncertainty, however hard the problems
    # differ.
    a, b = [[0.0, 0.25, 0.5, 0.75]], [[0.25, 0.5, 0.75, 1.0]]
    assert paired_difference(a, b) == {"avg": 0.25, "low": 0.25, "high": 0.25}


def test_the_bootstrap_does_not_hold_all_resamples_in_memory():
    average_scores([[0.0, 1.0]])  # imports scipy
    tracemalloc.start()
    scores = average_scores([[0.0, 1.0] * 1500])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 << 20, "all 10,000 take 480 MB"
    assert scores["high"] - 0.5 == pytest.approx(1.96 * 0.5 / 3000**0.5, rel=0.05)


def results(**benchmarks):
    scores = {
        name: benchmark_scores([samples(p) for p in patterns])
        for name, patterns in benchmarks.items()
    }
    rates = {
        name: {str(i): p.count("+") / len(p) for i, p in enumerate(ps)}
        for name, ps in benchmarks.items()
    }
    return {
        "benchmarks": scores,
        "average": average_scores([list(r.values()) for r in rates.values()]),
        "rates": rates,
    }


def cells(table):
    head, line, *rows = table.splitlines()
    assert {len(row) for row in (head, *rows)} == {len(line)}
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in (head, *rows)]


def test_tables():
    run = results(aime=["++", "+a"], amc=["++++", "aaaa"])
    rows = cells(results_table(run))
    assert rows[1] == ["aime", "2", "2", "75.0", "50.0 to 100.0", "75.0", "10", "0.0", "0.0"]
    assert rows[-1][:4] == ["average", "", "", "62.5"]
    assert cells(pass_table(run))[1:] == [
        ["aime", "75.0", "100.0", ""],
        ["amc", "50.0", "50.0", "50.0"],
    ]


def test_compare_shows_runs_side_by_side(tmp_path, capsys):
    runs = {
        "base": results(aime=["a", "+"], amc=["+"]),
        "stapo": results(aime=["+", "+"], amc=["+"]),
        "other": results(aime=["a", "a"], amc=["+"], more=["+"]),
        "strange": results(amc=["+", "+"]),
    }
    folders = [tmp_path / name for name in runs]
    for folder, run in zip(folders, runs.values(), strict=True):
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(run), encoding="utf-8")
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "results.json").write_text("{}", encoding="utf-8")
    base, stapo, other = map(str, folders[:3])
    assert command("evaluate", "compare", *folders[:3]) == 0
    assert cells(capsys.readouterr().out) == [
        ["run", "aime", "amc", "average", f"less {base}", "95 % interval"],
        [base, "50.0", "100.0", "75.0", "", ""],
        [stapo, "100.0", "100.0", "100.0", "+25.0", "0.0 to 50.0"],
        [other, "0.0", "100.0", "50.0", "-25.0", "-50.0 to 0.0"],
    ]
    for chosen, message in [
        (folders, "no benchmark with the same problems in common"),
        (folders[:1] * 2, "two evaluations or more"),
        ([folders[0], tmp_path], "no results of an evaluation"),
        ([folders[0], tmp_path / "another"], "no results of an evaluation .KeyError"),
    ]:
        with pytest.raises(InputError, match=message):
            compare_evaluations(chosen)
