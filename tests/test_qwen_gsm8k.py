"""The report of the runs of a real Qwen: differences by hand, and its figure."""

import subprocess
import sys

import pytest
import qwen_gsm8k_report as report
from helpers import ROOT
from pandas import read_csv

from stapo_lite.files import write_lines

STEP = dict.fromkeys(
    [
        *report.CURVES,
        "candidate_share",
        "spurious_share",
        "spurious_gradient_share",
        "truncated_share",
        "sampler_gap_mean",
        "seconds_rollout",
        "seconds_update",
    ],
    0.5,
)


def evaluation(folder, *rights):
    """Two samples of each problem; those of the second problem are cut off, and have code."""
    samples, verdicts = [], []
    for problem, pair in enumerate(rights):
        for number, right in enumerate(pair):
            names = {"id": problem, "sample": number}
            length = {"truncated": problem == 1, "tokens": 10 * (problem + 1)}
            samples.append(names | length | {"response": "so:\n```" if problem == 1 else "4"})
            verdicts.append(names | {"correct": bool(right)})
    folder.mkdir()
    write_lines(folder / "samples-0.jsonl", samples)
    write_lines(folder / "verdicts.jsonl", verdicts)
    return folder


def test_changes_are_paired_by_problem(tmp_path):
    before = evaluation(tmp_path / "before", (0, 0), (1, 0), (1, 1))
    after = evaluation(tmp_path / "after", (0, 1), (1, 1), (1, 1))
    table = report.compare(before, [after]).set_index(["evaluation", "score"])
    assert table.loc[("before", "right"), "mean"] == pytest.approx(1 / 2)
    right = table.loc[("after", "right")]
    assert right[["mean", "change"]].tolist() == pytest.approx([5 / 6, 1 / 3])
    # Problems change by 0.5, 0.5 and 0, so that no resample's mean is outside of these.
    assert right["change from"] == 0.0
    assert right["change to"] == 0.5
    cut = table.loc[("after", "cut off")]
    assert cut[["mean", "change", "change to"]].tolist() == pytest.approx([1 / 3, 0, 0])
    assert table.loc[("after", "tokens"), "mean"] == pytest.approx(20)
    assert table.loc[("after", "code"), "mean"] == pytest.approx(1 / 3)


def test_the_report_as_a_command(tmp_path):
    (tmp_path / "stapo").mkdir()
    lines = [STEP | {"step": step} for step in (1, 2)]
    write_lines(tmp_path / "stapo" / "metrics.jsonl", lines)
    before = evaluation(tmp_path / "before", (0, 0), (1, 0))
    after = evaluation(tmp_path / "after", (0, 1), (1, 1))
    command = [sys.executable, ROOT / "benchmarks" / "qwen_gsm8k_report.py", tmp_path / "stapo"]
    command += ["--before", before, "--after", after]
    command += ["--figure", tmp_path / "a.png", "--results", tmp_path / "results"]
    subprocess.run([str(part) for part in command], check=True)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    right = read_csv(tmp_path / "results" / "right.csv")
    assert right["after"].tolist() == [0, 1, 1, 1]
    assert len(read_csv(tmp_path / "results" / "metrics.csv")) == 2
    shown = (tmp_path / "results" / "samples.md").read_text(encoding="utf-8")
    assert "## 1\n\nbefore, right:\n\n    so:\n    ```\n\nafter, right:\n" in shown
