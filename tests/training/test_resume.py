"""Runs that are killed, by SIGKILL or SIGTERM, and resumed; damaged checkpoints."""

import importlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import interrupted
import pytest
import torch
from helpers import checkpoints, command, run, steps, without_times

from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.files import size_up_to_step
from stapo_lite.training import lifecycle
from stapo_lite.training.checkpoint import (
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    read_state,
)
from stapo_lite.training.folder import read_metrics

loop = importlib.import_module("stapo_lite.training.loop")


@pytest.fixture
def arguments(write_config, tmp_path):
    """A function that gives the command's, for a run of five steps in a folder of that name."""
    objective = {"s2t": {"tau_p": 0.02, "target_share": 1e-4, "window": 3}}
    log = {"audit_tokens": 3, "save_steps": 2, "log_completions_steps": 0}
    config = write_config(train__max_steps=5, objective=objective, log=log)
    return lambda name: [str(config), f"output_dir={tmp_path / name}"]


KEPT = ("tokens.jsonl", "quadrants.jsonl", "completions.jsonl")


def outcome(folder: Path):
    """All that a run leaves behind, but for times and its own name."""
    left = []
    for path in [folder / "adapter", *list_checkpoints(folder)]:
        state = read_state(path) if path.name != "adapter" else {}
        state.pop("config", None)
        weights = [
            file.read_bytes()
            for file in sorted(path.glob("*.safetensors")) + sorted(path.glob("*.pt"))
        ]
        left.append((path.name, state, weights))
    logs = [(folder / name).read_bytes() for name in KEPT if (folder / name).exists()]
    return left, logs, without_times(read_metrics(folder)), list(folder.glob(".checkpoint*"))


@pytest.mark.parametrize(
    ("by", "number", "in_a_row"),
    [
        (signal.SIGKILL, 4, 4),
        pytest.param(signal.SIGKILL, 35, 5, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 14, 3, marks=pytest.mark.slow),
    ],
)
def test_interrupted_at_any_moment_a_run_ends_in_the_same_bytes(
    children, arguments, tmp_path, by, number, in_a_row
):
    """At random moments, the phases in turn. After every few interruptions it is left to its end
    (143 by SIGTERM)."""
    assert children(interrupted.count, arguments("whole"), tmp_path / "calls.json") == 0
    calls = json.loads((tmp_path / "calls.json").read_text(encoding="utf-8"))
    assert all(map(all, calls.values()))
    expected, hit, run_ = outcome(tmp_path / "whole"), [], [*arguments("run"), "--resume"]
    assert checkpoints(tmp_path / "whole") == ["checkpoint-4", "checkpoint-5"]
    draws, phases = random.Random(int(by)), list(interrupted.PHASES)
    while len(hit) < number:
        phase, nth = phases[len(hit) % len(phases)], draws.randrange(2)
        moment = nth, draws.randrange(calls[phase][nth])
        status = children(interrupted.train, run_, phase, moment, by)
        assert status in (0, -signal.SIGKILL if by == signal.SIGKILL else 143), (phase, moment)
        hit += [phase] if status else []
        if status == 0 or len(hit) in (number, *range(0, number, in_a_row)):
            assert status == 0 or children(interrupted.command, run_) == 0
            assert outcome(tmp_path / "run") == expected, (phase, moment)
            shutil.rmtree(tmp_path / "run")


def test_sigterm_loses_no_finished_step(children, arguments, tmp_path):
    status = children(
        interrupted.train, arguments("run"), "update", (7, 500), signal.SIGTERM
    )  # two updates a step
    assert status == 143
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-3"]
    assert not (tmp_path / "run" / "adapter").exists()


LAUNCHERS = {
    "accelerate, which dies of it": "accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no "  # noqa: E501
    "--dynamo_backend no -m stapo_lite.train",
    "our own": "stapo train --processes 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_to_the_launcher_reaches_the_run(write_config, tmp_path, launcher):
    """The run behind it saves its checkpoint."""
    program, *options = LAUNCHERS[launcher].split()
    launch = [str(Path(sys.executable).with_name(program)), *options]
    launch += [str(write_config(train__max_steps=10_000, log__save_steps=0))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(launch, text=True, cwd=tmp_path, **pipes) as launched:
        for line in launched.stdout:
            if line.startswith(
                "step     4/"
            ):  # a line comes before its step's end, which makes the checkpoint
                break
        launched.terminate()
        rest = launched.stdout.read()  # until the run, which writes there, has ended
        assert program == "accelerate" or "Traceback" not in launched.stderr.read()
    assert launched.returncode == (
        -signal.SIGTERM if program == "accelerate" else 128 + signal.SIGTERM
    )
    step = int(checkpoints(tmp_path / "run")[-1].removeprefix("checkpoint-"))
    assert 3 <= step < 1000
    assert f"stopped after step {step}; --resume continues" in rest
    assert [m["step"] for m in read_metrics(tmp_path / "run")][-1] - step in (0, 1)


@pytest.fixture
def finished(write_config, tmp_path):
    """A run folder with checkpoint-2 and checkpoint-4."""
    run(write_config())
    return tmp_path / "run"


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGE = {
    "torn adapter": lambda folder: tear(folder / "adapter_model.safetensors"),
    "torn optimiser": lambda folder: tear(folder / "optimizer.pt"),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


class Code:
    def __reduce__(self):
        return exec, ("raise SystemExit('the code ran')",)


def test_a_damaged_checkpoint_is_passed_over_and_none_runs_code(
    finished, write_config, tmp_path, caplog
):
    assert newest_checkpoint(finished) == finished / "checkpoint-4"
    for name, damage in DAMAGE.items():
        folder = shutil.copytree(finished, tmp_path / name)
        damage(folder / "checkpoint-4")
        assert newest_checkpoint(folder) == folder / "checkpoint-2", name
        assert f"{folder / 'checkpoint-4'} is damaged (" in caplog.text
        damage(folder / "checkpoint-2")
        with pytest.raises(
            InputError, match="holds only damaged checkpoints \\(checkpoint-4: .*; checkpoint-2: "
        ):
            newest_checkpoint(folder)
    folder = finished / "checkpoint-4"
    torch.save(Code(), folder / "optimizer.pt")
    assert re.search("[Uu]nsupported|weights_only|Weights only", find_damage(folder))
    assert newest_checkpoint(finished) == finished / "checkpoint-2"


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(write_config, tmp_path):
    """And a damaged one does not push out an intact one."""
    folder = tmp_path / "run"
    run(write_config(log__save_steps=1, log__save_total_limit=9))
    expected = outcome(folder)
    for name in ("checkpoint-3", "checkpoint-4"):
        tear(folder / name / "state.json")
    resumed = steps(write_config(log__save_steps=1, log__save_total_limit=1), resume=True)
    assert next(resumed)["step"] == 3
    assert checkpoints(folder) == ["checkpoint-3", "checkpoint-4"]
    assert find_damage(folder / "checkpoint-3") is None
    assert len(list(resumed)) == 1
    assert find_damage(folder / "checkpoint-4") is None
    left, _, metrics, _ = outcome(folder)
    assert left == [expected[0][0], expected[0][-1]]  # adapter and checkpoint-4
    assert metrics == expected[2]


def test_a_checkpoint_says_where_it_was_made(finished, write_config, tmp_path, monkeypatch, capsys):
    """A run that goes on names the differences: versions, and other prompts under the same name."""
    state = read_state(finished / "checkpoint-4")
    expected = {
        "tau_p": 0.01,
        "step": 4,
        "prompts_drawn": 16,
        "halvings": 0,
        "skipped_in_a_row": 0,
        "backoff": 0,
        "recent": [],
    }
    assert state["progress"] == expected
    assert state["config"] == load_config(finished / "config.yaml").model_dump()
    assert {"torch", "transformers", "peft", "accelerate", "stapo_lite", "processes"} < set(
        state["environment"]
    )
    assert state["environment"]["engine"] == "transformers"
    config = write_config(train__max_steps=5)
    lines = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(lines.replace("three", "seven"), encoding="utf-8")
    surroundings = lifecycle.environment
    monkeypatch.setattr(
        lifecycle, "environment", lambda *which: surroundings(*which) | {"torch": "1.0"}
    )
    assert command("train", config, "--resume") == 0
    line = r"^in another environment, so that rounding and draws may differ: torch \S+ -> 1\.0, prompts \w+ -> \w+$"  # noqa: E501
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_a_log_ends_where_its_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 2, "é": 1}\n{"step": 3}\n{"st', encoding="utf-8")
    kept = {
        step: path.read_bytes()[: size_up_to_step(path, step)].decode() for step in (-1, 0, 1, 2, 9)
    }
    first, second = '{"step": 0}\n', '{"step": 2, "é": 1}\n'
    both = first + second
    assert kept == {-1: "", 0: first, 1: first, 2: both, 9: both + '{"step": 3}\n'}


@pytest.mark.slow
def test_with_vllm_a_resumed_step_draws_the_same(write_config, tmp_path, monkeypatch):
    """Prompts, seed, sampler position and adapter version; on the CPU the completions too."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    generate, calls = VLLMEngine.generate, []

    def note(engine, prompts, seeds):
        groups = generate(engine, prompts, seeds)
        ids = [[c.token_ids for c in group] for group in groups]
        calls.append(([p.token_ids for p in prompts], seeds, groups[0][0].adapter_version, ids))
        return groups

    monkeypatch.setattr(VLLMEngine, "generate", note)
    rollout = {"engine": "vllm", "num_generations": 4, "max_completion_length": 8}
    rollout["vllm"] = {"kv_cache_memory_bytes": 1 << 27}
    run(write_config(rollout=rollout, train__max_steps=3, log__save_steps=1))
    tear(tmp_path / "run" / "checkpoint-3" / "state.json")
    run(write_config(rollout=rollout, train__max_steps=3), resume=True)
    assert [call[2] for call in calls] == [1, 2, 3, 3]
    assert calls[3] == calls[2] != calls[1]
    state = read_state(tmp_path / "run" / "checkpoint-3")
    assert state["progress"]["prompts_drawn"] == 12
    assert state["environment"]["engine"].startswith("vllm 0.")
