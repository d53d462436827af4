"""Two real processes: single updates, with the base whole and sharded, and whole runs."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from conftest import ROOT, adapted_policy, in_two_processes, run, same_metrics
from safetensors.torch import load_file
from test_train import RARELY_RIGHT
from test_update import INVARIANT, assert_same, later_update, objective, run_update, tolerance

from stapo_lite.files import read_lines
from stapo_lite.tracking import read_metrics
from stapo_lite.update import Update


def test_two_processes_make_the_same_update_as_one(tiny_model, tmp_path):
    """Same gradient, masks and metrics for every objective, also where one process has nothing to train, and where the
    base is spread over both."""
    options = ["--config_file", str(ROOT / "configs" / "accelerate" / "fsdp2.yaml")]
    options += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no"]
    script = Path(__file__).with_name("two_processes.py")
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    done = subprocess.run(
        [accelerate, "launch", *options, str(script), str(tiny_model), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case in INVARIANT:
        policy = adapted_policy(tiny_model)
        policy.model.double()
        completions, old = later_update(policy)
        expected = run_update(policy, completions, objective(**INVARIANT[case]), old=old)
        assert expected[1]["clipped_low"] + expected[1]["clipped_high"] > 0
        assert expected[1]["capped"] > 0
        for rank in (0, 1):
            results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
            assert results["world_size"] == 2
            assert len(results) == 1 + len(INVARIANT) * 2 * 2  # two ways to split the work, base whole and spread
            for split, base in itertools.product(("alternating", "one has nothing to train"), ("whole", "spread")):
                gradient, metrics, result = results[case, split, base]
                assert_same((gradient, metrics, Update(*result)), expected, tolerance(case))


def test_two_processes_make_the_same_run_as_one(write_config, user_reward, tmp_path):
    """The same draws, metrics, tokens and adapter; each goes on from the other's checkpoint."""
    user_reward(RARELY_RIGHT)
    # At a higher rate Adam would blow the rounding of tiny gradients up.
    changes = {"train__max_steps": 3, "train__mini_batch_size": 2, "train__learning_rate": 1e-4, "log__save_steps": 1}
    changes |= {
        "rollout__dynamic_sampling": True,
        "audit": {"enabled": True, "tokens_per_step": 5},
        "log__save_total_limit": 9,
    }
    one = run(write_config(**changes, output_dir=str(tmp_path / "one")))
    assert any(m["silenced_share"] for m in one)
    assert any(m["sampling_rounds"] > 1 for m in one)
    for name in ("run", "two to one", "one to two"):
        (tmp_path / name).mkdir()
    shown = in_two_processes(write_config(**changes), tmp_path)
    two = read_metrics(tmp_path / "run")
    assert len(re.findall("^step ", shown, re.MULTILINE)) == 3

    same_metrics(two, one)
    ones, twos = (read_lines(tmp_path / name / "tokens.jsonl") for name in ("one", "run"))
    assert [(t["step"], t["token"]) for t in twos] == [(t["step"], t["token"]) for t in ones]
    for start, end in (("run", "two to one"), ("one", "one to two")):
        shutil.copytree(tmp_path / start / "checkpoint-1", tmp_path / end / "checkpoint-1")
        shutil.copy(tmp_path / start / "metrics.jsonl", tmp_path / end)
        config = write_config(**changes, output_dir=str(tmp_path / end))
        if end == "two to one":
            run(config, resume=True)
        else:
            in_two_processes(config, tmp_path, "--resume")
        same_metrics(read_metrics(tmp_path / end), one)
    final = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "run")]
    # As a whole: where a gradient is all but zero, Adam makes a share of the learning rate of its rounding.
    theirs, ours = (torch.cat([adapter[name].flatten() for name in final[0]]) for adapter in final)
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
