"""The report of the runs of a real Qwen, as a command: differences by hand, samples, its figure."""

import pandas as pd
import pytest
import qwen_gsm8k_report as report

from stapo_lite.files import write_lines

MEASURED = ["candidate_share", "spurious_share", "spurious_gradient_share", "truncated_share"]
MEASURED += ["sampler_gap_mean", "seconds_rollout", "seconds_update"]
STEP = dict.fromkeys([*report.CURVES, *MEASURED], 0.5)


def evaluation(folder, *rights):
    """Two samples of each problem; those of the second problem are cut off, and have code."""
    samples, verdicts = [], []
    for problem, pair in enumerate(rights):
        for number, right in enumerate(pair):
            names = {"id": problem, "sample": number}
            length = {"truncated": problem == 1, "tokens": 10 * (problem + 1)}
            samples.append(names | length | {"response": "so:\n```" if problem == 1 else "4"})
            verdicts.append(names | {"correct": bool(right)})
    write_lines(folder / "samples-0.jsonl", samples)
    write_lines(folder / "verdicts.jsonl", verdicts)


def test_changes_are_paired_by_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("stapo", "before", "after"):
        (tmp_path / name).mkdir()
    write_lines(tmp_path / "stapo" / "metrics.jsonl", [STEP | {"step": step} for step in (1, 2)])
    evaluation(tmp_path / "before", (0, 0), (1, 0), (1, 1))
    evaluation(tmp_path / "after", (0, 1), (1, 1), (1, 1))
    options = "stapo --before before --after after --figure a.png --results results"
    monkeypatch.setattr("sys.argv", ["qwen_gsm8k_report.py", *options.split()])
    report.main()
    scores = pd.read_parquet("results/scores.parquet").set_index(["evaluation", "score"])
    means = [("before", "right"), ("after", "right"), ("after", "tokens"), ("after", "code")]
    assert scores["mean"][means].tolist() == pytest.approx([1 / 2, 5 / 6, 20, 1 / 3], rel=1e-5)
    # Problems change by 0.5, 0.5 and 0, so that no resample's mean is outside of these.
    changes = scores.loc["after", ["change", "change from", "change to"]]
    assert changes.loc["right"].tolist() == pytest.approx([1 / 3, 0, 0.5], rel=1e-5)
    assert changes.loc["cut off"].tolist() == [0, 0, 0]
    assert scores["mean"]["after", "cut off"] == pytest.approx(1 / 3, rel=1e-5)
    assert pd.read_parquet("results/right.parquet")["after"].tolist() == [0, 1, 1, 1, 1, 1]
    assert pd.read_parquet("results/metrics.parquet")["step"].tolist() == [1, 2]
    shown = (tmp_path / "results" / "samples.md").read_text(encoding="utf-8")
    assert "## 1\n\nbefore, right:\n\n    so:\n    ```\n\nafter, right:\n" in shown
    assert (tmp_path / "a.png").stat().st_size > 10_000
