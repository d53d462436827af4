"""The report on breaks: its tests and its table by hand."""

import math
import sys

import break_report
import pytest
import study_csv
from countdown_report import break_step

STAYS = [(0.5, 0.6)] * 30
LOST = (0.0, 1.1)


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


def test_a_reward_of_exactly_half_is_no_break_though_digits_are_lost():
    assert break_step([0.76251, 0.38125, 0.37]) == 3


def test_the_median_step_is_the_first_at_which_half_have_broken():
    assert break_report.median_step([30, 10, 801, 801], 801) == "30"
    assert break_report.median_step([30, 801, 801, 801], 801) == "> 800"
    assert break_report.median_step([30, 10, 20], 801) == "20"


def test_a_run_comes_back_at_half_of_its_highest_reward():
    assert break_report.came_back([0.8, 0.8, 0.3, 0.4], 3)
    assert not break_report.came_back([0.8, 0.8, 0.3, 0.39], 3)


def test_the_report_by_hand(tmp_path, capsys, monkeypatch):
    """`justrl` breaks at step 13 in both seeds, `stapo` in neither."""
    breaks, rows = [*STAYS[:10], *[LOST] * 20], []
    for method, seed in (("justrl", 0), ("justrl", 1), ("stapo", 0), ("stapo", 1)):
        run = {"method": method, "seed": seed, "held_out_wrong_sums": 0.05}
        values = breaks if method == "justrl" else STAYS
        for step, (reward, entropy) in enumerate(values, start=1):
            rows.append(run | {"step": step, "reward": reward, "entropy": entropy})
    study_csv.write_rows(tmp_path / "break/all.csv", study_csv.STEP_COLUMNS, rows)
    figure = tmp_path / "break.png"
    arguments = ["break_report.py", "--results", str(tmp_path), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", arguments)
    break_report.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "| justrl | 2 of 2 | 13 | 0 of 2 |" in shown
    assert "| stapo | 0 of 2 | > 30 | 0 of 0 | 0.50 | 0.60 | 5.0 |" in shown
    # (10 * 0.6 + 3 * 1.1) / 13 is 0.72; two pairs allow p = 0.5 at best.
    assert "| stapo | 2, 0, 0, 0 | 0.5000 | -0.115 ± 0.000 (p 0.5000) |" in shown
    assert figure.stat().st_size > 5000
