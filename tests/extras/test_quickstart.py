"""The quickstart as a user has it; a file of its own, as `make test-all` begins with it."""

import json
import math
import os

import pytest
import torch
from helpers import ROOT, accelerate_launch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stapo_lite.files import read_lines
from stapo_lite.training.folder import read_metrics


@pytest.mark.slow
def test_the_quickstart_learns_with_a_real_model_and_vllm(smollm2, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tmp_path / "run"
    # One thread: with two each waits for the other whenever another test has the second core.
    launch = ["--num_cpu_threads_per_process", 1, "-m", "stapo_lite.train"]
    # The first ten of its fifteen steps: by then it has learned most.
    overrides = [f"model={smollm2}", f"output_dir={folder}", "train.max_steps=10"]
    launch += ["configs/quickstart.yaml", *overrides, "log.report_to=[tensorboard]"]
    no_hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}  # out of reach
    printed = accelerate_launch(1, *launch, timeout=1500, cwd=ROOT, env=os.environ | no_hub)
    assert "adapter: " in printed
    metrics = read_metrics(folder)
    assert all(m["skipped_updates"] == 0 for m in metrics)
    assert all(math.isfinite(m["grad_norm"]) for m in metrics if m["updates"])
    # Later a mini-batch may have nothing left to learn.
    assert metrics[0]["updates"] == metrics[1]["updates"] == 2
    assert metrics[0]["sampler_gap_mean"] < 0.1  # vLLM and the trainer have the same dtype
    rewards = [m["reward"] for m in metrics]
    assert 0.02 < rewards[0] < 0.4  # the untrained model writes some such sentences
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert sum(m["silenced_share"] for m in metrics) > 0
    causes = [line["name"] for line in read_lines(folder / "symptoms.jsonl")]
    assert set(causes) <= {"note cut_off", "silenced_share"}  # it learns all the same
    assert list(folder.rglob("events.out.tfevents*"))
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert environment["engine"].startswith("vllm 0.")
    base = AutoModelForCausalLM.from_pretrained(smollm2)
    adapted = PeftModel.from_pretrained(base, folder / "adapter")
    assert any(p.any() for name, p in adapted.named_parameters() if "lora_B" in name)


def test_the_model_is_unpacked_in_bfloat16(smollm2):
    weights = load_file(smollm2 / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert len(AutoTokenizer.from_pretrained(smollm2)("A stone.").input_ids) == 3
