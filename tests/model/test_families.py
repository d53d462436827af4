"""A whole run of each family: adapter in vLLM, update, export; and the stop tokens of their chat
templates."""

import re
from pathlib import Path

import pytest
import trl
from families import FAMILIES, random_checkpoint
from helpers import run
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stapo_lite.data.prompts import stop_token_ids
from stapo_lite.extras.publish.export import export

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_and_its_export(family, write_config, tmp_path):
    """Engine and trainer agree on a random adapter on every linear layer (the self-check); the
    merged export is loaded again and compared with base + adapter."""
    model = random_checkpoint(tmp_path / "model", FAMILIES[family])
    rollout = {"engine": "vllm", "num_generations": 4, "max_completion_length": 8}
    rollout["vllm"] = {"kv_cache_memory_bytes": 1 << 27}
    keys = {"lora__target_modules": "all-linear", "train__max_steps": 1}
    (metrics,) = run(write_config(model=str(model), rollout=rollout, **keys))
    assert metrics["updates"]
    assert metrics["sampler_gap_mean"] < 1e-4
    merged = export(tmp_path / "run", tmp_path / "merged", merge=True, dtype="float32")
    assert not [name for name in load_file(merged / "model.safetensors") if "lora" in name]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("llama3_1", "<|eot_id|>"),
        ("gemma3", "<end_of_turn>"),
        ("phi3_5", "<|end|>"),
        ("lfm2_v2", "<|im_end|>"),
    ],
)
def test_stop_tokens_are_those_of_the_chat_template(tiny_model, name, end):
    """Of TRL's copies of them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    special = re.findall(r"<\|\w+\|>|<\w+_of_turn>", tokenizer.chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(special))})
    ids = stop_token_ids(tokenizer, None, apply_chat_template=True)
    assert tokenizer.convert_tokens_to_ids(end) in ids
