"""The experiments' task by hand, and one of their runs at toy size."""

import json
import os
import subprocess
import sys

import pytest
import writing
from helpers import ROOT

from stapo_lite.files import read_lines


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The sea is wide. Who has seen its stone walls?", True),
        ('He said: "The sea is wide." Who has seen its Stone walls?', True),
        ("The sea is wide! Is it stone? ", True),
        ("The sea is wide. Who has seen its stones?", False),
        ("The stone sea is wide. Who has seen its stone walls?", False),
        ("The sea is wide. It has stone walls.", False),
        ("The sea is wide. It is. Who has seen its stone walls?", False),
        ("Who has seen the stone walls of the sea?", False),
        ("The sea is wide. Who has seen its stone walls", False),
        ("The sea is wide, who has seen its stone walls?", False),
        ("", False),
    ],
)
def test_answers_by_hand(text, right):
    assert writing.right(text, "stone") == right
    assert writing.reward([[{"role": "assistant", "content": text}]], ["stone"], prompts=[]) == [right]


def test_held_out_prompts_are_never_trained_on():
    train, held_out = writing.prompts()
    assert (len(train), len(held_out)) == (400, 100)
    texts = [row["prompt"][-1]["content"] for row in train + held_out]
    assert len(set(texts)) == 500
    assert all(row["word"] in row["prompt"][-1]["content"] for row in train + held_out)
    assert writing.prompts() == (train, held_out)


@pytest.mark.slow
def test_a_finished_run_is_not_made_again(tiny_model, tmp_path):
    def experiments():
        toy = ["train.max_steps=2", "data.max_prompt_length=440", "rollout.max_completion_length=8"]
        toy += [f"model={tiny_model}", "dtype=float32", "rollout.engine=transformers", "log.log_completions_steps=0"]
        command = [sys.executable, "benchmarks/experiments.py", "--only", "stapo", "random", "--seeds", "3"]
        command += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--set", *toy]
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
