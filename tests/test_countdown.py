"""Countdown: the task, its model and its report by hand, and one of its runs at toy size."""

import random
import sys

import countdown
import countdown_report
import pytest
import study_csv
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


def test_the_report_by_hand(tmp_path, capsys, monkeypatch):
    """Rewards stay, or are lost after ten steps: at step 13 two of the last five are left."""
    stays = [(0.5, 0.6)] * 20
    breaks = [(0.5, 0.6)] * 10 + [(0.0, 1.1)] * 10
    rows = []
    for method, seed in (("justrl", 0), ("justrl", 1), ("stapo", 0), ("stapo", 1)):
        run = {"method": method, "seed": seed, "held_out_wrong_sums": 0.05}
        for step, (reward, entropy) in enumerate(breaks if method == "justrl" else stays, start=1):
            measured = {"reward": reward, "sampled_nll": entropy, "silenced_share": 1e-4}
            measured["entropy"] = entropy / 2
            rows.append(run | {"step": step} | measured)
    path = tmp_path / "countdown/all.csv"
    study_csv.write_rows(path, study_csv.STEP_COLUMNS, rows)
    assert countdown_report.break_step([0.1, 0.5, 0.3, 0.25, 0.24, 0.6]) == 5
    monkeypatch.setattr("sys.argv", ["countdown_report.py", "--results", str(tmp_path)])
    countdown_report.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "| justrl | 2 | 2 (median step 13) | 0.25 |" in shown
    # The primary outcomes: 21 against 13, and 0.6 against 0.9.
    assert "| stapo | 2 | +8.00 ± 0.00 | 0.500 | -0.30 ± 0.00 | 0.500 |" in shown
    sys.argv += ["--entropy", "entropy"]
    countdown_report.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "| stapo | 2 | +8.00 ± 0.00 | 0.500 | -0.15 ± 0.00 | 0.500 |" in shown


@pytest.mark.slow
def test_a_run_of_the_study(experiment, tmp_path):
    command = ["experiments.py", "countdown", "--only", "full", "--seeds", "3"]
    experiment(*command, model=FOLDER, prompt=10, completion=66)
    rows = study_csv.read_rows(tmp_path / "out/countdown/full.csv")
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert 0 < float(rows[0]["held_out_wrong_sums"]) < 0.1
    assert 0.2 < float(rows[0]["held_out_reward"]) < 0.8
