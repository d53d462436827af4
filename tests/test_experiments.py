"""The experiments' tasks and report by hand, their CSVs, and one of their runs at toy size."""

import itertools
import json
import math

import alliteration
import experiments_report
import pytest
import study_csv
import writing
from experiments import STUDIES
from helpers import ROOT

from stapo_lite.files import write_lines, write_text


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
    messages = [{"role": "assistant", "content": text}]
    assert writing.reward([messages], ["stone"], [4], [6], prompts=[]) == [score]


RIGHT = ("Big birds bring bread.", "\"Bread, (butter) and 'beer'!\"")
WRONG = ("Bread is bread, and butter is bread.", "Bread is better. Birds bring it.", "Big", "")


@pytest.mark.parametrize("text", [*RIGHT, *WRONG])
def test_alliteration_rewards_by_hand(text):
    messages = [{"role": "assistant", "content": text}]
    assert alliteration.reward([messages], ["b"], prompts=[]) == [float(text in RIGHT)]


@pytest.mark.parametrize("task", [writing, alliteration])
def test_held_out_prompts_are_never_trained_on(task):
    train, held_out = task.prompts()
    texts = {row["prompt"][-1]["content"] for row in train + held_out}
    assert len(texts) == len(train) + 100 == len(train) + len(held_out)


def write_study(path, method, reward, nll, held_out):
    """The CSV of a study of one method with two seeds; the run of the second one is longer."""
    rows = []
    for seed, step in [(0, step) for step in range(13)] + [(1, step) for step in range(21)]:
        row = {"method": method, "seed": seed, "step": step}
        if step > 0:
            row |= {"reward": reward(step), "sampled_nll": nll(seed, step), "silenced_share": 0.01}
            row["spurious_share"] = 0.02 if step <= 5 else 0.01
        if step in (10, 20):
            row |= {"held_out_reward": held_out(seed) if step == 10 else 0.0}
            row |= {"held_out_base_nll": 4.0 + seed / 2, "held_out_nll": 1.5}
        rows.append(row)
    study_csv.write_rows(path, study_csv.STEP_COLUMNS, rows)


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_report_of_runs_by_hand(tmp_path):
    """Rewards rise to 1 or stay at 0.2; entropies fall to 0 and 1, or stay at 3."""
    rises, falls = lambda step: min(1.0, step / 8), lambda seed, step: seed + max(0, 8 - step)
    write_study(tmp_path / "one.csv", "stapo", rises, falls, lambda seed: 0.9)
    fixed = lambda step: 0.2, lambda seed, step: 3.0, lambda seed: 0.2 + seed / 10
    write_study(tmp_path / "other.csv", "grpo", *fixed)
    found = experiments_report.load([tmp_path / "one.csv", tmp_path / "other.csv"])
    assert [row["step"] for row in found["grpo"][1]] == list(range(13))  # the longer ones are cut
    runs = experiments_report.measure_runs(found)
    stapo = runs["stapo"][0]
    assert stapo["steps to 0.5"] == 6  # the mean of 2/8 to 6/8
    assert (stapo["held-out reward"], stapo["entropy at the end"]) == (0.9, 0)
    assert stapo["entropy at reward 0.3"] == 5  # at step 5, the mean of 7 to 3
    assert (stapo["spurious, %, first steps"], stapo["silenced, %"]) == (2, pytest.approx(1.0))
    assert (stapo["KL from the base"], stapo["NLL under the base"]) == (2.5, 4.0)
    assert math.isnan(runs["grpo"][1]["steps to 0.5"])
    table = {cells(line)[0]: cells(line) for line in experiments_report.table(runs).splitlines()}
    assert {"0.25 ± 0.07", "none"} < set(table["grpo"])
    difference = experiments_report.differences(runs, "stapo").splitlines()[-1]
    # Reward: 0.2 and 0.3 less 0.9; 0.2 less the mean of 1/8 to 8/8 and four times 1.
    # Entropy: 3 less 0 and 1.
    reward = ["-0.65 ± 0.07", "0.500", "-0.51 ± 0.00", "0.500"]
    entropy = ["", "", "+2.50 ± 0.71", "0.500", "+0.00 ± 0.00", "1.000"]
    assert cells(difference) == ["grpo", "2", *reward, *entropy]
    experiments_report.draw(found, tmp_path / "figure.png")


@pytest.mark.parametrize("study", STUDIES)
def test_kept_results_are_complete(study):
    """Each run has a row, a commit, and all steps from the first one on without a gap."""
    results, steps = ROOT / "benchmarks/results", {}
    runs = study_csv.read_rows(study_csv.runs_path(results, study))
    for row in itertools.chain(*map(study_csv.read_rows, study_csv.steps_paths(results, study))):
        assert tuple(row) == study_csv.STEP_COLUMNS
        steps.setdefault(study_csv.run_key(row), []).append(row)
    assert [study_csv.run_key(run) for run in runs] == list(steps)
    for run, rows in zip(runs, steps.values(), strict=True):
        assert (tuple(run), len(run["commit"])) == (study_csv.RUN_COLUMNS, 40)
        numbers = [int(row["step"]) for row in rows]
        assert numbers == list(range(numbers[0], numbers[0] + len(rows)))
        assert all(row["reward"] for row in rows if row["step"] != "0")
        assert rows[-1]["held_out_reward"]


def test_finished_runs_are_collected(tmp_path):
    """Runs that end one after the other are sorted into the CSVs; a second call changes nothing."""
    for method, seed in (("stapo", 10), ("stapo", 9), ("grpo", 9)):
        folder = tmp_path / "work" / f"{method}-{seed}"
        folder.mkdir(parents=True)
        write_text(folder / "environment.json", json.dumps({"torch": "2.0"}))
        write_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 2 / 3, "tau_h": None}])
        looks = [{"step": 0, "nll": 1e-7 / 3, "samples": ["a"]}, {"step": 1, "nll": 1}]
        write_lines(folder / "held_out.jsonl", looks)
        run = {"method": method, "seed": seed, "overrides": "a=b 'c=d e'", "commit": "0" * 40}
        study_csv.keep_result(folder, run)
        study_csv.collect_results(tmp_path, "study", tmp_path / "work")
    files = [*study_csv.steps_paths(tmp_path, "study"), study_csv.runs_path(tmp_path, "study")]
    steps, _, runs = map(study_csv.read_rows, files)
    keys = [study_csv.run_key(run) for run in runs]
    assert keys == [("grpo", 9), ("stapo", 9), ("stapo", 10)]
    assert (runs[0]["overrides"], runs[0]["torch"], runs[0]["peft"]) == ("a=b 'c=d e'", "2.0", "")
    measured = [(row["step"], row["reward"], row["held_out_nll"]) for row in steps]
    assert measured == [("0", "", "3.3333e-08"), ("1", "0.66667", "1")]
    texts = [path.read_text("utf-8") for path in files]
    files[-1].write_text(texts[-1].rpartition("stapo,10")[0], "utf-8")  # killed before this one
    study_csv.collect_results(tmp_path, "study", tmp_path / "work")
    study_csv.collect_results(tmp_path, "study", tmp_path / "none")
    assert [path.read_text("utf-8") for path in files] == texts


@pytest.mark.slow
def test_finished_run_is_not_made_again(experiment, tmp_path):
    command = ["experiments", "alliteration", "--only", "random", "--seeds", "3"]
    assert experiment(*command) == "random-3: finished\n"
    (run,) = study_csv.read_rows(tmp_path / "out/alliteration-runs.csv")
    assert run["overrides"].startswith("algorithm=stapo objective.s2t.preset=random train.max_")
    rows = study_csv.read_rows(tmp_path / "out/alliteration/random.csv")
    known = [(row["step"], bool(row["reward"]), bool(row["held_out_reward"])) for row in rows]
    assert known == [("0", False, True), ("1", True, False), ("2", True, True)]
    # A new adapter changes nothing: policy and base are the same before the first step.
    nll, base_nll = float(rows[0]["held_out_nll"]), float(rows[0]["held_out_base_nll"])
    assert nll == pytest.approx(base_nll, abs=1e-5)
    assert experiment(*command) == ""
