"""The experiments' task by hand, and one of their runs at toy size."""

import itertools
import json
import math
import os
import subprocess
import sys
from statistics import fmean

import alliteration
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


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Big birds bring bread.", True),
        ("\"Bread, (butter) and 'beer'!\"", True),
        ("Bread is bread, and butter is bread.", False),
        ("Bread is better. Birds bring it.", False),
        ("Big birds bring bread", False),
        ("", False),
    ],
)
def test_alliterations_by_hand(text, right):
    assert alliteration.reward([[{"role": "assistant", "content": text}]], ["b"], prompts=[]) == [float(right)]


def test_held_out_prompts_are_never_trained_on():
    for task, count in ((writing, 400), (alliteration, 300)):
        train, held_out = task.prompts()
        assert (len(train), len(held_out)) == (count, 100)
        texts = [row["prompt"][-1]["content"] for row in train + held_out]
        assert len(set(texts)) == count + 100
        asked = [f'"{row["word"]}"' if task is writing else f" {row['letter'].upper()}." for row in train + held_out]
        assert all(part in text for part, text in zip(asked, texts, strict=True))
        assert task.prompts() == (train, held_out)


def test_what_an_answer_earns_that_ignores_the_numbers():
    """The word in its place, and for all prompts the same numbers of words."""
    asked = [{name: row[name] for name in ("word", "first", "second")} for row in writing.prompts()[1]]
    earned = {}
    for first, second in itertools.product(range(6, 15), repeat=2):
        texts = [f"{'so ' * (first - 1)}on. {'so ' * (second - 1)}{one['word']}." for one in asked]
        earned[first, second] = fmean(writing.score(text, **one) for text, one in zip(texts, asked, strict=True))
    assert max(earned, key=earned.__getitem__) == (8, 11)
    assert earned[8, 11] == pytest.approx(0.70, abs=0.005)


def test_a_report_of_runs_by_hand(tmp_path):
    """Two methods, two seeds: rewards rise to 1 or stay at 0.2, entropies fall to 0 or 1 or stay at 3."""
    for method, rises in (("stapo", True), ("grpo", False)):
        for seed in (0, 1):
            folder = tmp_path / ("one" if rises else "other") / f"{method}-{seed}"
            folder.mkdir(parents=True)
            (folder / "environment.json").write_text("{}", encoding="utf-8")
            lines = [
                {
                    "step": step, "reward": min(1.0, step / 8) if rises else 0.2,
                    "sampled_nll": seed + max(0, 8 - step) if rises else 3.0, "silenced_share": 0.01 if rises else 0.0,
                    "spurious_share": 0.02 if step <= 5 else 0.01, "spurious_gradient_share": None,
                }
                for step in range(1, 21 if seed else 13)  # the longer ones are cut
            ]  # fmt: skip
            write_lines(folder / "metrics.jsonl", lines)
            looks = [
                {
                    "step": 10, "reward": 0.9 if rises else 0.2 + seed / 10, "base_nll": 4.0 if rises else 4.5 + seed,
                    "nll": 1.5,
                },
                {"step": 20, "reward": 0.0, "base_nll": 0.0, "nll": 0.0},
            ]  # fmt: skip
            write_lines(folder / "held_out.jsonl", looks)
    found = experiments_report.load([tmp_path / "one", tmp_path / "other"])
    runs = {m: {s: experiments_report.measures(*lines) for s, lines in seeds.items()} for m, seeds in found.items()}
    stapo = runs["stapo"][0]
    assert stapo["steps to 0.5"] == 6  # the mean of 2/8 to 6/8
    assert stapo["held-out reward"] == 0.9
    assert stapo["entropy at the end"] == 0
    assert stapo["entropy at reward 0.3"] == 5  # at step 5, the mean of 7 to 3
    assert stapo["spurious, %, first steps"] == 2
    assert (stapo["KL from the base"], stapo["NLL under the base"]) == (2.5, 4.0)
    assert math.isnan(stapo["greedy, step 20"])
    assert math.isnan(experiments_report.measures(*found["stapo"][0][:1], [])["held-out reward"])  # cut before a look
    assert stapo["silenced, %"] == pytest.approx(1.0)
    assert math.isnan(runs["grpo"][1]["steps to 0.5"])
    cells = {row.split("|")[1].strip(): row for row in experiments_report.table(runs).splitlines()}
    assert "0.25 ± 0.07" in cells["grpo"]
    assert "none" in cells["grpo"]
    difference = experiments_report.differences(runs, "stapo").splitlines()[-1]
    # Reward: 0.2 and 0.3 less 0.9; 0.2 less the mean of 1/8 to 8/8 and four times 1; entropy: 3 less 0 and 1.
    compared = ["-0.65 ± 0.07", "0.50", "-0.51 ± 0.00", "0.50", "", "", "+2.50 ± 0.71", "0.50", "+1.00 ± 0.71", "0.50"]
    assert [cell.strip() for cell in difference.split("|")[1:-1]] == ["grpo", "2", *compared]
    experiments_report.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def experiment(tiny_model, tmp_path):
    """A function that runs one of the scripts at toy size and returns what it prints."""

    def run(script, *arguments):
        toy = ["train.max_steps=2", "data.max_prompt_length=440", "rollout.max_completion_length=8"]
        toy += [f"model={tiny_model}", "dtype=float32", "rollout.engine=transformers", "log.log_completions_steps=0"]
        folders = ["--results", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        command = [sys.executable, f"benchmarks/{script}", *arguments, *folders, "--set", *toy]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_a_finished_run_is_not_made_again(experiment, tmp_path):
    first = experiment("experiments.py", "alliteration", "--only", "stapo", "random", "--seeds", "3")
    assert sorted(first.splitlines()) == ["random-3: finished", "stapo-3: finished"]
    for name in ("random-3", "stapo-3"):
        left = tmp_path / "out" / name
        assert [line["step"] for line in read_lines(left / "metrics.jsonl")] == [1, 2]
        looks = read_lines(left / "held_out.jsonl")
        assert [look["step"] for look in looks] == [0, 2]
        # A new adapter changes nothing: policy and base are the same before the first step.
        assert looks[0]["nll"] == pytest.approx(looks[0]["base_nll"], abs=1e-5)
        assert sum(looks[0]["rewards"]) == pytest.approx(100 * looks[0]["reward"], abs=1e-2)
        assert 0 <= looks[0]["greedy_reward"] <= 1
        assert len(json.loads((left / "environment.json").read_text("utf-8"))["commit"]) == 40
        config = (left / "config.yaml").read_text("utf-8")
        assert f"output_dir: {tmp_path / 'work' / name}" in config
        assert "- alliteration:reward" in config
    assert experiment("experiments.py", "alliteration", "--only", "stapo", "random", "--seeds", "3") == ""
