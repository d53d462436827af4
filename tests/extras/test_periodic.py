"""Evaluation during training, and the best adapter."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from helpers import MINIMAL, adapter_bytes, held_out_rows, run, without_times

from stapo_lite.config import Config, load_eval_config
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation import periodic
from stapo_lite.extras.evaluation.evaluate import evaluate
from stapo_lite.files import read_lines, write_lines
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.training.folder import read_metrics


def test_the_best_adapter_by_held_out_rows_with_ones_own_reward(
    write_config, tmp_path, monkeypatch, capsys
):
    """Scores from the completions; the adapter is that of the step with the best of them, also over
    a resumption."""
    folder, judged = tmp_path / "run", []
    score = RewardModel.score

    def note(self, completions, seed, step):
        score(self, completions, seed, step)
        if completions[0].prompt.prompt == "say five":
            judged.append((step, completions))

    monkeypatch.setattr(RewardModel, "score", note)
    held_out = held_out_rows(tmp_path, num_samples=2, limit=2)
    changes = {
        "evaluation": held_out,
        "log": {"save_steps": 1, "save_total_limit": 9},
        "train__learning_rate": 0.03,
        "seed": 7,  # whose untrained adapter is not the best
    }
    run(write_config(train__max_steps=2, **changes))
    run(write_config(train__max_steps=5, **changes), resume=True)
    lines = read_lines(folder / "evaluations.jsonl")
    assert (
        [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5] == [step - 1 for step, _ in judged]
    )
    assert all(len(completions) == 4 for _, completions in judged)
    rewards = [sum(c.reward for c in completions) / 4 for _, completions in judged]
    assert (
        [line["reward"] for line in lines]
        == [line["reward/parity:even"] for line in lines]
        == rewards
    )
    best = rewards.index(max(rewards))
    assert best > 0  # the untrained adapter has no checkpoint to compare with
    assert adapter_bytes(folder / "best") == adapter_bytes(folder / f"checkpoint-{best}")
    score = {"metric": "reward", "score": max(rewards), "step": best}
    kept = json.loads((folder / "best" / "score.json").read_text(encoding="utf-8"))
    assert {key: kept[key] for key in score} == score
    shown = f"best so far: reward {max(rewards):.3f} after step {best}, kept in {folder / 'best'}"
    assert shown in capsys.readouterr().out
    with pytest.raises(InputError, match="evaluation.source=nowhere.jsonl: no such file"):
        run(
            write_config(
                output_dir=str(tmp_path / "b"), evaluation=held_out | {"source": "nowhere.jsonl"}
            )
        )
    with pytest.raises(InputError, match="evaluation.best=math500: choose one of reward"):
        run(write_config(output_dir=str(tmp_path / "b"), evaluation=held_out | {"best": "math500"}))


def test_benchmarks_during_training(write_config, tiny_model, tmp_path, monkeypatch, capsys):
    """Before, during and after; like a token log they change nothing in the training; a resumed run
    repeats none; and the last one gives what an evaluation of the final adapter gives."""
    benchmark, folder = tmp_path / "mine.jsonl", tmp_path / "run"
    write_lines(
        benchmark,
        [{"problem": f"say {word}", "answer": n} for n, word in enumerate(("five", "six"))],
    )
    settings = {
        "steps": 2,
        "benchmarks": [str(benchmark)],
        "num_samples": 6,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    plain = run(write_config(output_dir=str(tmp_path / "plain"), train__max_steps=3))
    draw, responses = periodic.draw, []

    def note(*arguments):
        for line in draw(*arguments):
            responses.append(line["response"])
            yield line

    monkeypatch.setattr(periodic, "draw", note)
    folder.mkdir()
    (folder / "environment.json").write_text('{"stapo_lite": "0"}', encoding="utf-8")
    write_lines(
        folder / "evaluations.jsonl", [{"step": 0}]
    )  # of a run that was killed in its first step
    run(write_config(train__max_steps=2, evaluation=settings, log__audit_tokens=3))
    for name in ("evaluations.jsonl", "metrics.jsonl"):  # of a step after the checkpoint
        write_lines(folder / name, [*read_lines(folder / name), {"step": 3}])
    run(write_config(train__max_steps=3, evaluation=settings, log__audit_tokens=3), resume=True)
    assert without_times(read_metrics(folder)) == without_times(plain)
    assert adapter_bytes(folder / "adapter") == adapter_bytes(tmp_path / "plain" / "adapter")
    evaluations = read_lines(folder / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    assert all(line["benchmarks"]["mine"]["samples"] == 6 for line in evaluations)
    assert (
        len(
            re.findall(
                r"^benchmarks after step [023]\n\| benchmark ",
                capsys.readouterr().out,
                re.MULTILINE,
            )
        )
        == 3
    )
    tree = {
        "model": str(tiny_model),
        "adapter": str(folder / "adapter"),
        "output_dir": str(tmp_path / "evaluation"),
    }
    tree |= {"dtype": "float32", "benchmarks": settings["benchmarks"], "decoding": "justrl"}
    tree |= {"data": {"max_prompt_length": 64, "prompt_suffix": ""}}
    tree |= {"rollout": {"engine": "transformers", "num_samples": 6, "max_completion_length": 8}}
    results = evaluate(load_eval_config(tree))
    assert results["benchmarks"] == evaluations[-1]["benchmarks"]
    assert [
        line["response"] for line in read_lines(tmp_path / "evaluation" / "samples-0.jsonl")
    ] == responses[24:]
    assert responses[:12] != responses[12:24] != responses[24:]


def test_a_best_score_that_cannot_be_read_costs_a_warning(tmp_path, caplog):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "score.json").write_text("{", encoding="utf-8")
    config = Config(**MINIMAL, evaluation={"steps": 1, "source": "h.jsonl", "best": "reward"})
    run = SimpleNamespace(config=config, folder=tmp_path, progress=SimpleNamespace(step=1))
    periodic.keep_best(run, {"reward": 1.0})
    assert re.search(r"best was not written \(.*score.json: not JSON", caplog.text)


def test_the_best_adapter_of_steps_that_are_taken_again_is_dropped(write_config, tmp_path):
    held_out = held_out_rows(tmp_path, num_samples=4)
    changes = {"evaluation": held_out, "log": {"save_steps": 1, "save_total_limit": 9}}
    run(write_config(train__max_steps=3, train__learning_rate=0.1, **changes))
    folder = tmp_path / "run"
    score = json.loads((folder / "best" / "score.json").read_text(encoding="utf-8"))
    lucky = json.dumps(score | {"score": 1e6, "step": 3})
    (folder / "best" / "score.json").write_text(lucky, encoding="utf-8")
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoint-{step}")
    run(write_config(train__max_steps=3, train__learning_rate=0.1, **changes), resume=True)
    kept = json.loads((folder / "best" / "score.json").read_text(encoding="utf-8"))
    again = {
        line["step"]: line["reward"]
        for line in read_lines(folder / "evaluations.jsonl")
        if line["step"] > 1
    }
    assert kept == score | {"score": max(again.values()), "step": max(again, key=again.get)}


@pytest.mark.parametrize(
    "killed", ["before the old one goes", "while it goes", "before the new one comes"]
)
def test_no_kill_loses_the_best_adapter(tmp_path, killed):
    for name, step in (("best", 1), (".best", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name, encoding="utf-8")
        (tmp_path / name / "score.json").write_text(json.dumps({"step": step}), encoding="utf-8")
    if killed != "before the old one goes":
        (tmp_path / "best" / "score.json").unlink()
    if killed == "before the new one comes":
        shutil.rmtree(tmp_path / "best")
    periodic.take_next_best(tmp_path)
    periodic.take_next_best(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (tmp_path / "best" / "adapter_model.safetensors").read_text(encoding="utf-8") == ".best"
    (tmp_path / ".best").mkdir()  # one that was killed while it was written
    periodic.take_next_best(tmp_path)
    assert json.loads((tmp_path / "best" / "score.json").read_text(encoding="utf-8")) == {"step": 2}
