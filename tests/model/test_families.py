"""A whole run of each family: adapter in vLLM, update, export; and the stop tokens of their chat
templates."""

import re
from pathlib import Path

import pytest
import trl
from families import FAMILIES, REFUSED, random_checkpoint
from safetensors import safe_open
from transformers import AutoTokenizer

from stapo_lite import InputError, Trainer
from stapo_lite.data.prompts import stop_token_ids

pytest.importorskip("vllm", reason="vLLM is not installed")
ROWS = [{"prompt": f"say {word}"} for word in ("one", "two")]
TEMPLATES = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "phi3_5": "<|end|>",
    "lfm2_v2": "<|im_end|>",
}
"""TRL's copies of chat templates, and the token that ends a turn."""


def even(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) for ids in completion_ids]


def trainer(model, folder, **keys):
    return Trainer(
        model,
        even,
        train_dataset=ROWS,
        output_dir=str(folder / "run"),
        engine="vllm",
        dtype="float32",
        target_modules="all-linear",
        max_prompt_length=64,
        max_completion_length=8,
        num_generations=4,
        max_steps=1,
        batch_size=2,
        mini_batch_size=1,
        vllm={"kv_cache_memory_bytes": 1 << 27},
        **keys,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_and_its_export(family, tmp_path):
    """Engine and trainer agree on a random adapter on every linear layer (the self-check); the
    merged export is loaded again and compared with base + adapter."""
    model = random_checkpoint(tmp_path / "model", FAMILIES[family])
    run = trainer(model, tmp_path)
    (metrics,) = run.train()
    assert metrics["updates"]
    assert metrics["sampler_gap_max"] < 1e-3
    merged = run.export(tmp_path / "merged", merge=True, dtype="float32")
    with safe_open(merged / "model.safetensors", "pt") as weights:
        assert not [name for name in weights.keys() if "lora" in name]  # noqa: SIM118


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_the_cpu_build_cannot_serve_is_refused_without_weights(family, tmp_path):
    REFUSED[family].save_pretrained(tmp_path)
    with pytest.raises(InputError, match="vLLM's CPU build cannot serve adapters of a m"):
        trainer(tmp_path, tmp_path).train()


@pytest.mark.parametrize("name", TEMPLATES)
def test_stop_tokens_are_those_of_the_chat_template(tiny_model, name):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    special = re.findall(r"<\|\w+\|>|<\w+_of_turn>", tokenizer.chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(special))})
    ids = stop_token_ids(tokenizer, None, apply_chat_template=True)
    assert tokenizer.convert_tokens_to_ids(TEMPLATES[name]) in ids
