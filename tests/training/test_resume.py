"""Runs that are killed, by SIGKILL or SIGTERM, and resumed."""

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
from helpers import RARELY_RIGHT, ROOT, adapter_bytes, checkpoints, run, steps, without_times

from stapo_lite.errors import InputError
from stapo_lite.files import read_object, size_up_to_step
from stapo_lite.training.checkpoint import list_checkpoints
from stapo_lite.training.folder import read_metrics


@pytest.fixture
def arguments(write_config, tmp_path):
    """A function that gives the command's, for a run of five steps in a folder of that name."""
    objective = {"s2t": {"tau_p": 0.02}}
    log = {"audit_tokens": 3, "save_steps": 2, "log_completions_steps": 0}
    config = write_config(train__max_steps=5, objective=objective, log=log)
    return lambda name: [str(config), f"output_dir={tmp_path / name}"]


def outcome(folder: Path):
    """All that a run leaves behind, but for times and its own name."""
    left = []
    for path in [folder / "adapter", *list_checkpoints(folder)]:
        state = read_object(path / "state.json") if path.name != "adapter" else {}
        state.pop("config", None)
        files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.pt"))
        left.append((path.name, state, [file.read_bytes() for file in files]))
    logs = [(folder / f"{name}.jsonl").read_bytes() for name in ("tokens", "completions")]
    return left, logs, without_times(read_metrics(folder)), list(folder.glob(".checkpoint*"))


@pytest.mark.parametrize(
    ("by", "number", "in_a_row"),
    [
        (signal.SIGKILL, 4, 4),
        pytest.param(signal.SIGKILL, 20, 5, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 14, 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_in_the_same_bytes(children, arguments, tmp_path, by, number, in_a_row):
    """At random moments, the phases in turn; after every few kills it is left to its end."""
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_loses_no_finished_step(children, arguments, tmp_path, number):
    two_updates_a_step = (7, 500)
    update = arguments("run"), "update", two_updates_a_step, number
    assert children(interrupted.train, *update) == 128 + number
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-3"]
    assert not (tmp_path / "run" / "adapter").exists()


def test_nohup_outlives_its_terminal(children, arguments, tmp_path):
    moment = 7, 500
    assert children(interrupted.train_with_nohup, arguments("run"), "update", moment) == 0


@pytest.mark.parametrize(("status", "starts"), [(0, 1), (1, 5), (2, 1), (130, 1), (143, 5)])
def test_the_loop_of_the_docs_ends_where_it_should(status, starts):
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    loop = next(line.strip() for line in text.splitlines() if "for i in" in line)
    script = f"stapo() {{ echo $*; return {status}; }}; {loop}"
    printed = subprocess.check_output(["bash", "-c", script], text=True)
    assert printed == "train CONFIG --resume\n" * starts


@pytest.mark.slow
def test_sigterm_to_accelerate_which_dies_of_it_reaches_the_run(write_config, tmp_path):
    """The run behind it saves its checkpoint."""
    program = str(Path(sys.executable).with_name("accelerate"))
    launch = [program, "launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
    launch += ["--dynamo_backend=no", "-m", "stapo_lite.train"]
    launch.append(str(write_config(train__max_steps=10_000, log__save_steps=0)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(launch, text=True, cwd=tmp_path, **pipes) as launched:
        # A line comes before its step's end, which makes the checkpoint.
        next(line for line in launched.stdout if line.startswith("step     4/"))
        launched.terminate()
        rest = launched.stdout.read()  # until the run, which writes there, has ended
    assert launched.returncode == -signal.SIGTERM
    step = int(checkpoints(tmp_path / "run")[-1].removeprefix("checkpoint-"))
    assert 3 <= step < 1000
    assert f"stopped after step {step}; the same command with --resume continues" in rest
    assert read_metrics(tmp_path / "run")[-1]["step"] - step in (0, 1)


@pytest.mark.parametrize("changes", [{"algorithm": "dapo"}, {"lora": {"r": 64}}], ids=str)
def test_early_stop_then_resume_is_bitwise_equal(write_config, user_reward, tmp_path, changes):
    if "algorithm" in changes:
        user_reward(RARELY_RIGHT)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    expected = run(write_config(**changes, output_dir=str(whole)))
    for metrics in steps(write_config(**changes, log__save_steps=0)):
        if metrics["step"] == 2:
            break
    assert adapter_bytes(folder / "adapter") == adapter_bytes(folder / "checkpoint-2")
    assert (folder / "reward.png").exists()
    resumed = steps(write_config(**changes), resume=True)
    next(resumed)
    assert not (folder / "adapter").exists()  # until it ends
    with pytest.raises(InputError, match="another run writes to it now; choose another folder"):
        run(write_config(**changes), resume=True)
    assert len(list(resumed)) == 1
    assert without_times(read_metrics(folder)) == without_times(expected)
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        ours, theirs = (path / "checkpoint-4" / name for path in (folder, whole))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_resumed_run_reads_its_start_as_the_reference_only(write_config, tmp_path):
    start = tmp_path / "start"
    run(write_config(output_dir=str(start), train__max_steps=1, train__learning_rate=0.5))
    changes = {"lora__adapter": str(start / "adapter"), "objective__beta": 0.1}
    whole = run(write_config(**changes, output_dir=str(tmp_path / "whole")))
    assert 0 <= whole[0]["kl"] < whole[-1]["kl"]
    run(write_config(**changes, train__max_steps=2))
    run(write_config(**changes), resume=True)
    assert without_times(read_metrics(tmp_path / "run")) == without_times(whole)
    changes |= {"objective__beta": 0.0, "output_dir": str(tmp_path / "no reference")}
    run(write_config(**changes, train__max_steps=1))
    shutil.rmtree(start)
    assert len(run(write_config(**changes, train__max_steps=2), resume=True)) == 1


class Code:
    def __reduce__(self):
        return exec, ("raise SystemExit('the code ran')",)


def test_a_damaged_checkpoint_runs_no_code_and_the_one_before_it_serves(write_config, tmp_path):
    whole, damaged = run(write_config()), tmp_path / "run" / "checkpoint-4"
    torch.save(Code(), damaged / "optimizer.pt")
    for torn in ("optimizer.pt", "adapter_model.safetensors"):
        with pytest.raises(InputError, match=re.escape(f"{damaged}: does not fit this run (")):
            run(write_config(train__max_steps=5), resume=True)
        (damaged / torn).write_bytes((damaged / torn).read_bytes()[:-7])
    shutil.rmtree(damaged)
    run(write_config(), resume=True)
    assert without_times(read_metrics(tmp_path / "run")) == without_times(whole)


def test_a_log_ends_where_its_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first, second, third = '{"step": 0}\n', '{"step": 2, "é": 1}\n', '{"step": 3}\n'
    path.write_text(first + second + third + '{"st', encoding="utf-8")
    kept = {-1: "", 0: first, 1: first, 2: first + second, 9: first + second + third}
    for step, text in kept.items():
        assert path.read_bytes()[: size_up_to_step(path, step)].decode() == text
