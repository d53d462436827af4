"""A run of Qwen3.5 as its checkpoints are on the Hub, from the first step to those who load it."""

import signal
from contextlib import closing

import interrupted
import pytest
import torch
from families import FAMILIES, random_checkpoint
from helpers import (
    PROMPTS,
    VLLM,
    adapted_policy,
    adapter_bytes,
    command,
    gap,
    generate,
    make_vllm,
    run,
    without_times,
)
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from stapo_lite.files import read_object, write_lines
from stapo_lite.model.adapter import load_adapter
from stapo_lite.training.folder import read_metrics

pytest.importorskip("vllm", reason="vLLM is not installed")


def test_the_whole_way_of_a_run(write_config, tmp_path, children, capsys):
    """Trained, killed, resumed, evaluated, audited, exported, and loaded by others."""
    hybrid = random_checkpoint(tmp_path / "hybrid", FAMILIES["Qwen3.5"])
    rollout = VLLM | {"num_generations": 4, "max_completion_length": 8}
    keys = {"model": str(hybrid), "dtype": "bfloat16", "rollout": rollout, "log__save_steps": 1}
    keys["train__max_steps"] = 2
    folder = tmp_path / "run"
    config = write_config(**keys)
    third_update = (2, 4)
    killed = children(interrupted.train, [str(config)], "update", third_update, signal.SIGKILL)
    assert killed == -signal.SIGKILL
    assert command("train", config, "--resume") == 0
    assert f"resuming {folder}/checkpoint-1" in capsys.readouterr().out
    whole = run(write_config(**keys, output_dir=str(tmp_path / "whole")))
    assert without_times(read_metrics(folder)) == without_times(whole)
    assert adapter_bytes(folder / "adapter") == adapter_bytes(tmp_path / "whole" / "adapter")

    write_lines(tmp_path / "mine.jsonl", [{"problem": "1 + 1?", "answer": "2"}])
    keys = [f"model={hybrid}", f"adapter={folder}/adapter", f"output_dir={tmp_path}/evaluation"]
    keys += [f"benchmarks=[{tmp_path}/mine.jsonl]", "rollout.num_samples=2", "dtype=bfloat16"]
    keys += ["rollout.engine=vllm", "rollout.max_completion_length=8", "data.max_prompt_length=99"]
    keys += ["rollout.vllm={kv_cache_memory_bytes: 134217728}"]
    assert command("evaluate", "configs/eval.yaml", *keys) == 0
    results = read_object(tmp_path / "evaluation" / "results.json")
    assert results["environment"]["engine"].startswith("vllm")
    assert command("audit", folder) == 0
    assert (folder / "audit" / "index.html").exists()

    assert command("export", folder, "--out", tmp_path / "adapter") == 0
    assert command("export", folder, "--out", tmp_path / "merged", "--merge") == 0
    stored = load_file(hybrid / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == stored.keys()
    tower = [name for name in stored if ".visual." in name]
    assert tower
    assert all(torch.equal(merged[name], stored[name]) for name in tower)
    # Others load the adapter with the larger model, and only its language model changes.
    larger = AutoModelForImageTextToText.from_pretrained(hybrid, dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(larger, tmp_path / "adapter")
    names = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.replace(".default", "") for name in names} == saved.keys()
    policy = adapted_policy(hybrid, "bfloat16", lora__lora_alpha=32)
    load_adapter(policy.model, tmp_path / "adapter")
    for model, published in ((hybrid, True), (tmp_path / "merged", False)):
        with closing(make_vllm(model, "bfloat16")) as second:
            if published:
                second.load_adapter(tmp_path / "adapter", 1)
            assert gap(policy, generate(second, PROMPTS)).mean() < 0.1
