"""`stapo plan`: bytes by hand, and activations as an update allocates them."""

import pytest
from helpers import (
    MINIMAL,
    Prompt,
    adapted_policy,
    make_learner,
    objective,
    packed,
    rms_norm_of_a_card,
)
from memory import peak_bytes
from random_model import VOCABULARY, build, qwen3, qwen3_5
from transformers import FalconConfig, GPTNeoXConfig, OPTConfig

from stapo_lite.config import load_config
from stapo_lite.extras.planning import RESERVED, plan
from stapo_lite.model.sizes import count_activations, count_sizes
from stapo_lite.training.memory import MARGIN, MemorySetting
from stapo_lite.training.update import update
from stapo_lite.types import Completion

LINEARS = 2 * (2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 96)  # q and o, k and v, the MLP; two layers
OTHERS = 2 * VOCABULARY * 64 + 2 * (2 * 64 + 2 * 32) + 64  # embedding and head, norms
ADAPTER = 2 * 8 * (2 * (64 + 128) + 2 * (64 + 64) + 3 * (64 + 96))
KEYS = 2 * 2 * 2 * 32  # keys and values of two heads in two layers


@pytest.mark.parametrize(
    ("dtype", "quantization", "base", "width"),
    [("float32", None, 4.0, 4), ("bfloat16", None, 2.0, 2), ("bfloat16", "nf4", 0.5625, 2)],
)
def test_bytes_of_base_adapter_and_cache(tiny_model, dtype, quantization, base, width):
    keys = {"model": str(tiny_model), "dtype": dtype, "quantization": quantization, "r": 8}
    config = load_config(MINIMAL, keys)
    sizes = count_sizes(config)
    assert sizes == (LINEARS * base + OTHERS * width, ADAPTER, KEYS * width, 0)
    always = sizes.base + RESERVED + int(MARGIN * 4 * 2**30)
    assert f" {(4 * 2**30 - always) // (KEYS * width):,} tokens" in plan(config, gib=4.0)
    assert " 0 tokens" in plan(config, gib=1.0)


SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
STATES |= {"linear_key_head_dim": 64, "linear_value_head_dim": 32}


def test_bytes_of_a_hybrid(tmp_path):
    """One layer of four has keys and values; the others have states, in fp32."""
    qwen3_5("0.8B", **SHAPE, **STATES).save_pretrained(tmp_path)
    config = load_config(MINIMAL, {"model": str(tmp_path), "dtype": "bfloat16"})
    sizes = count_sizes(config)
    assert (sizes.cached_token, sizes.cached_sequence) == (2 * 2 * 64 * 2, 3 * 64 * 4 * 32 * 4)
    left = 4 * 2**30 - sizes.base - RESERVED - int(MARGIN * 4 * 2**30)
    longest = config.max_sequence_length
    sequences = left / (sizes.cached_sequence + longest * sizes.cached_token)
    assert f" {int(sequences * longest):,} tokens: {sequences:.1f} of" in plan(config, gib=4.0)


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "hybrid"),
    [  # each pair of values
        ("float32", False, False),
        ("bfloat16", True, False),
        ("bfloat16", False, True),
        ("float32", True, True),
    ],
)
def test_activations_are_those_of_an_update(tmp_path, monkeypatch, dtype, checkpointing, hybrid):
    rms_norm_of_a_card(monkeypatch)
    config = qwen3("1.7B", **SHAPE)
    if hybrid:
        heads_alike = STATES | {"linear_value_head_dim": 64}
        config = qwen3_5("0.8B", **SHAPE, **heads_alike).text_config
    model = build(tmp_path, config)
    policy = adapted_policy(model, dtype, checkpointing=checkpointing)
    prompt = Prompt("", [5] * 100, None)
    completion = Completion(prompt, [7] * 412, [-1.0] * 412, True, 0, advantage=1.0)
    learner = make_learner(policy, objective("justrl"), 2048)
    batch = packed(policy, [completion] * 4)
    update(learner, batch)
    keys = {"model": str(model), "dtype": dtype, "lm_head_memory_gb": 2**-10}
    estimate = count_activations(load_config(MINIMAL, keys), 4 * 512, checkpointing)
    error = 0.15 if hybrid else 0.1
    print("RATIO", estimate / peak_bytes(lambda: update(learner, batch)))
    assert estimate == pytest.approx(peak_bytes(lambda: update(learner, batch)), rel=error)


@pytest.mark.parametrize("family", [OPTConfig, GPTNeoXConfig, FalconConfig])
def test_families_without_grouped_queries(tmp_path, family):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
    family(**sizes).save_pretrained(tmp_path)
    keys = {"model": str(tmp_path), "dtype": "float32", "target_modules": "all-linear"}
    config = load_config(MINIMAL, keys)
    assert count_sizes(config).cached_token == 2 * 2 * 64 * 4  # keys and values of two layers
    assert "tokens" in plan(config, gib=4.0)


@pytest.mark.parametrize(("longest", "tokens"), [(1024, 8192), (9000, 10_024)])
def test_a_pass_has_room_for_the_longest_sequence(tiny_model, longest, tokens):
    keys = {"model": str(tiny_model), "dtype": "float32", "data.max_prompt_length": 1024}
    config = load_config(MINIMAL, keys | {"rollout.max_completion_length": longest})
    page = plan(config, gib=4.0)
    for checkpointing in (False, True):
        gib = count_activations(config, tokens, checkpointing) / 2**30
        name = f"GiB for {MemorySetting(False, checkpointing, tokens)}"
        assert f"\n{name:<64}{gib:6.2f}\n" in page
