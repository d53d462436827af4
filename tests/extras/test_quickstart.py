"""The quickstart as a user has it. A file of its own: the longest test begins first (`make
test-all`)."""

import json
import math
import os

import pytest
from helpers import ROOT, accelerate_launch

from stapo_lite.errors import InputError
from stapo_lite.extras.quickstart.model import FOLDER
from stapo_lite.model.loading import load_model_config
from stapo_lite.training.folder import read_metrics


def test_a_run_before_the_quickstart_names_the_command_that_makes_its_model(tmp_path):
    missing = tmp_path.joinpath(*FOLDER.parts[-3:])
    with pytest.raises(InputError, match="no such folder; `stapo quickstart` makes it"):
        load_model_config(str(missing))


@pytest.mark.slow
def test_the_quickstart_learns_with_a_real_model_and_vllm(smollm2, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tmp_path / "run"
    # One thread: with two each waits for the other whenever another test has the second core.
    launch = [
        "--num_cpu_threads_per_process",
        1,
        "-m",
        "stapo_lite.train",
        "configs/quickstart.yaml",
    ]
    # The first ten of its fifteen steps: by then it has learned most.
    overrides = [
        f"model={smollm2}",
        f"output_dir={folder}",
        "train.max_steps=10",
        "log.report_to=[tensorboard]",
    ]
    env = os.environ | {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # a Hub that is out of reach
    assert "adapter: " in accelerate_launch(1, *launch, *overrides, timeout=1500, cwd=ROOT, env=env)
    metrics = read_metrics(folder)
    norms = [m["grad_norm"] for m in metrics if m["updates"]]
    assert all(m["skipped_updates"] == 0 for m in metrics)
    assert all(map(math.isfinite, norms))
    assert (
        metrics[0]["updates"] == metrics[1]["updates"] == 2
    )  # later a mini-batch may have nothing left to learn
    assert (
        metrics[0]["sampler_gap_mean"] < 0.1
    )  # vLLM and the trainer compute in the same data type
    rewards = [m["reward"] for m in metrics]
    assert 0.02 < rewards[0] < 0.4  # the untrained model writes some such sentences
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert sum(m["silenced_share"] for m in metrics) > 0
    assert list(folder.rglob("events.out.tfevents*"))
    assert json.loads((folder / "environment.json").read_text(encoding="utf-8"))[
        "engine"
    ].startswith("vllm 0.")

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(smollm2), folder / "adapter"
    )
    assert any(p.any() for name, p in model.named_parameters() if "lora_B" in name)
