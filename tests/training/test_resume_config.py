"""Resuming: what must be equal, and what may change."""

import json
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from helpers import (
    MINIMAL,
    RARELY_RIGHT,
    adapter_bytes,
    command,
    run,
    steps,
    without_times,
)

from stapo_lite.assemble import open_run
from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.training.checkpoint import check_resume
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.loop import train


@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "dapo"}, {"train__optim": "paged_adamw_8bit", "lora": {"r": 64}}],
    ids=str,
)  # bitsandbytes keeps small tensors in 32 bits
def test_early_stop_then_resume_is_bitwise_equal(write_config, user_reward, tmp_path, changes):
    if "algorithm" in changes:
        user_reward(RARELY_RIGHT)
    whole, folder = (
        run(write_config(**changes, output_dir=str(tmp_path / "whole"))),
        tmp_path / "run",
    )
    for metrics in steps(write_config(**changes, log__save_steps=0)):
        if metrics["step"] == 2:
            break
    del metrics
    assert adapter_bytes(folder / "adapter") == adapter_bytes(folder / "checkpoint-2")
    assert (folder / "reward.png").exists()
    resumed = steps(write_config(**changes), resume=True)
    next(resumed)
    assert not (folder / "adapter").exists()  # until it ends
    with pytest.raises(InputError, match="another run writes to it now; choose another folder"):
        run(write_config(**changes), resume=True)
    next(resumed)
    assert list(resumed) == []
    assert without_times(read_metrics(folder)) == without_times(whole)
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        expected, actual = (
            (path / "checkpoint-4" / name).read_bytes() for path in (tmp_path / "whole", folder)
        )
        assert expected == actual


def test_a_resumed_run_keeps_the_adapter_that_it_began_from_as_its_reference(
    write_config, tmp_path
):
    run(
        write_config(
            output_dir=str(tmp_path / "start"), train__max_steps=1, train__learning_rate=0.5
        )
    )
    changes = {"lora__adapter": str(tmp_path / "start" / "adapter"), "objective__beta": 0.1}
    whole = run(write_config(**changes, output_dir=str(tmp_path / "whole")))
    assert 0 <= whole[0]["kl"] < whole[-1]["kl"]
    run(write_config(**changes, train__max_steps=2))
    run(write_config(**changes), resume=True)
    assert without_times(read_metrics(tmp_path / "run")) == without_times(whole)


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
    "objective.beta": 0.1,
    "train.learning_rate": 1.0,
    "train.max_tokens_per_microbatch": 2048,
    "lora.adapter": "start",
}
NEVER = {
    "lora.r": 8,
    "lora.lora_alpha": 8,
    "lora.use_rslora": True,
    "lora.target_modules": ["q_proj"],
    "train.optim": "paged_adamw_8bit",
}


@pytest.mark.parametrize(("key", "value"), (ALWAYS | WITH_FORCE | NEVER).items())
def test_what_may_change_when_a_run_is_resumed(key, value, tmp_path):
    """Always, what changes nothing that is computed; never, what the checkpoint's tensors have
    their shapes from."""
    before = load_config(MINIMAL).model_dump()
    now = load_config(MINIMAL, [f"{key}={json.dumps(value)}"]).model_dump()
    state = {"progress": {"tau_p": 0.002}, "config": before, "environment": {"torch": "1"}}
    (tmp_path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for force in (False, True):
        may = key in ALWAYS or (force and key in WITH_FORCE)
        with (
            nullcontext()
            if may
            else pytest.raises(InputError, match=f"--resume: .*{re.escape(key)}")
        ):
            assert check_resume(tmp_path, now, {"torch": "1"}, force)


def test_resuming_with_another_config_names_the_key(write_config, tmp_path, capsys):
    run(write_config(train__max_steps=2))
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    changed = write_config(train__max_steps=3, train__learning_rate=0.02)
    for arguments, message in (
        (
            [changed, "--resume", "--force", "lora.r=16"],
            "--resume: lora.r cannot change in a run (lora.r 8 -> 16, ",
        ),
        (
            [changed, "--resume"],
            "(train.learning_rate 0.01 -> 0.02, train.max_steps 2 -> 3): set the keys back",
        ),
        ([changed], "holds a run: continue it with --resume"),
    ):
        assert command("train", *arguments) == 2
        assert message in capsys.readouterr().err
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines
    settings = ["objective.s2t.tau_p=0.02", "train.weight_decay=0.5", "train.max_steps=4"]
    assert command("train", changed, "--resume", "--force", *settings) == 0
    resumed = read_metrics(tmp_path / "run")[2:]
    assert [m["tau_p"] for m in resumed] == [0.02, 0.02]
    assert [m["learning_rate"] for m in resumed] == pytest.approx([0.02 * 3 / 10, 0.02 * 4 / 10])
    state = torch.load(tmp_path / "run" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["weight_decay"] == 0.5
    last = [
        write_config(log__save_steps=1, train__learning_rate=0.02),
        *settings,
        "train.max_steps=5",
    ]
    assert command("train", *last, "--resume") == 0
    assert (
        "with another config: log.save_steps 2 -> 1, train.max_steps 4 -> 5\n"
        in capsys.readouterr().out
    )


def test_a_finished_run_without_checkpoints_is_not_begun_anew(write_config, tmp_path):
    config = write_config(train__max_steps=1)
    run(config)
    shutil.rmtree(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(InputError, match="holds a run without a checkpoint to resume"):
        run(config, resume=True)
    assert len(read_metrics(tmp_path / "run")) == 1


def test_a_schedule_that_falls_is_of_its_max_steps(write_config):
    """Another end is another run; a constant rate has none."""
    run(write_config(train__max_steps=1, train__lr_scheduler_type="linear"))
    with pytest.raises(InputError, match="train.max_steps 1 -> 2"):
        run(write_config(train__max_steps=2, train__lr_scheduler_type="linear"), resume=True)


def test_a_smaller_window_forgets(write_config):
    """Entropies of a window that is off would count for good."""

    def config(window):
        return load_config(write_config(objective={"s2t": {"window": window, "tau_p": 1.0}}))

    with open_run(config(2)) as begun:
        next(train(begun))
        assert begun.progress.recent
    with open_run(config(0), resume=True, force=True) as resumed:
        assert resumed.progress.step == 1
        assert resumed.progress.recent == []
