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


def test_the_best_adapter_is_kept_over_a_resumption(write_config, tmp_path, monkeypatch, watch):
    """By held-out rows that have the same seeds each time."""
    folder, judged, stream = tmp_path / "run", [], Mock(wraps=TransformersEngine.stream)

    def note(_, rewards, completions, seed, step):
        if completions[0].prompt.prompt == "say five":
            judged.append((step, completions))

    watch(RewardModel, "score", note)
    monkeypatch.setattr(TransformersEngine, "stream", lambda *given: stream(*given))
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
    seeds = [[*each.args[2]] for each in stream.call_args_list if len(each.args[2]) == 4]
    assert seeds == seeds[:1] * 6
    assert len(set(seeds[0])) == 4
    rewards = [sum(c.reward for c in completions) / 4 for _, completions in judged]
    for name in ("reward", "reward/parity:even"):
        assert [line[name] for line in lines] == rewards
    best = rewards.index(max(rewards))
    assert best > 0  # the untrained adapter has no checkpoint to compare with
    assert adapter_bytes(folder / "best") == adapter_bytes(folder / f"checkpoint-{best}")
    kept = read_object(folder / "best" / "score.json")
    assert (kept["score"], kept["step"]) == (max(rewards), best)
    assert kept["evaluation"]["best"] == "reward"


def test_a_held_out_row_that_is_too_long_is_not_left_out(write_config, tmp_path):
    settings = held_out_rows(tmp_path)
    write_lines(tmp_path / "held_out.jsonl", [{"prompt": "say five " * 50}])
    config = write_config(evaluation=settings, data__filter_overlong_prompts=True)
    with pytest.raises(InputError, match="row 1: the prompt has .* is 64: raise it$"):
        run(config)


def test_a_reward_that_no_function_gave_is_null(write_config, user_reward, tmp_path):
    user_reward(
        "def even(prompts, completion_ids, **_): return [None if prompt == 'say five' else ids[0] "
        "for prompt, ids in zip(prompts, completion_ids)]"
    )
    run(write_config(train__max_steps=1, evaluation=held_out_rows(tmp_path, limit=1)))
    lines = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert [(line["step"], line["reward"]) for line in lines] == [(0, None), (1, None)]
    assert not (tmp_path / "run" / "best").exists()


def test_benchmarks_while_a_run_trains(write_config, tiny_model, tmp_path, watch, capsys, caplog):
    """They are those of the command, and change nothing in a run; a resumption repeats none."""
    benchmark, folder = tmp_path / "mine.jsonl", tmp_path / "run"
    rows = [{"problem": f"say {word}", "answer": n} for n, word in enumerate(("five", "six"))]
    write_lines(benchmark, rows)
    settings = {"steps": 2, "benchmarks": [str(benchmark)], "num_samples": 6, "best": "mine"}
    settings |= {"temperature": 0.7, "top_p": 0.9}
    plain = run(write_config(output_dir=str(tmp_path / "plain"), train__max_steps=3))
    graded = []

    def note(_, tasks, lines):
        graded.append([lines[task.seed]["response"] for task in tasks])

    watch(periodic, "grade", note)
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
    assert "trained on" not in caplog.text
    assert results["benchmarks"] == evaluations[-1]["benchmarks"]
    samples = [line["response"] for line in read_lines(tmp_path / "e" / "samples-0.jsonl")]
    assert samples == graded[2] != graded[1] != graded[0]
    adapter = folder / "adapter" / "adapter_config.json"
    of_another = read_object(adapter) | {"base_model_name_or_path": "Qwen/Qwen3-8B"}
    adapter.write_text(json.dumps(of_another))
    assert evaluate(load_eval_config(tree)) == results
    assert "run/adapter was trained on Qwen/Qwen3-8B" in caplog.text


@pytest.mark.parametrize(
    ("results", "before", "kept"),
    [
        ({"reward": 0.6}, {}, True),
        ({"reward": 0.5}, {}, False),
        ({"reward": 0.1, "reward/mine": 0.6}, {}, True),
        ({"reward": 0.6, "reward/mine": None}, {}, False),
        ({"benchmarks": {"mine": {"avg": 0.1}}, "average": {"avg": 0.6}}, {}, True),
        ({"benchmarks": {"mine": {"avg": 0.6}}, "average": {"avg": 0.1}}, {}, False),
        ({"reward": 0.6}, {"score": 0.9, "limit": 4}, True),  # of another evaluation
        ({"reward": 0.6}, {"score": 0.9, "best": "mine"}, True),
        ({"reward": 0.6}, {"score": 0.9, "step": 4}, True),  # of a step that will come again
    ],
)
def test_an_adapter_is_kept_if_its_score_beats_the_best(tmp_path, results, before, kept):
    metric = "average" if "average" in results else [*results][-1]
    config = load_config(MINIMAL, {"evaluation.steps": 1, "evaluation.best": metric})
    run = Mock(folder=tmp_path, config=config)
    run.progress.step = 3
    settings = config.evaluation.model_dump(mode="json", exclude={"steps"})
    changes = {key: before[key] for key in before.keys() & settings.keys()}
    best = {"score": 0.5, "step": 1} | before | {"evaluation": settings | changes}
    (tmp_path / "best").mkdir()
    write_lines(tmp_path / "best" / "score.json", [best])
    periodic.keep_best(run, metric, results)
    assert run.policy.mock_calls == [call.save_adapter(tmp_path / "best")] * kept
    new = {"score": 0.6, "step": 3, "evaluation": settings}
    assert read_object(tmp_path / "best" / "score.json") == (new if kept else best)
