"""The experiments' task by hand, and one of their runs at toy size."""

import json
import math
import os
import subprocess
import sys

import experiments_report
import pytest
import writing
from helpers import ROOT

from stapo_lite.files import read_lines, write_lines


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The sea is wide. Who has built its stone walls?", 1.0),
        ('"The sea is wide." It has seven high Stone walls.', 1.0),
        ("The wide sea is deep. It has seven low stone walls.", (1 + 1 + 1 / 2 + 1) / 4),
        ("It is wide! Is it stone? ", (1 + 1 + 1 / 2 + 1 / 4) / 4),
        ("The sea is wide. Who has built the stones around it?", (1 + 0 + 1 + 1 / 2) / 4),
        ("The stone is wide. Who has built its stone walls?", 0.75),
        ("The sea is wide. It is. Who has seen its stone walls?", 0.0),
        ("Who has seen the stone walls of the sea?", 0.0),
        ("The sea is wide. Who has seen its stone walls", 0.0),
        ("", 0.0),
    ],
)
def test_answers_by_hand(text, score):
    """Four words, then six with `stone`."""
    assert writing.score(text, "stone", 4, 6) == score
    assert writing.reward([[{"role": "assistant", "content": text}]], ["stone"], [4], [6], prompts=[]) == [score]


def test_held_out_prompts_are_never_trained_on():
    train, held_out = writing.prompts()
    assert (len(train), len(held_out)) == (400, 100)
    texts = [row["prompt"][-1]["content"] for row in train + held_out]
    assert len(set(texts)) == 500
    assert all(f'"{row["word"]}"' in row["prompt"][-1]["content"] for row in train + held_out)
    assert writing.prompts() == (train, held_out)


def test_a_report_of_runs_by_hand(tmp_path):
    """Two methods, two seeds: rewards rise to 1 or stay at 0.2, entropies fall to 1 or stay at 3."""
    for method, rises in (("stapo", True), ("grpo", False)):
        for seed in (0, 1):
            folder = tmp_path / f"{method}-{seed}"
            folder.mkdir()
            (folder / "environment.json").write_text("{}", encoding="utf-8")
            lines = [
                {
                    "reward": min(1.0, step / 8) if rises else 0.2, "sampled_nll": 1.0 + seed if rises else 3.0,
                    "silenced_share": 0.01 if rises else 0.0, "spurious_share": 0.01, "spurious_gradient_share": None,
                }
                for step in range(1, 13)
            ]  # fmt: skip
            write_lines(folder / "metrics.jsonl", lines)
            write_lines(
                folder / "held_out.jsonl",
                [{"reward": 0.9 if rises else 0.2 + seed / 10, "right_share": 0.5, "base_nll": 4.0}],
            )
    found = experiments_report.load(tmp_path)
    runs = {m: {s: experiments_report.measures(*lines) for s, lines in seeds.items()} for m, seeds in found.items()}
    stapo = runs["stapo"][0]
    assert stapo["steps to 0.5"] == 6  # the mean of 2/8 to 6/8
    assert stapo["held-out reward"] == 0.9
    assert stapo["entropy (sampled nll)"] == 1.0
    assert stapo["silenced, %"] == pytest.approx(1.0)
    assert math.isnan(runs["grpo"][1]["steps to 0.5"])
    cells = {row.split("|")[1].strip(): row for row in experiments_report.table(runs).splitlines()}
    assert "0.25 ± 0.07" in cells["grpo"]
    assert "none" in cells["grpo"]
    difference = experiments_report.differences(runs).splitlines()[-1]
    assert [cell.strip() for cell in difference.split("|")[1:-1]] == ["grpo", "2", "-0.65", "0.50", "+1.50", "0.50"]
    experiments_report.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_finished_run_is_not_made_again(tiny_model, tmp_path):
    def experiments():
        toy = ["train.max_steps=2", "data.max_prompt_length=440", "rollout.max_completion_length=8"]
        toy += [f"model={tiny_model}", "dtype=float32", "rollout.engine=transformers", "log.log_completions_steps=0"]
        command = [sys.executable, "benchmarks/experiments.py", "--only", "stapo", "random", "--seeds", "3"]
        command += ["--results", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--set", *toy]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert sorted(experiments().splitlines()) == ["random-3: finished", "stapo-3: finished"]
    for name in ("random-3", "stapo-3"):
        left = tmp_path / "out" / name
        assert [line["step"] for line in read_lines(left / "metrics.jsonl")] == [1, 2]
        looks = read_lines(left / "held_out.jsonl")
        assert [look["step"] for look in looks] == [0, 2]
        # A new adapter changes nothing: policy and base are the same before the first step.
        assert looks[0]["nll"] == pytest.approx(looks[0]["base_nll"], abs=1e-5)
        assert len(json.loads((left / "environment.json").read_text("utf-8"))["commit"]) == 40
        assert f"output_dir: {tmp_path / 'work' / name}" in (left / "config.yaml").read_text("utf-8")
    assert experiments() == ""
