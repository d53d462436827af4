"""Runs that are killed, by SIGKILL or SIGTERM, and resumed; damaged checkpoints."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import interrupted
import pytest
from conftest import command, run, without_times

from stapo_lite import opening
from stapo_lite.checkpoint import find_damage, list_checkpoints, newest_checkpoint, read_state
from stapo_lite.config import InputError, load_config
from stapo_lite.tracking import read_metrics

STEPS = 5


@pytest.fixture
def arguments(write_config, tmp_path):
    """Of the command, for a run in a folder of that name."""
    objective = {"s2t": {"adaptive": True, "tau_p": 0.02, "target_share": 1e-4}}
    audit = {"enabled": True, "tokens_per_step": 3}
    config = write_config(train__max_steps=STEPS, log__log_completions_steps=0, objective=objective, audit=audit)
    return lambda name: [str(config), f"output_dir={tmp_path / name}"]


def outcome(folder: Path):
    """What a run leaves behind, but for times and its own name."""
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-4", "checkpoint-5"]
    left = {}
    for path in [folder / "adapter", *list_checkpoints(folder)]:
        state = read_state(path) if path.name != "adapter" else {}
        state.pop("config", None)
        files = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
        left[path.name] = state, files
    logs = [(folder / name).read_bytes() for name in ("tokens.jsonl", "quadrants.jsonl")]
    return left, logs, without_times(read_metrics(folder)), [path.name for path in folder.glob(".checkpoint*")]


def moments(calls: dict[str, int], number: int, seed: int):
    """Random ones, the phases in turn."""
    draws = random.Random(seed)
    for index in range(number):
        phase = list(calls)[index % len(calls)]
        yield phase, (draws.randrange(2), draws.randrange(calls[phase]))


def interrupt_and_compare(children, arguments, tmp_path, by, number, in_a_row):
    """`number` interruptions; after every few of them the run is left to its end and must be the uninterrupted one."""
    assert children(interrupted.count, arguments("whole"), tmp_path / "calls.json") == 0
    calls = json.loads((tmp_path / "calls.json").read_text(encoding="utf-8"))
    assert set(calls) == set(interrupted.PHASES)
    expected, hits, round_ = outcome(tmp_path / "whole"), dict.fromkeys(calls, 0), 0
    for phase, moment in moments(calls, 3 * number, seed=int(by)):
        name = f"run{round_}"
        started = time.monotonic()
        status = children(interrupted.train, [*arguments(name), "--resume"], phase, moment, by)
        assert status in (0, -signal.SIGKILL if by == signal.SIGKILL else 143), (phase, moment)
        assert time.monotonic() - started < 60
        hits[phase] += status != 0
        done = sum(hits.values())
        if status == 0 or done % in_a_row == 0 or done == number:
            if status != 0:
                assert children(interrupted.command, [*arguments(name), "--resume"]) == 0
            assert outcome(tmp_path / name) == expected, (phase, moment)
            shutil.rmtree(tmp_path / name)
            round_ += 1
        if done == number:
            break
    assert done == number, hits
    assert all(hits.values()), hits


def test_killed_at_any_moment_a_run_ends_in_the_same_bytes(children, arguments, tmp_path):
    interrupt_and_compare(children, arguments, tmp_path, signal.SIGKILL, number=35, in_a_row=5)


def test_sigterm_saves_the_step_before_and_exits_143(children, arguments, tmp_path):
    interrupt_and_compare(children, arguments, tmp_path, signal.SIGTERM, number=14, in_a_row=3)


def test_sigterm_loses_no_finished_step(children, arguments, tmp_path):
    status = children(interrupted.train, arguments("run"), "update", (7, 500), signal.SIGTERM)  # two updates a step
    assert status == 143
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-3"]
    assert not (tmp_path / "run" / "adapter").exists()


def test_sigterm_to_the_launcher_reaches_the_run(write_config, tmp_path):
    """`accelerate launch` dies of it; the run behind it saves its checkpoint."""
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", "1"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    config = str(write_config(train__max_steps=10_000, log__save_steps=0))
    with subprocess.Popen(
        [*launcher, "-m", "stapo_lite.train", config],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as launched:
        for line in launched.stdout:
            if line.startswith("step     3/"):
                break
        launched.terminate()
        launched.stdout.read()  # until the run, which writes there, has ended
    step = int(list_checkpoints(tmp_path / "run")[-1].name.removeprefix("checkpoint-"))
    assert 3 <= step < 1000
    assert [m["step"] for m in read_metrics(tmp_path / "run")][-1] - step in (0, 1)


@pytest.fixture
def finished(write_config, tmp_path):
    """A run folder with checkpoint-2 and checkpoint-4."""
    run(write_config())
    return tmp_path / "run"


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "torn adapter": lambda folder: tear(folder / "adapter_model.safetensors"),
    "a bit of the optimiser": lambda folder: flip(folder / "optimizer.safetensors"),
    "a digit of the state": lambda folder: flip(folder / "state.json"),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "empty checksums": lambda folder: (folder / "checksums.json").write_text("{}"),
    "torn checksums": lambda folder: tear(folder / "checksums.json"),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "checksums of the wrong kind": lambda folder: (folder / "checksums.json").write_text("[1]"),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(finished, damage, caplog):
    newest = finished / "checkpoint-4"
    assert newest_checkpoint(finished) == newest
    DAMAGE[damage](newest)
    assert newest_checkpoint(finished) == finished / "checkpoint-2"
    assert damage == "a file" or f"{newest} is damaged (" in caplog.text
    DAMAGE[damage](finished / "checkpoint-2")
    if damage == "a file":
        assert newest_checkpoint(finished) is None
    else:
        with pytest.raises(InputError, match="holds only damaged checkpoints \\(checkpoint-4: .*; checkpoint-2: "):
            newest_checkpoint(finished)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(finished, write_config):
    expected = outcome_of_four(finished)
    flip(finished / "checkpoint-4" / "optimizer.safetensors")
    run(write_config(), resume=True)
    assert find_damage(finished / "checkpoint-4") is None
    assert outcome_of_four(finished) == expected


def test_a_damaged_checkpoint_does_not_push_out_an_intact_one(write_config, tmp_path):
    run(write_config(log__save_steps=1, log__save_total_limit=9))
    for name in ("checkpoint-3", "checkpoint-4"):
        tear(tmp_path / "run" / name / "state.json")
    config = load_config(write_config(log__save_steps=1, log__save_total_limit=1))
    steps = sys.modules["stapo_lite.train"].train(config, resume=True)
    assert next(steps)["step"] == 3
    steps.close()
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-3", "checkpoint-4"]
    assert find_damage(tmp_path / "run" / "checkpoint-3") is None


def outcome_of_four(folder):
    files = {
        name: (folder / "checkpoint-4" / name).read_bytes() for name in ("adapter_model.safetensors", "state.json")
    }
    return files, without_times(read_metrics(folder))


def test_a_checkpoint_holds_no_pickle(finished):
    for path in finished.rglob("*"):
        if path.is_file():
            assert path.suffix in (".safetensors", ".json", ".jsonl", ".yaml", ".md", ".png") or path.name == ".lock"
            assert not path.read_bytes().startswith((b"PK", b"\x80"))


def test_what_a_checkpoint_says(finished, write_config):
    state = read_state(finished / "checkpoint-4")
    assert state["progress"] == {
        "tau_p": 0.01, "step": 4, "prompts_drawn": 16, "halvings": 0, "skipped_in_a_row": 0
    }  # fmt: skip
    assert state["config"] == load_config(finished / "config.yaml").model_dump()
    assert {"torch", "transformers", "peft", "accelerate", "stapo_lite", "engine", "processes"} < set(
        state["environment"]
    )
    assert state["environment"]["engine"] == "transformers"


def test_another_environment_is_named(finished, write_config, monkeypatch, capsys):
    surroundings = opening.environment
    monkeypatch.setattr(opening, "environment", lambda *which: surroundings(*which) | {"torch": "1.0"})
    assert command(monkeypatch, write_config(train__max_steps=5), "--resume") == 0
    assert "in another environment, so that rounding and draws may differ: torch " in capsys.readouterr().out


def test_with_vllm_a_resumed_step_draws_the_same(write_config, tmp_path, monkeypatch):
    """Prompts, seed, sampler position and adapter version; on the CPU the completions too."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    generate, calls = VLLMEngine.generate, []

    def note(engine, prompts, seed, progress=False):
        groups = generate(engine, prompts, seed, progress)
        ids = [[c.token_ids for c in group] for group in groups]
        calls.append(([p.token_ids for p in prompts], seed, groups[0][0].adapter_version, ids))
        return groups

    monkeypatch.setattr(VLLMEngine, "generate", note)
    rollout = {"engine": "vllm", "num_generations": 4, "max_completion_length": 8, "kv_cache_gb": 0.125}
    run(write_config(rollout=rollout, train__max_steps=3, log__save_steps=1))
    folder = tmp_path / "run"
    flip(folder / "checkpoint-3" / "state.json")
    run(write_config(rollout=rollout, train__max_steps=3), resume=True)
    assert [call[2] for call in calls] == [1, 2, 3, 3]
    assert calls[3] == calls[2] != calls[1]
    progress = read_state(folder / "checkpoint-3")["progress"]
    assert progress["prompts_drawn"] == 12
    assert read_state(folder / "checkpoint-3")["environment"]["engine"].startswith("vllm 0.")


def test_other_prompts_under_the_same_name_are_named(finished, write_config, tmp_path, capsys):
    config = write_config(train__max_steps=5)
    lines = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(lines.replace("three", "seven"), encoding="utf-8")
    run(config, resume=True)
    assert "in another environment, so that rounding and draws may differ: prompts " in capsys.readouterr().out


def test_two_runs_do_not_share_a_folder(write_config):
    first = sys.modules["stapo_lite.train"].train(load_config(write_config()))
    next(first)
    with pytest.raises(InputError, match="another run writes to it at this moment"):
        run(write_config(), resume=True)
    first.close()
    assert [m["step"] for m in run(write_config(), resume=True)] == [2, 3, 4]
