"""Output folders: a run or an evaluation overwrites nothing that is not its own."""

import json
import shutil

import pytest
from helpers import command, held_out_rows, run, write_yaml
from safetensors.torch import load_file, save_file

from stapo_lite import evaluate, load_eval_config
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.periodic import BEST, SCORE_FILE, drop_best
from stapo_lite.files import lock, read_lines, size_up_to_step, write_lines


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "completions.jsonl",
        "metrics.jsonl",
        "best/notes.txt",
        "adapter/a",
        "checkpoint-3/a",
        "reward.png",
    ],
)
def test_a_new_run_overwrites_no_other_files(write_config, tmp_path, name, resume):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"text": "mine"}\n', encoding="utf-8")
    before = contents(tmp_path / "run")
    if name.startswith("checkpoint") and resume:
        message = "holds only damaged checkpoints"
    else:
        message = (
            f"run: {name.partition('/')[0]} is there already and would be overwritten: choose "
            "another folder"
        )
    with pytest.raises(InputError, match=message):
        run(write_config(), resume)
    assert contents(tmp_path / "run") | {".lock": b""} == before | {".lock": b""}


def test_a_run_does_not_replace_the_config_it_is_started_with(write_config, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    config = tmp_path / "run" / "config.yaml"
    text = "# my notes\n" + write_config().read_text(encoding="utf-8")
    config.write_text(text, encoding="utf-8")
    assert command("train", config) == 2
    assert "config.yaml is there already" in capsys.readouterr().err
    assert config.read_text(encoding="utf-8") == text


def test_a_run_that_was_killed_before_its_first_step_begins_again(write_config, tmp_path):
    folder = tmp_path / "run"
    run(write_config(train__max_steps=1))
    expected = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    for name in ("adapter", "checkpoint-1"):
        shutil.rmtree(folder / name)
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    run(write_config(train__max_steps=1))
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == expected


def test_a_folder_named_best_without_a_score_is_kept(tmp_path):
    best = tmp_path / BEST
    best.mkdir()
    for text in ("", "{}", '{"step": 3}'):
        if text:
            (best / SCORE_FILE).write_text(text, encoding="utf-8")
        drop_best(best, step=3)
        assert best.exists()
    drop_best(best, step=2)
    assert not best.exists()


def test_lines_without_a_step_are_one_line(tmp_path):
    write_lines(tmp_path / "completions.jsonl", [{"text": "mine"}])
    with pytest.raises(
        InputError, match=r"completions\.jsonl: its lines must have a step \(KeyError"
    ):
        size_up_to_step(tmp_path / "completions.jsonl", step=1)


@pytest.fixture
def evaluation(tiny_model, tmp_path):
    write_lines(tmp_path / "mine.jsonl", [{"problem": "say three", "answer": "3"}])

    def start(folder):
        tree = {"model": str(tiny_model), "output_dir": str(folder), "dtype": "float32"}
        tree |= {"benchmarks": [str(tmp_path / "mine.jsonl")], "data": {"max_prompt_length": 150}}
        tree |= {
            "rollout": {"engine": "transformers", "num_samples": 2, "max_completion_length": 4}
        }
        return evaluate(load_eval_config(write_yaml(tmp_path / "eval.yaml", tree)))

    return start


def test_runs_and_evaluations_keep_out_of_each_others_folders(write_config, tmp_path, evaluation):
    run(write_config(train__max_steps=1))
    before = contents(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"run: config\.yaml is there already and would be overwritten"
    ):
        evaluation(tmp_path / "run")
    assert contents(tmp_path / "run") == before
    evaluation(tmp_path / "eval")
    before = contents(tmp_path / "eval")
    with pytest.raises(
        InputError, match=r"eval: config\.yaml is there already and would be overwritten"
    ):
        run(write_config(output_dir=str(tmp_path / "eval")))
    assert contents(tmp_path / "eval") == before


def test_one_evaluation_of_a_folder_at_a_time(tmp_path, evaluation):
    with (
        lock(tmp_path / "eval"),
        pytest.raises(
            InputError, match=r"eval: another run writes to it now; choose another folder"
        ),
    ):
        evaluation(tmp_path / "eval")
    evaluation(tmp_path / "eval")
    evaluation(tmp_path / "eval")  # the lock ended with the one before
    assert len(read_lines(tmp_path / "eval" / "samples-0.jsonl")) == 2


@pytest.mark.parametrize(
    ("changed", "file"),
    [
        ("model", "base/model.safetensors"),
        ("lora.adapter", "start/adapter_model.safetensors"),
        ("objective.teacher_adapter", "teacher/adapter_model.safetensors"),
    ],
)
def test_a_resumed_run_notices_other_weights_under_the_same_name(
    write_config, make_policy, tiny_model, tmp_path, changed, file, capsys
):
    shutil.copytree(tiny_model, tmp_path / "base")
    make_policy(scale=0.5).save_adapter(tmp_path / "start")
    make_policy(scale=0.5).save_adapter(tmp_path / "teacher")
    changes = {"model": str(tmp_path / "base"), "objective__beta": 0.1}
    changes["objective__teacher_adapter"] = str(tmp_path / "teacher")
    changes["lora"] = {"r": 8, "lora_alpha": 16, "adapter": str(tmp_path / "start")}
    run(write_config(train__max_steps=1, **changes))
    run(write_config(train__max_steps=2, **changes), resume=True)
    values = {name: value + 0.01 for name, value in load_file(tmp_path / file).items()}
    save_file(values, tmp_path / file, {"format": "pt"})
    config = write_config(train__max_steps=3, **changes)
    assert command("train", config, "--resume") == 2
    assert f"the weights of {changed}={tmp_path}/" in capsys.readouterr().err
    assert command("train", config, "--resume", "--force") == 0
    assert f"{changed} " in capsys.readouterr().out


def test_a_start_adapter_that_a_resumed_run_does_not_read_may_be_gone(
    write_config, make_policy, tmp_path
):
    make_policy(scale=0.5).save_adapter(tmp_path / "start")
    changes = {"lora": {"r": 8, "lora_alpha": 16, "adapter": str(tmp_path / "start")}}
    run(write_config(train__max_steps=1, **changes))
    shutil.rmtree(tmp_path / "start")
    assert len(run(write_config(train__max_steps=2, **changes), resume=True)) == 1


def test_a_best_score_counts_for_its_own_evaluation_only(write_config, tmp_path):
    held_out = held_out_rows(tmp_path, num_samples=2)
    run(write_config(train__max_steps=1, evaluation=held_out))
    score = tmp_path / "run" / "best" / "score.json"
    lucky = json.loads(score.read_text(encoding="utf-8")) | {"score": 1e6}
    score.write_text(json.dumps(lucky), encoding="utf-8")
    run(write_config(train__max_steps=2, evaluation=held_out | {"steps": 2}), resume=True)
    assert json.loads(score.read_text(encoding="utf-8")) == lucky
    run(write_config(train__max_steps=3, evaluation=held_out | {"num_samples": 1}), resume=True)
    assert json.loads(score.read_text(encoding="utf-8"))["step"] == 3


def test_a_foreign_environment_file_does_not_make_a_run(write_config, tmp_path):
    folder = tmp_path / "run"
    (folder / "best").mkdir(parents=True)
    (folder / "best" / "score.json").write_text('{"step": 3}', encoding="utf-8")
    for mark in ('{"conda": "mine"}', "conda", "[]"):
        (folder / "environment.json").write_text(mark, encoding="utf-8")
        before = contents(folder)
        with pytest.raises(
            InputError, match=r"environment\.json is there already and would be overwritten"
        ):
            run(write_config())
        assert contents(folder) == before


def test_an_existing_folder_of_logs_is_accepted(write_config, tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "slurm-17.out").write_text("mine", encoding="utf-8")
    run(write_config(train__max_steps=1))
    assert (tmp_path / "run" / "logs" / "slurm-17.out").read_text(encoding="utf-8") == "mine"


def test_a_folder_named_best_that_is_not_a_runs_is_kept(write_config, tmp_path, caplog):
    write_lines(tmp_path / "held_out.jsonl", [{"prompt": "say five"}])
    held_out = {"steps": 1, "source": str(tmp_path / "held_out.jsonl"), "best": "reward"}
    run(write_config(train__max_steps=1))
    shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "best")
    before = contents(tmp_path / "run" / "best")
    run(write_config(train__max_steps=2, evaluation=held_out), resume=True)
    assert contents(tmp_path / "run" / "best") == before
    assert "best was not written (" in caplog.text
