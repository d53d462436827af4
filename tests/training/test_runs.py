"""Whole runs: in the process on the tiny model, with vLLM in the last test."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, adapter_bytes, command, run

from stapo_lite import Trainer, assemble
from stapo_lite.config import Log, load_config
from stapo_lite.extras.audit.report import write_report
from stapo_lite.extras.publish.export import export
from stapo_lite.files import read_lines, read_object, write_lines
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.lifecycle import make_accelerator


def test_a_run_leaves_everything_behind_but_secrets(write_config, tmp_path, capsys, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"secret-of-{name}")
    log = {"save_steps": 1, "log_completions_steps": 2, "audit_tokens": 64}
    log["report_to"] = ["tensorboard"]
    metrics, folder = run(write_config(log=log)), tmp_path / "run"
    assert read_metrics(folder) == metrics
    assert [(m["step"], m["updates"]) for m in metrics] == [(1, 2), (2, 2), (3, 2), (4, 2)]
    # The warm-up counts steps, not updates.
    assert [m["learning_rate"] for m in metrics] == pytest.approx([0.001, 0.002, 0.003, 0.004])
    assert load_config(folder / "config.yaml").train.max_steps == 4
    newest = {"checkpoint-3", "checkpoint-4"}
    assert {path.name for path in folder.glob("*checkpoint-*")} == newest
    assert adapter_bytes(folder / "adapter") == adapter_bytes(folder / "checkpoint-4")
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    state = read_object(folder / "checkpoint-4" / "state.json")
    progress = {"step": 4, "prompts_drawn": 16, "memory": [False, False, 256]}
    assert state["progress"] == progress | {"skipped_in_a_row": 0, "backoff": 0}
    assert state["config"] == load_config(folder / "config.yaml").model_dump()
    environment = read_object(folder / "environment.json")
    assert environment.keys() >= {"transformers", "peft", "accelerate", "stapo_lite", "processes"}
    assert environment["engine"] == "transformers"
    on_cpu = f"CPU with {os.cpu_count()} cores"
    assert environment["hardware"] == on_cpu or torch.cuda.is_available()
    assert float(environment["self_check"].removesuffix(" nats between engine and trainer")) < 1e-3
    assert environment["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    export(folder, folder / "export", dtype="float32")
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    output, errors = capsys.readouterr()
    assert b"secret-of" not in written + output.encode() + errors.encode()
    assert len(re.findall(r"^step \d/4 \| reward ", output, re.MULTILINE)) == 4
    assert len(re.findall(r"samples of step", output)) == 2
    assert "silenced share" in output


def test_the_page_of_the_metrics_names_all_that_a_run_has(write_config):
    (metrics,) = run(write_config(train__max_steps=1, objective__beta=0.1))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- (`.*?`): ", page, re.MULTILINE)
    named = [name.replace("parity:even", "FUNCTION") for name in metrics]
    assert sorted(name for row in rows for name in re.findall(r"`([\w/]+)`", row)) == sorted(named)


def test_completions_are_kept_sent_to_trackers_and_shown(write_config, trained, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, log = tmp_path / "run", {"completions": 6, "report_to": ["tensorboard"]}
    metrics = run(write_config(log=log, train__mini_batch_size=4))
    lines = read_lines(folder / "completions.jsonl")
    assert [line["step"] for line in lines] == [step for step in (1, 2, 3, 4) for _ in range(6)]
    for line, completion in zip(lines[6:12], trained[16:22], strict=True):
        for name in ("text", "reward", "scores", "advantage", "truncated"):
            assert line[name] == getattr(completion, name)
        assert (line["prompt"], line["tokens"]) == (completion.prompt.prompt, completion.written)
        assert line["columns"] == {"answer": "a"}
    events = EventAccumulator(str(folder / "logs" / "stapo_lite")).Reload()
    known = {name for line in metrics for name, value in line.items() if value is not None}
    assert set(events.Tags()["scalars"]) == known - {"step"}  # our names alone
    sent = [event.value for event in events.Scalars("reward")]
    assert sent == pytest.approx([line["reward"] for line in metrics])
    capsys.readouterr()
    (folder / "reward.png").unlink()
    assert command("show", folder, "--worst", 3, "--step", 2) == 0
    output = capsys.readouterr().out
    assert re.search(r"^silenced share +\d", output, re.MULTILINE)
    assert "\n4 steps in " in output
    assert (folder / "reward.png").exists()
    shown = [
        float(reward)
        for reward in re.findall(r"^step 2 \| reward (\S+) \| row \{.answer", output, re.M)
    ]
    assert shown == sorted(line["reward"] for line in lines[6:12])[:3]


def test_long_columns_and_those_that_are_no_json_are_short_text_in_the_log(write_config, tmp_path):
    """With test cases in each row it grew by 64 MB a step; a tuple as a key ended the run."""
    row = {"prompt": "say one", "tests": ["x" * 10**6] * 3, "cells": {(1, 2): 3}, "code": "y" * 999}
    keys = {"train_dataset": [row] * 4, "max_steps": 1}
    Trainer(
        config=write_config(), reward_funcs=lambda cells, **_: [1.0] * len(cells), **keys
    ).train()
    (line, *_) = read_lines(tmp_path / "run" / "completions.jsonl")
    assert line["columns"]["cells"] == "{(1, 2): 3}"
    assert len(str(line["columns"])) < 1000


def test_stapo_show_needs_a_run_and_no_completions(write_config, tmp_path, capsys):
    folder = tmp_path / "run"
    run(write_config(train__max_steps=1, log__completions=0))
    capsys.readouterr()
    assert command("show", folder) == 0
    assert "\n1 steps in " in capsys.readouterr().out
    assert command("show", tmp_path / "none") == 2
    assert "is it a run folder?" in capsys.readouterr().err


def test_completions_are_traces_in_trackio(write_config, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    logged = []
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    log = trackio.Run.log
    monkeypatch.setattr(trackio.Run, "log", lambda *a, **k: (logged.append(a[1]), log(*a, **k)))
    run(write_config(train__max_steps=1, log={"report_to": ["trackio"], "completions": 3}))
    line = read_lines(tmp_path / "run" / "completions.jsonl")[0]
    (traces,) = [values["completions"] for values in logged if "completions" in values]
    messages = [{"role": "user", "content": line["prompt"]}]
    messages.append({"role": "assistant", "content": line["text"]})
    assert len(traces) == 3
    assert (traces[0].messages, traces[0].metadata) == (messages, line)


def test_the_reward_rises(write_config):
    metrics = run(write_config(train__max_steps=30, log={"save_steps": 0}))
    first, last = (sum(m["reward"] for m in part) / 5 for part in (metrics[:5], metrics[-5:]))
    assert last > first + 1.5  # of at most 8


def test_rows_that_are_left_out_are_counted(write_config, tmp_path):
    changes = {"data__max_prompt_length": 26, "data__filter_overlong_prompts": True}
    config = write_config(**changes)
    shown, source = [], tmp_path / "prompts.jsonl"
    prompts, _, _ = assemble.open_data(load_config(config), None, shown.append)
    assert [p.prompt for p in prompts] == ["say one", "say two"]
    assert shown == [
        f"2 prompts from {source}; 2 longer than 26 tokens left out",
    ]


def test_the_allocators_settings_go_by_vllms_name():
    ours, vllms = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    unset = {key: value for key, value in os.environ.items() if key not in (ours, vllms)}
    code = f"import os, stapo_lite; print(os.environ['{vllms}'])"
    for given, expected in (
        ({}, b"expandable_segments:True\n"),
        ({vllms: "a:1"}, b"a:1\n"),
        ({vllms: "a:1", ours: "b:2"}, b"b:2\n"),
    ):
        assert subprocess.check_output([sys.executable, "-c", code], env=unset | given) == expected


def test_a_card_that_torch_cannot_use_is_noticed(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("stapo_lite.model.processes.NVIDIA_DRIVER", tmp_path)
    make_accelerator(Log(), tmp_path)
    assert "running on the CPU although there is an NVIDIA card: torch 2." in caplog.text


def test_dry_run_prints_the_config_and_stops(write_config, tmp_path, capsys):
    assert command("train", write_config(), "train.max_steps=9", "algorithm=grpo", "--dry-run") == 0
    output = capsys.readouterr().out
    for line in ("max_steps: 9", "aggregation: sequence-mean", "beta: 0.04", "enabled: false"):
        assert line in output
    assert "4 prompts x 4 completions = 16 rollouts a step, 2 update(s) of 8 completions" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_length=20", "row 1: the prompt has"),
        ("reward.functions=[parity:odd]", "reward.functions=parity:odd: "),
        ("rollout.engine=vllm", "rollout.engine=vllm: vLLM is not installed"),
        ("rollout.quantization=fp8", "rollout.quantization=fp8 needs vLLM"),
        ("log.report_to=[trackio]", "log.report_to: trackio is not installed; pip install trackio"),
        ("evaluation.best=rewards", "evaluation.source and evaluation.best need evaluation.steps"),
        ("evaluation={steps: 1, source: a.jsonl}", "evaluation.source=a.jsonl: no such file"),
        ("evaluation={steps: 1, best: b, benchmarks: []}", "evaluation.best=b: choose one of "),
        ("stop_on=[ratios]", "stop_on=ratios: choose from abstains, "),
    ],
)
def test_bad_input_is_found_first(write_config, monkeypatch, capsys, override, message):
    monkeypatch.setattr(assemble, "load_weights", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command("train", write_config(), override) == 2
    assert message in capsys.readouterr().err


def test_a_report_compares_the_first_and_the_last_five_steps(tmp_path):
    lines = [{"step": n, "reward": float(n), "seconds_step": 2.0} for n in range(1, 9)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    report = write_report(tmp_path)
    assert re.search(r"^reward +3 +6$", report, re.MULTILINE)
    assert report.endswith("\n8 steps in 16 s")
