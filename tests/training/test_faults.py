"""Faults that a run outlives or ends with, each injected for real: docs/faults.md."""

import math
import os
import re
import signal
import sys

import interrupted
import pytest
from accelerate.tracking import TensorBoardTracker
from helpers import (
    adapter_bytes,
    checkpoints,
    command,
    in_two_processes,
    run,
    same_metrics,
    steps,
    without_times,
)
from safetensors.torch import load_file

from stapo_lite.errors import RunError
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.files import read_object
from stapo_lite.training import checkpoint
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.log import step_line
from stapo_lite.training.run import Run

HUGE = "def even(prompts, **_): return [9e29 if i % 2 and {} else i for i, p in enumerate(prompts)]"
UNSCALED = {
    "objective": {"scale_rewards": "none", "s2t": {"tau_p": 0.01}},
    "rollout__max_completion_length": 16,
    "train__max_tokens_per_microbatch": 512,
}


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_an_update_that_is_not_finite_is_skipped(write_config, user_reward, tmp_path, caplog):
    """Advantages beyond fp32 in one of two mini-batches: the step is what the other one makes."""
    user_reward(HUGE.format("'two' in p"))
    metrics = run(write_config(**UNSCALED, train__max_steps=6))
    assert "no update: not finite" in step_line(metrics[0] | {"updates": 0}, max_steps=6)
    # One more than end a run, if they are in a row.
    assert [(m["skipped_updates"], m["updates"]) for m in metrics] == [(1, 1)] * 6
    assert all(abs(m["loss"]) < 1000 for m in metrics)  # nothing of the skipped update
    assert caplog.text.count("update skipped: loss or gradient is not finite (norm inf)") == 6
    assert all(math.isfinite(value) for m in metrics for value in m.values() if value is not None)
    assert all(value.isfinite().all() for value in adapter(tmp_path / "run").values())


@pytest.mark.parametrize(
    ("reward", "message", "skipped"),
    [
        (HUGE.format("True"), "5 updates in a row had a loss or gradient that is not finite", 4),
        (
            "def even(**columns): raise ConnectionError('judge is down')",
            "reward.functions=parity:even: raised ConnectionError: judge is down; it failed on 3 "
            "batches in a row: fix it, or raise reward.function_timeout, and continue with",
            0,
        ),
    ],
    ids=["updates", "rewards"],
)
def test_too_many_faults_in_a_row_end_the_run_with_a_checkpoint(
    write_config, user_reward, tmp_path, capsys, reward, message, skipped
):
    user_reward(reward)
    assert command("train", write_config(**UNSCALED, log__save_steps=0)) == 1
    (error,) = re.findall("^error: .*$", capsys.readouterr().err, re.MULTILINE)
    assert message in error
    metrics = [(m["updates"], m.get("reward") is None) for m in read_metrics(tmp_path / "run")]
    assert metrics == [(0, not skipped)] * 2
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    progress = read_object(tmp_path / "run" / "checkpoint-2" / "state.json")["progress"]
    assert (progress["prompts_drawn"], progress["skipped_in_a_row"]) == (8, skipped)


def test_an_engine_that_gives_no_numbers_ends_the_run(write_config, tmp_path, watch):
    def break_one(groups, engine, *_):
        if engine._version == 3:
            groups[1][2].rollout_logprobs[0] = math.nan

    watch(TransformersEngine, "generate", break_one)
    with pytest.raises(RunError, match="rollout.engine=transformers: it gave log-probabilities"):
        run(write_config())
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]


def test_no_signal_disturbs_the_last_checkpoint(write_config, tmp_path, monkeypatch):
    """`accelerate launch` that is interrupted sends a SIGTERM after the Ctrl-C."""
    save, handler = checkpoint.save_checkpoint, signal.getsignal(signal.SIGTERM)

    def disturbed(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save_checkpoint", disturbed)
    training = steps(write_config(log__save_steps=0))
    assert [next(training)["step"], next(training)["step"]] == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        training.throw(KeyboardInterrupt())
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_full_disk_ends_a_run_which_can_go_on(children, write_config, tmp_path):
    log = {"audit_tokens": 64, "save_steps": 1, "save_total_limit": 9}
    config = str(write_config(train__max_steps=6, log=log))
    assert children(interrupted.command, [config, f"output_dir={tmp_path / 'whole'}"]) == 0
    cut = tmp_path / "run"
    assert children(interrupted.train_on_a_full_disk, [config], {3}) == 1
    assert checkpoints(cut) == ["checkpoint-1", "checkpoint-2"]
    assert children(interrupted.command, [config, "--resume"]) == 0
    assert checkpoints(cut) == [f"checkpoint-{step}" for step in range(1, 7)]
    assert not list(cut.glob(".checkpoint*"))
    whole = tmp_path / "whole"
    for name in ("adapter", *checkpoints(cut)):
        assert adapter_bytes(cut / name) == adapter_bytes(whole / name)
    assert (cut / "tokens.jsonl").read_bytes() == (whole / "tokens.jsonl").read_bytes()
    assert without_times(read_metrics(cut)) == without_times(read_metrics(whole))


@pytest.mark.parametrize("moment", ["start", "log"])
def test_trackers_that_fail_are_left_out(write_config, tmp_path, monkeypatch, caplog, moment):
    def fail(*_, **__):
        raise OSError("away")

    monkeypatch.setattr(TensorBoardTracker, moment, fail)
    assert len(run(write_config(log={"report_to": ["tensorboard"]}))) == 4
    assert caplog.text.count("log.report_to: training goes on without trackers (") == 1


def test_stop_on_ends_a_run(write_config, user_reward, tmp_path, monkeypatch, capsys):
    """Also one that was killed before it had written its adapter."""
    user_reward("def even(completions, **columns): return [1.0 for c in completions]")
    config = write_config(train__max_steps=30, log__save_steps=0, stop_on=["no_signal"])
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", lambda self: sys.exit(143))
        assert command("train", config) == 143
    folder, output = tmp_path / "run", capsys.readouterr().out
    assert "no update: no token to train" in output
    assert "stop_on=no_signal: the run ends after step 10" in output
    assert not (folder / "adapter").exists()
    assert command("train", config, "--resume") == 0
    assert checkpoints(folder) == ["checkpoint-10"]
    assert len(read_metrics(folder)) == 10
    values = adapter(folder).items()
    assert not any(value.any() for name, value in values if "lora_B" in name)  # nothing has moved
    other = write_config(train__max_steps=12, log__save_steps=0, stop_on=["ratio"])
    assert command("train", other, "--resume") == 0
    assert len(read_metrics(folder)) == 12


DEADLY = """
import os, psutil
calls = 0
def even(completion_ids, **columns):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == 3:
        psutil.Process().parent().kill()  # the trainer
    return [float(sum(i % 2 == 0 for i in ids)) for ids in completion_ids]
"""


@pytest.mark.slow
def test_a_lost_trainer_ends_the_job_but_no_work_is_lost(write_config, user_reward, tmp_path):
    # At a low rate, so that what AdamW makes of rounding moves no draw on any CPU.
    changes = {"log__save_steps": 0, "train__learning_rate": 1e-5}
    whole = run(write_config(output_dir=str(tmp_path / "whole"), **changes))
    user_reward(DEADLY)
    config = write_config(**changes)
    in_two_processes(config, tmp_path, status=1)
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    same_metrics(run(config, resume=True), whole[2:])  # with one process
