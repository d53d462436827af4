"""Countdown: the task, its model and its report by hand, and one of its runs at toy size."""

import itertools
import math
import random
import sys

import break_report
import countdown
import pytest
import study_file
from countdown_model import FOLDER

RIGHT = "try 4 * 9 = 36 then - 6 = 30 yes"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (RIGHT, True),
        (f"try 4 + 9 = 14 then + 6 = 2 no , {RIGHT}", True),  # a slip before does no harm
        (RIGHT.replace("yes", "done"), True),
        (RIGHT.replace("yes", "no"), False),
        (RIGHT.replace("36", "35"), False),
        (RIGHT.replace("30", "31"), False),
        (RIGHT.replace("- 6", "- then"), False),
        ("try 5 * 7 = 35 then - 5 = 30 yes", False),  # other numbers
        ("try 9 - 4 = 5 then * 6 = 30 yes", True),
        ("", False),
    ],
)
def test_rewards_by_hand(text, right):
    assert countdown.reward([text], [[4, 9, 6]], [30], prompts=[]) == [float(right)]


def test_traces_are_right_but_for_the_noise():
    train, held_out = countdown.prompts()
    assert (len(train), len(held_out)) == (1455, 300)
    puzzles = [(tuple(sorted(row["numbers"])), row["target"]) for row in train + held_out]
    assert len(set(puzzles)) == len(puzzles)
    generator, right, words = random.Random(0), {0.0: 0, 0.05: 0}, []
    for noise in right:
        for row in held_out:
            words = countdown.trace(row, generator, noise)
            right[noise] += countdown.is_right(" ".join(words), row["numbers"], row["target"])
            assert set(words) <= set(countdown.VOCABULARY)
            assert len(words) <= 65  # with <eos> the longest completion of the config
    assert right[0.0] == 300 > right[0.05] > 100


def write_study(path):
    """`justrl` loses its rewards after ten of twenty steps, `stapo` keeps them."""
    rows = []
    for method, seed in itertools.product(("justrl", "stapo"), (0, 1)):
        run = {"method": method, "seed": seed, "held_out_wrong_sums": 0.05, "silenced_share": 1e-4}
        for step in range(1, 21):
            lost = method == "justrl" and step > 10
            reward, entropy = (0.0, 1.1) if lost else (0.5, 0.6)
            measured = {"reward": reward, "entropy": entropy, "sampled_nll": entropy / 2}
            rows.append(run | {"step": step} | measured)
    study_file.write_rows(path, rows)


def test_the_step_of_a_break():
    assert break_report.break_step([0.1, 0.5, 0.3, 0.25, 0.24, 0.6]) == 5
    # Exactly half is none, though digits were lost.
    assert break_report.break_step([0.76251, 0.38125, 0.37]) == 3


def test_the_sign_test_leaves_out_pairs_that_are_equal():
    assert break_report.sign_test([10, 10, 10, 31], [31, 20, 30, 31]) == (3, 0, 0.25)
    assert break_report.sign_test([31, 20], [31, 10]) == (0, 1, 1.0)
    assert break_report.sign_test([31], [31]) == (0, 0, 1.0)
    later, earlier, p = break_report.sign_test([10] * 12, [20] * 12)
    assert (later, earlier) == (12, 0)
    assert p == pytest.approx(2 / 2**12)


def test_a_large_delay_is_found_and_a_small_one_is_not():
    base = [100 + 10 * i for i in range(12)]
    assert break_report.power(base, 801, 4.0) > 0.95
    assert break_report.power(base, 801, 1.0) < 0.05
    assert break_report.power([801] * 12, 801, 4.0) == 0.0
    # With four breaks of twelve, by drawing: 18 % even if no run of the mask breaks.
    prevented = break_report.power([100] * 4 + [801] * 8, 801, math.inf)
    assert prevented == pytest.approx(0.18, abs=0.03)


def test_the_median_step_is_the_first_at_which_half_have_broken():
    assert break_report.median_step([30, 10, 801, 801], 801) == "30"
    assert break_report.median_step([30, 801, 801, 801], 801) == "> 800"
    assert break_report.median_step([30, 10, 20], 801) == "20"


def test_a_run_comes_back_at_half_of_its_highest_reward():
    assert break_report.came_back([0.8, 0.8, 0.3, 0.4], 3)
    assert not break_report.came_back([0.8, 0.8, 0.3, 0.39], 3)


def test_the_report_of_breaks_by_hand(tmp_path, capsys, monkeypatch):
    """`justrl` breaks in both seeds, at step 13, where two of the last five rewards are left;
    `stapo` in neither."""
    write_study(tmp_path / "break.parquet")
    figure = tmp_path / "break.png"
    arguments = ["break_report.py", "--results", str(tmp_path), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", arguments)
    break_report.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "| justrl | 2 of 2 | 13 | 0 of 2 |" in shown
    assert "| stapo | 0 of 2 | > 20 | 0 of 0 | 0.50 | 0.60 | 5.0 |" in shown
    # (10 * 0.6 + 3 * 1.1) / 13 is 0.72; two pairs allow p = 0.5 at best.
    assert "| stapo | 2, 0, 0, 0 | 0.5000 | -0.115 ± 0.000 (p 0.5000) |" in shown
    assert figure.stat().st_size > 5000


@pytest.mark.slow
def test_a_run_of_the_study(experiment, tmp_path):
    command = ["experiments", "break", "--only", "full", "--seeds", "3"]
    experiment(*command, model=FOLDER, prompt=10, completion=66)
    rows = study_file.read_rows(tmp_path / "out/break.parquet")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert 0 < rows[0]["held_out_wrong_sums"] < 0.1
    assert 0.2 < rows[0]["held_out_reward"] < 0.8
