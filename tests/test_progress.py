"""What a long step shows while it runs."""

import re

import pytest
from helpers import ADVANTAGES, fake_completions, objective, run_update
from tqdm import std

from stapo_lite.progress import progress_bar, show_speed


@pytest.fixture(autouse=True)
def _only_bar():
    """Bars that other tests have left open would move this one down."""
    std.tqdm._instances.clear()


def test_a_log_file_gets_a_line_each_minute(minutes, capsys):
    with progress_bar("rollout", "completion", 4) as bar:
        show_speed(bar, fake_completions(0, [0.0, 0.0]))
        bar.update(2)
        bar.update(0)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert re.fullmatch(r"rollout: 2 of 4 completions in \d\d:00, \d+ tokens/s", lines[0])
    assert len(lines) == 2


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar("evaluate", "sample", 3, "abc") as bar:
        assert list(bar) == ["a", "b", "c"]
    assert "evaluate:   0%|" in capsys.readouterr().err


def test_only_the_first_process_shows_it(minutes, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with progress_bar("rollout", "completion", 4) as bar:
        show_speed(bar, [])
        bar.update(4)
    assert capsys.readouterr().err == ""


def test_an_update_counts_its_tokens(minutes, make_policy, capsys):
    completions = fake_completions(3, ADVANTAGES)
    run_update(make_policy(), completions, objective(), max_tokens=40)
    shown = re.findall(r"trainer: (\d+) of (\d+) tokens in", capsys.readouterr().err)
    done, totals = zip(*((int(n), int(total)) for n, total in shown), strict=True)
    assert 0 < done[0] < totals[0]
    assert done[-1] == totals[-1]
