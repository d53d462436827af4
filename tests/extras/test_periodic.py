"""Evaluation during training, and the best adapter."""

import json
import re
from unittest.mock import Mock, call

import pytest
from helpers import MINIMAL, adapter_bytes, held_out_rows, run, without_times

from stapo_lite.config import load_config, load_eval_config
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation import periodic
from stapo_lite.extras.evaluation.evaluate import evaluate
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.files import read_lines, read_object, write_lines
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.training.folder import read_metrics


def test_the_best_adapter_is_kept_over_a_resumption(write_config, tmp_path, monkeypatch):
    folder, judged = tmp_path / "run", []
    score = RewardModel.score

    def note(self, completions, seed, step):
        score(self, completions, seed, step)
        if completions[0].prompt.prompt == "say five":
            judged.append((step, completions))

    monkeypatch.setattr(RewardModel, "score", note)
    changes = {
        "evaluation": held_out_rows(tmp_path, num_samples=2, limit=2),
        "log": {"save_steps": 1, "save_total_limit": 9},
        "train__learning_rate": 0.03,
        "seed": 7,  # whose untrained adapter is not the best
    }
    run(write_config(train__max_steps=2, **changes))
    run(write_config(train__max_steps=5, **changes), resume=True)
    lines = read_lines(folder / "evaluations.jsonl")
    steps = [line["step"] for line in lines]
    assert steps == [step - 1 for step, _ in judged] == [0, 1, 2, 3, 4, 5]
    assert all(len(completions) == 4 for _, completions in judged)
    rewards = [sum(c.reward for c in completions) / 4 for _, completions in judged]
    for name in ("reward", "reward/parity:even"):
        assert [line[name] for line in lines] == rewards
    best = rewards.index(max(rewards))
    assert best > 0  # the untrained adapter has no checkpoint to compare with
    assert adapter_bytes(folder / "best") == adapter_bytes(folder / f"checkpoint-{best}")
    kept = read_object(folder / "best" / "score.json")
    assert (kept["score"], kept["step"]) == (max(rewards), best)
    assert kept["evaluation"]["best"] == "reward"


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"source": "a.jsonl"}, "source=a.jsonl: no such file"), ({"best": "b"}, "best=b: choose")],
)
def test_bad_input_ends_a_run_before_its_first_step(write_config, tmp_path, changes, message):
    with pytest.raises(InputError, match=f"evaluation.{message}"):
        run(write_config(evaluation=held_out_rows(tmp_path) | changes))


def test_a_reward_that_no_function_gave_is_null(write_config, user_reward, tmp_path):
    user_reward(
        "def even(prompts, completion_ids, **_): return [None if prompt == 'say five' else ids[0] "
        "for prompt, ids in zip(prompts, completion_ids)]"
    )
    run(write_config(train__max_steps=1, evaluation=held_out_rows(tmp_path, limit=1)))
    lines = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert [(line["step"], line["reward"]) for line in lines] == [(0, None), (1, None)]
    assert not (tmp_path / "run" / "best").exists()


def test_benchmarks_while_a_run_trains(write_config, tiny_model, tmp_path, monkeypatch, capsys):
    """They are those of the command, and change nothing in a run; a resumption repeats none."""
    benchmark, folder = tmp_path / "mine.jsonl", tmp_path / "run"
    rows = [{"problem": f"say {word}", "answer": n} for n, word in enumerate(("five", "six"))]
    write_lines(benchmark, rows)
    settings = {"steps": 2, "benchmarks": [str(benchmark)], "num_samples": 6, "best": "mine"}
    settings |= {"temperature": 0.7, "top_p": 0.9}
    plain = run(write_config(output_dir=str(tmp_path / "plain"), train__max_steps=3))
    grade, graded = periodic.grade, []

    def note(tasks, lines):
        graded.append([lines[task.seed]["response"] for task in tasks])
        return grade(tasks, lines)

    monkeypatch.setattr(periodic, "grade", note)
    run(write_config(train__max_steps=2, evaluation=settings, log__audit_tokens=3))
    lines = [*read_lines(folder / "evaluations.jsonl"), {"step": 3}]  # after the checkpoint
    write_lines(folder / "evaluations.jsonl", lines)
    run(write_config(train__max_steps=3, evaluation=settings, log__audit_tokens=3), resume=True)
    assert without_times(read_metrics(folder)) == without_times(plain)
    assert adapter_bytes(folder / "adapter") == adapter_bytes(tmp_path / "plain" / "adapter")
    evaluations = read_lines(folder / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    tables = re.findall(r"^benchmarks after step ([023])\n\| benchm", capsys.readouterr().out, re.M)
    assert tables == ["0", "2", "3"]
    kept = read_object(folder / "best" / "score.json")
    assert (kept["score"], kept["step"]) == (0.0, 0)
    assert kept["evaluation"]["best"] == "mine"
    tree = {"model": str(tiny_model), "adapter": str(folder / "adapter"), "dtype": "float32"}
    tree |= {"output_dir": str(tmp_path / "e"), "benchmarks": settings["benchmarks"]}
    tree |= {"decoding": "justrl", "data": {"max_prompt_length": 64, "prompt_suffix": ""}}
    tree |= {"rollout": {"engine": "transformers", "num_samples": 6, "max_completion_length": 8}}
    results = evaluate(load_eval_config(tree))
    assert results["benchmarks"] == evaluations[-1]["benchmarks"]
    samples = [line["response"] for line in read_lines(tmp_path / "e" / "samples-0.jsonl")]
    assert samples == graded[2] != graded[1] != graded[0]


@pytest.mark.parametrize(
    ("results", "kept"),
    [
        ({"reward": 0.6}, True),
        ({"reward": 0.5}, False),
        ({"reward": 0.1, "reward/mine": 0.6}, True),
        ({"reward": 0.6, "reward/mine": None}, False),
        ({"benchmarks": {"mine": {"avg": 0.1}}, "average": {"avg": 0.6}}, True),
        ({"benchmarks": {"mine": {"avg": 0.6}}, "average": {"avg": 0.1}}, False),
    ],
)
def test_an_adapter_is_kept_if_its_score_beats_the_best(tmp_path, results, kept):
    metric = "average" if "average" in results else [*results][-1]
    config = load_config(MINIMAL, {"evaluation.steps": 1, "evaluation.best": metric})
    run = Mock(folder=tmp_path, config=config)
    run.progress.step = 3
    settings = config.evaluation.model_dump(mode="json", exclude={"steps"})
    before = {"score": 0.5, "step": 1, "evaluation": settings}
    path = tmp_path / "best" / "score.json"
    write_object(path, before)
    periodic.keep_best(run, metric, results)
    assert run.policy.mock_calls == [call.save_adapter(tmp_path / "best")] * kept
    assert read_object(path) == (before | {"score": 0.6, "step": 3} if kept else before)


@pytest.mark.parametrize("key", ["best", "limit", "temperature", "step"])
def test_the_best_of_another_evaluation_or_a_step_not_made_does_not_count(tmp_path, key):
    config = load_config(MINIMAL, {"evaluation.steps": 1, "evaluation.best": "reward"})
    settings = config.evaluation.model_dump(mode="json", exclude={"steps"})
    path = tmp_path / "best" / "score.json"
    before = {"score": 0.5, "step": 4 if key == "step" else 1}
    other = settings if key == "step" else settings | {key: 0.7}
    write_object(path, before | {"evaluation": other})
    run = Mock(folder=tmp_path, config=config)
    run.progress.step = 3
    periodic.keep_best(run, "reward", {"reward": 0.1})
    assert read_object(path) == {"score": 0.1, "step": 3, "evaluation": settings}


def test_held_out_rows_have_the_same_seeds_at_each_step(write_config, tmp_path, monkeypatch):
    seeds = []
    stream = TransformersEngine.stream

    def note(engine, prompts, own, decodings):
        if len(own) == 6:  # neither the step's completions nor benchmarks, of which there are none
            seeds.append(list(own))
        return stream(engine, prompts, own, decodings)

    monkeypatch.setattr(TransformersEngine, "stream", note)
    held_out = held_out_rows(tmp_path, num_samples=2)
    run(write_config(train__max_steps=2, evaluation=held_out, rollout__self_check=False))
    first, *others = seeds
    assert len(others) == 2
    assert len(set(first)) == 6
    assert others == [first] * 2


def write_object(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
