"""The experiments' tasks and report by hand, their CSVs, and one of their runs at toy size."""

import itertools
import json
import math
from statistics import fmean

import alliteration
import experiments_report
import pytest
import study_csv
import writing
from experiments import STUDIES
from helpers import ROOT

from stapo_lite.files import read_lines, write_lines, write_text


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
def test_writing_rewards_by_hand(text, score):
    """Four words, then six with `stone`."""
    assert writing.score(text, "stone", 4, 6) == score
    assert writing.reward(
        [[{"role": "assistant", "content": text}]], ["stone"], [4], [6], prompts=[]
    ) == [score]


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
def test_alliteration_rewards_by_hand(text, right):
    assert alliteration.reward([[{"role": "assistant", "content": text}]], ["b"], prompts=[]) == [
        float(right)
    ]


def test_held_out_prompts_are_never_trained_on():
    for task, count in ((writing, 400), (alliteration, 300)):
        train, held_out = task.prompts()
        assert (len(train), len(held_out)) == (count, 100)
        texts = [row["prompt"][-1]["content"] for row in train + held_out]
        assert len(set(texts)) == count + 100
        asked = [
            f'"{row["word"]}"' if task is writing else f" {row['letter'].upper()}."
            for row in train + held_out
        ]
        assert all(part in text for part, text in zip(asked, texts, strict=True))
        assert task.prompts() == (train, held_out)


def test_best_reward_of_an_answer_that_ignores_the_lengths():
    """The word in its place, and the same numbers of words for all prompts: 0.70 at most."""
    asked = [
        {name: row[name] for name in ("word", "first", "second")} for row in writing.prompts()[1]
    ]
    earned = {}
    for first, second in itertools.product(range(6, 15), repeat=2):
        texts = [f"{'so ' * (first - 1)}on. {'so ' * (second - 1)}{one['word']}." for one in asked]
        earned[first, second] = fmean(
            writing.score(text, **one) for text, one in zip(texts, asked, strict=True)
        )
    assert max(earned, key=earned.__getitem__) == (8, 11)
    assert earned[8, 11] == pytest.approx(0.70, abs=0.005)


def write_study(path, method, rises):
    """The CSV of a study of one method with two seeds; the run of the second one is longer."""
    rows = []
    for seed in (0, 1):
        for step in range(21 if seed else 13):
            row = {"method": method, "seed": seed, "step": step}
            if step > 0:
                row |= {
                    "reward": min(1.0, step / 8) if rises else 0.2,
                    "sampled_nll": seed + max(0, 8 - step) if rises else 3.0,
                    "silenced_share": 0.01 if rises else 0.0,
                    "spurious_share": 0.02 if step <= 5 else 0.01,
                    "spurious_gradient_share": None,
                }
            if step == 10:
                row |= {
                    "held_out_reward": 0.9 if rises else 0.2 + seed / 10,
                    "held_out_base_nll": 4.0 if rises else 4.5 + seed,
                    "held_out_nll": 1.5,
                }
            if step == 20:
                row |= {"held_out_reward": 0.0, "held_out_base_nll": 0.0, "held_out_nll": 0.0}
            rows.append(row)
    study_csv.write_rows(path, study_csv.STEP_COLUMNS, rows)


def test_report_of_runs_by_hand(tmp_path):
    """Two methods, two seeds: rewards rise to 1 or stay at 0.2, entropies fall to 0 or 1 or stay at
    3."""
    write_study(tmp_path / "one.csv", "stapo", rises=True)
    write_study(tmp_path / "other.csv", "grpo", rises=False)
    found = experiments_report.load([tmp_path / "one.csv", tmp_path / "other.csv"])
    assert [row["step"] for row in found["grpo"][1]] == list(range(13))  # the longer ones are cut
    runs = {
        method: {seed: experiments_report.measures(steps) for seed, steps in seeds.items()}
        for method, seeds in found.items()
    }
    stapo = runs["stapo"][0]
    assert stapo["steps to 0.5"] == 6  # the mean of 2/8 to 6/8
    assert stapo["held-out reward"] == 0.9
    assert stapo["entropy at the end"] == 0
    assert stapo["entropy at reward 0.3"] == 5  # at step 5, the mean of 7 to 3
    assert stapo["spurious, %, first steps"] == 2
    assert (stapo["KL from the base"], stapo["NLL under the base"]) == (2.5, 4.0)
    assert math.isnan(stapo["greedy, step 20"])
    before = experiments_report.measures(found["stapo"][0][:10])  # cut before an evaluation
    assert math.isnan(before["held-out reward"])
    assert stapo["silenced, %"] == pytest.approx(1.0)
    assert math.isnan(runs["grpo"][1]["steps to 0.5"])
    cells = {row.split("|")[1].strip(): row for row in experiments_report.table(runs).splitlines()}
    assert "0.25 ± 0.07" in cells["grpo"]
    assert "none" in cells["grpo"]
    difference = experiments_report.differences(runs, "stapo").splitlines()[-1]
    # Reward: 0.2 and 0.3 less 0.9; 0.2 less the mean of 1/8 to 8/8 and four times 1.
    # Entropy: 3 less 0 and 1.
    compared = [
        "-0.65 ± 0.07",
        "0.50",
        "-0.51 ± 0.00",
        "0.50",
        "",
        "",
        "+2.50 ± 0.71",
        "0.50",
        "+1.00 ± 0.71",
        "0.50",
    ]
    assert [cell.strip() for cell in difference.split("|")[1:-1]] == ["grpo", "2", *compared]
    experiments_report.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("study", STUDIES)
def test_kept_results_are_complete(study):
    """Each run has a row, a commit, and all steps from the first one on without a gap."""
    results = ROOT / "benchmarks/results"
    runs = study_csv.read_rows(study_csv.runs_path(results, study))
    steps = {}
    for path in study_csv.steps_paths(results, study):
        assert path.stat().st_size < 1_000_000
        for row in study_csv.read_rows(path):
            assert tuple(row) == study_csv.STEP_COLUMNS
            assert row["method"] == path.stem
            steps.setdefault(study_csv.run_key(row), []).append(row)
    assert [study_csv.run_key(run) for run in runs] == list(steps)
    for run in runs:
        assert tuple(run) == study_csv.RUN_COLUMNS
        assert len(run["commit"]) == 40
        rows = steps[study_csv.run_key(run)]
        numbers = [int(row["step"]) for row in rows]
        assert numbers == list(range(numbers[0], numbers[0] + len(rows)))
        assert all(row["reward"] for row in rows if row["step"] != "0")
        assert rows[-1]["held_out_reward"]


def test_finished_runs_are_collected(tmp_path):
    """Runs that end one after the other are sorted into the CSVs; a second call changes nothing."""
    environment = {"torch": "2.0", "self_check": "of no interest"}
    for method, seed in (("stapo", 10), ("stapo", 9), ("grpo", 9)):
        folder = tmp_path / "work" / f"{method}-{seed}"
        folder.mkdir(parents=True)
        write_text(folder / "environment.json", json.dumps(environment))
        write_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 2 / 3, "tau_h": None}])
        looks = [{"step": 0, "nll": 1e-7 / 3, "samples": ["a"]}, {"step": 1, "nll": 1}]
        write_lines(folder / "held_out.jsonl", looks)
        run = {"method": method, "seed": seed, "overrides": "a=b 'c=d e'", "commit": "0" * 40}
        study_csv.keep_result(folder, run)
        study_csv.collect_results(tmp_path, "study", tmp_path / "work")
    assert study_csv.finished_runs(tmp_path, "study") == {("stapo", 10), ("stapo", 9), ("grpo", 9)}
    files = [*study_csv.steps_paths(tmp_path, "study"), study_csv.runs_path(tmp_path, "study")]
    *of_methods, runs = map(study_csv.read_rows, files)
    steps = [row for rows in of_methods for row in rows]
    assert [(run["method"], run["seed"]) for run in runs] == [
        ("grpo", "9"),
        ("stapo", "9"),
        ("stapo", "10"),
    ]
    assert (runs[0]["overrides"], runs[0]["torch"], runs[0]["peft"]) == ("a=b 'c=d e'", "2.0", "")
    assert [row["step"] for row in steps] == ["0", "1"] * 3
    assert (steps[0]["reward"], steps[0]["held_out_nll"]) == ("", "3.33333e-08")
    assert (steps[1]["reward"], steps[1]["tau_h"]) == ("0.666667", "")
    texts = [path.read_text("utf-8") for path in files]
    files[-1].write_text(texts[-1].rpartition("stapo,10")[0], "utf-8")  # killed before this one
    study_csv.collect_results(tmp_path, "study", tmp_path / "work")
    study_csv.collect_results(tmp_path, "study", tmp_path / "none")
    assert [path.read_text("utf-8") for path in files] == texts


@pytest.mark.slow
def test_finished_run_is_not_made_again(experiment, tmp_path):
    command = ["experiments.py", "alliteration", "--only", "stapo", "random", "--seeds", "3"]
    first = experiment(*command)
    assert sorted(first.splitlines()) == ["random-3: finished", "stapo-3: finished"]
    paths = [tmp_path / f"out/alliteration/{method}.csv" for method in ("random", "stapo")]
    runs_path = tmp_path / "out/alliteration-runs.csv"
    runs = study_csv.read_rows(runs_path)
    assert [study_csv.run_key(run) for run in runs] == [("random", 3), ("stapo", 3)]
    for run in runs:
        assert len(run["commit"]) == 40
        assert run["engine"] == "transformers"
        rows = study_csv.read_rows(tmp_path / f"out/alliteration/{run['method']}.csv")
        assert [row["step"] for row in rows] == ["0", "1", "2"]
        assert [bool(row["reward"]) for row in rows] == [False, True, True]
        assert [bool(row["held_out_reward"]) for row in rows] == [True, False, True]
        # A new adapter changes nothing: policy and base are the same before the first step.
        nll, base_nll = float(rows[0]["held_out_nll"]), float(rows[0]["held_out_base_nll"])
        assert nll == pytest.approx(base_nll, abs=1e-5)
        assert 0 <= float(rows[0]["held_out_greedy_reward"]) <= 1
        folder = tmp_path / "work" / f"{run['method']}-3"
        look = read_lines(folder / "held_out.jsonl")[0]
        assert sum(look["rewards"]) == pytest.approx(100 * look["reward"], abs=1e-2)
        config = (folder / "config.yaml").read_text("utf-8")
        assert f"output_dir: {folder}" in config
        assert "- alliteration:reward" in config
    assert runs[0]["overrides"].startswith("algorithm=stapo objective.s2t.preset=random train.max_")
    texts = [path.read_text("utf-8") for path in (*paths, runs_path)]
    assert experiment(*command) == ""
    for path in (*paths, runs_path):
        path.unlink()
    assert experiment(*command) == ""  # the work folder has the results
    assert [path.read_text("utf-8") for path in (*paths, runs_path)] == texts
