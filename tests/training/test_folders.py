"""Output folders: what a run may find there, and which keys may change when it is resumed."""

import json
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from helpers import MINIMAL, adapter_bytes, command, contents, held_out_rows, run

from stapo_lite import Trainer
from stapo_lite.config import load_config
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.audit.report import Report
from stapo_lite.files import read_lines, write_lines, write_text
from stapo_lite.training.checkpoint import check_resume, list_checkpoints
from stapo_lite.training.folder import drop_later_lines, read_metrics


@pytest.mark.parametrize(
    ("name", "resume", "message"),
    [
        ("config.yaml", False, "run holds config.yaml: choose another folder"),
        ("events.jsonl", True, "run holds events.jsonl: choose another folder"),
        ("checkpoint-3/notes", True, "run holds checkpoint-3: choose another folder"),
        ("environment.json", True, "run holds environment.json: choose another folder"),
        (
            "checkpoint-3/state.json",
            False,
            "run holds a run: --resume it, or choose another folder",
        ),
        ("completions.jsonl", True, r"its lines must have a step \(KeyError\('step'\)\)"),
        ("adapter/notes", True, "run has an adapter, but no checkpoint to continue from"),
        ("metrics.jsonl", False, "run holds a run: --resume it, or choose another folder"),
    ],
)
def test_a_run_overwrites_no_other_files(write_config, tmp_path, name, resume, message):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"text": "mine"}\n', encoding="utf-8")
    if name in ("completions.jsonl", "adapter/notes", "metrics.jsonl"):  # of a run
        write_text(tmp_path / "run" / "environment.json", '{"stapo_lite": "0.1.0"}')
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match=message):
        run(write_config(), resume)
    assert contents(tmp_path / "run") == before


def test_a_resumed_run_leaves_files_of_the_user_in_its_folder_as_they_are(write_config, tmp_path):
    run(write_config(train__max_steps=1))
    own = {"events.jsonl": '{"step": 9}\n{"event": 1}\n', "prompts.jsonl": '{"prompt": "no end"}'}
    for name, text in own.items():
        (tmp_path / "run" / name).write_text(text, encoding="utf-8")
    run(write_config(train__max_steps=2), resume=True)
    assert len(read_metrics(tmp_path / "run")) == 2
    for name, text in own.items():
        assert (tmp_path / "run" / name).read_text(encoding="utf-8") == text


def test_a_run_that_failed_before_its_first_step_begins_again(write_config, tmp_path, monkeypatch):
    config = write_config(train__max_steps=1, evaluation=held_out_rows(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Report, "on_step_begin", lambda *_: 1 / 0)
        with pytest.raises(RunError, match="callback Report: on_step_begin failed"):
            run(config)
    assert len(read_lines(tmp_path / "run" / "evaluations.jsonl")) == 1
    run(config)
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "evaluations.jsonl")]
    assert (steps, len(read_metrics(tmp_path / "run"))) == ([0, 1], 1)


def test_a_run_from_its_beginning_keeps_no_evaluation_of_an_earlier_one(tmp_path):
    """Its config may be another one, as long as there is no checkpoint."""
    for step, kept in ((2, [0, 2]), (1, [0]), (0, [])):
        write_lines(tmp_path / "evaluations.jsonl", [{"step": 0}, {"step": 2}])
        drop_later_lines(tmp_path, step)
        assert [line["step"] for line in read_lines(tmp_path / "evaluations.jsonl")] == kept


def test_a_run_that_was_moved_is_resumed_in_its_new_place_only(write_config, tmp_path, capsys):
    run(write_config(train__max_steps=2))
    home = (tmp_path / "run").rename(tmp_path / "moved")
    before, config = contents(home), home / "config.yaml"
    assert command("train", config, "--resume", "train.max_steps=3") == 2
    assert f"set output_dir={home}" in capsys.readouterr().err
    with pytest.raises(InputError, match=f"set output_dir={home}"):
        Trainer(config=config, max_steps=3).train(resume=True)
    assert contents(home) == before
    assert not (tmp_path / "run").exists()
    place = f"output_dir={home}"
    assert command("train", config, "--resume", "train.max_steps=3", place) == 0
    assert len(read_metrics(home)) == 3
    assert command("train", config, "--resume", f"output_dir={tmp_path / 'another run'}") == 0


def test_a_run_that_was_killed_early_or_while_it_wrote_its_adapter_goes_on(write_config, tmp_path):
    config, folder = write_config(train__max_steps=1), tmp_path / "run"
    run(config)
    adapter, expected = folder / "adapter", contents(folder / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes(adapter_bytes(adapter)[:100])
    (adapter / "adapter_config.json").unlink()
    run(config, resume=True)
    assert contents(adapter) == expected
    for path in (adapter, folder / "checkpoint-1"):  # there was no checkpoint yet
        shutil.rmtree(path)
    run(config, resume=True)
    assert contents(adapter) == expected
    assert len(read_metrics(folder)) == 1


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    names = [f"checkpoint-{step}" for step in (8, 9, 10, 11, 100)]
    for name in (*names[::-1], "checkpoint-x", ".checkpoint-12"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == names


ALWAYS = {
    "output_dir": "p",
    "train.max_steps": 9,
    "reward.function_timeout": 1.0,
    "rollout.servers": ["http://b:1"],
    "stop_on": ["ratio"],
    "log.save_steps": 1,
    "evaluation.steps": 3,
}
WITH_FORCE = {
    "seed": 1,
    "model": "n",
    "dtype": "float32",
    "algorithm": "justrl",
    "data.source": "q.jsonl",
    "reward.weights": [2.0],
    "rollout.num_generations": 4,
    "rollout.engine": "server",
    "rollout.vllm.kv_cache_dtype": "fp8",
    "objective.beta": 0.1,
    "train.learning_rate": 1.0,
    "train.max_tokens_per_microbatch": 2048,
    "lora.adapter": "start",
    "train.max_steps ": 9,  # where the learning rate falls until then
}
NEVER = {
    "lora.r": 8,
    "lora.lora_alpha": 8,
    "lora.use_rslora": True,
    "lora.target_modules": ["q_proj"],
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("key", "value"), (ALWAYS | WITH_FORCE | NEVER).items())
def test_which_keys_may_change_when_a_run_is_resumed(key, value, force, tmp_path):
    """Always, those that change no number; never, those that the checkpoint's tensors follow."""
    falling = ["train.lr_scheduler_type=linear"] if key.endswith(" ") else []
    before = load_config(MINIMAL, falling)
    now = load_config(MINIMAL, [*falling, f"{key.strip()}={json.dumps(value)}"])
    for one, other in ((before, now), (now, before)):
        state = {"progress": {}, "config": one.model_dump(mode="json")}
        (tmp_path / "state.json").write_text(json.dumps(state), encoding="utf-8")
        refused = pytest.raises(InputError, match=f"--resume: .*{re.escape(key.strip())}")
        may = key in ALWAYS or (force and key in WITH_FORCE)
        with nullcontext() if may else refused:
            assert "another config" in check_resume(tmp_path, other, force)


def test_resuming_with_another_config_names_the_key(write_config, tmp_path, capsys):
    run(write_config(train__max_steps=2))
    before = contents(tmp_path / "run")
    changed = write_config(train__max_steps=3, train__learning_rate=0.02)
    both = "train.learning_rate 0.01 -> 0.02, train.max_steps 2 -> 3"
    for arguments, message in {
        "--resume --force lora.r=16": f"lora.r cannot change in a run (lora.r 8 -> 16, {both}",
        "--resume": f"({both}): set the keys back",
    }.items():
        assert command("train", changed, *arguments.split()) == 2
        assert message in capsys.readouterr().err
        assert contents(tmp_path / "run") == before
    settings = ["objective.s2t.tau_p=0.02", "train.weight_decay=0.5", "train.max_steps=4"]
    assert command("train", changed, "--resume", "--force", *settings) == 0
    resumed = read_metrics(tmp_path / "run")[2:]
    assert [m["learning_rate"] for m in resumed] == pytest.approx([0.02 * 3 / 10, 0.02 * 4 / 10])
    state = torch.load(tmp_path / "run" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["weight_decay"] == 0.5
    free = ["log.save_steps=1", *settings[:2], "train.max_steps=5"]
    assert command("train", changed, "--resume", *free) == 0
    note = "with another config: log.save_steps 2 -> 1, train.max_steps 4 -> 5\n"
    assert note in capsys.readouterr().out
