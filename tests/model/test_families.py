"""A run of each family, with vLLM and an export; and the stop tokens of their chat templates."""

import pytest
from families import FAMILIES, IN_HALF, random_checkpoint
from helpers import VLLM, run, with_template
from safetensors.torch import load_file

from stapo_lite.data.messages import stop_token_ids
from stapo_lite.extras.publish.export import export

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_and_its_export(family, write_config, tmp_path):
    """The run checks its engine with a random adapter on every linear layer, the export itself."""
    model = random_checkpoint(tmp_path / "model", FAMILIES[family])
    rollout = VLLM | {"num_generations": 4, "max_completion_length": 8}
    dtype = "bfloat16" if family in IN_HALF else "float32"
    keys = {"dtype": dtype, "train__max_steps": 1}
    (metrics,) = run(write_config(model=str(model), rollout=rollout, **keys))
    assert metrics["updates"]
    assert metrics["sampler_gap_mean"] < {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    merged = export(tmp_path / "run", tmp_path / "merged", merge=True, dtype="float32")
    names = load_file(merged / "model.safetensors").keys()
    assert names == load_file(model / "model.safetensors").keys()  # what reads images, too


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("qwen3_5_think", "<|im_end|>"),
        ("qwen3_6", "<|im_end|>"),
        ("qwen3_8", "<|im_end|>"),
        ("llama3_1", "<|eot_id|>"),
        ("gemma3", "<end_of_turn>"),
        ("phi3_5", "<|end|>"),
        ("lfm2_v2", "<|im_end|>"),
    ],
)
def test_stop_tokens_are_those_of_the_chat_template(tiny_model, name, end):
    """Of TRL's copies of them."""
    tokenizer = with_template(tiny_model, name)
    ids = stop_token_ids(tokenizer, None, apply_chat_template=True)
    assert tokenizer.convert_tokens_to_ids(end) in ids
