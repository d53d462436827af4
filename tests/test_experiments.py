"""The experiments' task and report by hand, their files, and one of their runs at toy size."""

import json
import math

import experiments_report
import pytest
import study_file
import writing
from experiments import STUDIES

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


def test_held_out_prompts_are_never_trained_on():
    train, held_out = writing.prompts()
    texts = {row["prompt"][-1]["content"] for row in train + held_out}
    assert len(texts) == len(train) + 100 == len(train) + len(held_out)


def runs_of(method, reward, nll, held_out):
    """The rows of one method with two seeds; the run of the second one is longer."""
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
    return rows


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_report_of_runs_by_hand(tmp_path):
    """Rewards rise to 1 or stay at 0.2; entropies fall to 0 and 1, or stay at 3."""
    rises, falls = lambda step: min(1.0, step / 8), lambda seed, step: seed + max(0, 8 - step)
    rows = runs_of("stapo", rises, falls, lambda seed: 0.9)
    fixed = lambda step: 0.2, lambda seed, step: 3.0, lambda seed: 0.2 + seed / 10
    study_file.write_rows(tmp_path / "study.parquet", [*rows, *runs_of("grpo", *fixed)])
    found = experiments_report.load(tmp_path / "study.parquet")
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
    """Each run has a commit, and all steps from the first one on without a gap."""
    runs = {}
    for row in study_file.read_rows(study_file.study_path(study_file.RESULTS, study)):
        runs.setdefault(study_file.run_key(row), []).append(row)
    assert list(runs) == sorted(runs)
    for rows in runs.values():
        assert {len(row["commit"]) for row in rows} == {40}
        steps = [row["step"] for row in rows]
        assert steps == list(range(steps[0], steps[0] + len(rows)))
        assert all("reward" in row for row in rows if row["step"] > 0)
        assert "held_out_reward" in rows[-1]


def test_finished_runs_are_collected(tmp_path):
    """Runs that end one after the other are sorted into the file; a second call changes nothing."""
    for method, seed in (("stapo", 10), ("stapo", 9), ("grpo", 9)):
        folder = tmp_path / "work" / f"{method}-{seed}"
        folder.mkdir(parents=True)
        write_text(folder / "environment.json", json.dumps({"torch": "2.0", "python": "3"}))
        write_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 2 / 3, "entropy": None}])
        looks = [{"step": 0, "nll": 1e-7 / 3, "samples": ["a"]}, {"step": 1, "nll": 1}]
        write_lines(folder / "held_out.jsonl", looks)
        run = {"method": method, "seed": seed, "overrides": "a=b 'c=d e'", "commit": "0" * 40}
        study_file.keep_result(folder, run)
        study_file.collect_results(tmp_path, "study", tmp_path / "work")
    path = study_file.study_path(tmp_path, "study")
    rows = study_file.read_rows(path)
    assert list(map(study_file.run_key, rows[::2])) == [("grpo", 9), ("stapo", 9), ("stapo", 10)]
    first = run | {"method": "grpo", "seed": 9, "torch": "2.0"}
    assert rows[:2] == [
        first | {"step": 0, "held_out_nll": 3.3333e-08},
        first | {"step": 1, "reward": 0.66667, "held_out_nll": 1.0},
    ]
    written = path.read_bytes()
    study_file.collect_results(tmp_path, "study", tmp_path / "work")
    assert path.read_bytes() == written


@pytest.mark.slow
def test_finished_run_is_not_made_again(experiment, tmp_path):
    command = ["experiments", "writing", "--only", "random", "--seeds", "3"]
    assert experiment(*command) == "random-3: finished\n"
    rows = study_file.read_rows(tmp_path / "out/writing.parquet")
    assert rows[0]["overrides"].startswith("algorithm=stapo objective.s2t.preset=random train.max_")
    known = [(row["step"], "reward" in row, "held_out_reward" in row) for row in rows]
    assert known == [(0, False, True), (1, True, False), (2, True, True)]
    # A new adapter changes nothing: policy and base are the same before the first step.
    assert rows[0]["held_out_nll"] == pytest.approx(rows[0]["held_out_base_nll"], abs=1e-5)
    assert experiment(*command) == ""
