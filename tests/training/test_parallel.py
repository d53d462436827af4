"""Two real processes: single updates and whole runs."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import (
    RARELY_RIGHT,
    ROOT,
    accelerate_launch,
    adapted_policy,
    assert_same,
    double,
    held_out_rows,
    in_two_processes,
    later_update,
    objective,
    run,
    run_update,
    same_metrics,
)
from objectives import INVARIANT, tolerance
from safetensors.torch import load_file

from stapo_lite.files import read_lines, write_lines
from stapo_lite.training.folder import read_metrics
from stapo_lite.types import Update

FAST = ["stapo", "grpo", "20-entropy", "stare, both"]
OTHERS = [case for case in INVARIANT if case not in FAST]


@pytest.mark.parametrize("cases", [FAST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=str)
def test_two_processes_make_the_same_update_as_one(tiny_model, tmp_path, cases):
    """In gradient, masks and metrics, also where one process has nothing to train."""
    script = ROOT / "tests" / "two_processes.py"
    accelerate_launch(2, "--multi_gpu", script, tiny_model, tmp_path, *cases)
    for case in cases:
        policy = double(adapted_policy(tiny_model))
        completions, old = later_update(policy)
        expected = run_update(policy, completions, objective(**INVARIANT[case]), old=old)
        clipped = expected[1]["clip_low_share"] + expected[1]["clip_high_share"]
        assert clipped > 0 or case == "sapo"
        # gspo and dppo have no weights
        assert expected[1]["sampler_capped_share"] > 0 or case in ("gspo", "dppo")
        for rank in (0, 1):
            results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
            assert results["world_size"] == 2
            assert len(results) == 1 + len(cases) * 2  # two ways to split the work
            for split in ("alternating", "one has nothing to train"):
                gradient, metrics, grad_norm = results[case, split]
                result = Update({}, grad_norm)
                assert_same((gradient, metrics, result), expected, tolerance(case))


@pytest.fixture
def one(write_config, user_reward, tmp_path):
    """A run's metrics, and a function that writes configs: `after` a checkpoint of that run."""
    user_reward(RARELY_RIGHT)
    # At a higher rate Adam would blow the rounding of tiny gradients up.
    changes = {"train__max_steps": 3, "train__learning_rate": 1e-4}
    changes |= {"rollout__dynamic_sampling": True, "evaluation": held_out_rows(tmp_path, steps=2)}
    changes["objective"] = {"s2t": {"tau_p": 0.02}}
    changes["log"] = {"audit_tokens": 5, "save_steps": 1, "save_total_limit": 9}

    def write(name, after=None):
        (tmp_path / name).mkdir()
        if after is not None:
            shutil.copytree(tmp_path / after / "checkpoint-1", tmp_path / name / "checkpoint-1")
            shutil.copy(tmp_path / after / "metrics.jsonl", tmp_path / name)
        return write_config(**changes, output_dir=str(tmp_path / name))

    return run(write("one")), write


def test_two_processes_make_the_same_run_as_one(one, tmp_path):
    """The same draws, metrics, tokens and adapter; one goes on from the checkpoint of two."""
    metrics, write = one
    assert any(m["silenced_share"] for m in metrics)
    assert any(m["sampling_rounds"] > 1 for m in metrics)
    shown = in_two_processes(write("two"), tmp_path)
    assert len(re.findall("^step ", shown, re.MULTILINE)) == 3
    folders = tmp_path / "one", tmp_path / "two"
    same_metrics(read_metrics(tmp_path / "two"), metrics)
    ones, twos = (read_lines(folder / "evaluations.jsonl") for folder in folders)
    assert ones == twos
    assert (tmp_path / "two" / "best").exists()
    logs = (read_lines(folder / "tokens.jsonl") for folder in folders)
    ones, twos = ([(t["step"], t["token"]) for t in log if t["kind"] != "other"] for log in logs)
    assert ones == twos != []
    # As a whole: where a gradient is all but zero, Adam makes a share of the learning rate of its
    # rounding.
    finals = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in folders]
    theirs, ours = (torch.cat([final[name].flatten() for name in finals[0]]) for final in finals)
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    run(write("two to one", after="two"), resume=True)
    same_metrics(read_metrics(tmp_path / "two to one"), metrics)


@pytest.mark.slow
def test_two_processes_go_on_from_the_checkpoint_of_one(one, tmp_path):
    metrics, write = one
    in_two_processes(write("one to two", after="one"), tmp_path, "--resume")
    same_metrics(read_metrics(tmp_path / "one to two"), metrics)


@pytest.mark.slow
def test_a_step_may_have_fewer_prompts_than_processes(write_config, user_reward, tmp_path):
    """One has nothing to sample, and with equal rewards none has anything to show."""
    user_reward("def even(completions, **_): return [1.0] * len(completions)")
    keys = {"batch_size": 1, "mini_batch_size": 1, "max_steps": 2, "learning_rate": 1e-4}
    dynamic = {"dynamic_sampling": True, "max_sampling_rounds": 1, "engine": "transformers"}
    sizes = {"num_generations": 2, "max_completion_length": 4}
    log = {"log_completions_steps": 1}
    config = write_config(train=keys, rollout=dynamic | sizes, log=log)
    in_two_processes(config, tmp_path)
    assert [m["updates"] for m in read_metrics(tmp_path / "run")] == [0, 0]


@pytest.mark.slow
def test_two_processes_with_vllm_export_evaluate_and_train_again(tiny_model, tmp_path):
    """vLLM ends a process group that is not its own; exports and evaluations wait for all."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    sums = [{"problem": "1+1?", "answer": "2"}, {"problem": "1+2?", "answer": "3"}]
    write_lines(tmp_path / "sums.jsonl", sums)
    script = ROOT / "tests" / "two_trainers.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch += map(str, [script, tiny_model, tmp_path / "sums.jsonl", tmp_path])
    done = subprocess.run(launch, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("on 2 process(es)") == 2
