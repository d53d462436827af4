"""Tiny models with random weights of the families that people use."""

import torch
from random_model import VOCABULARY, build
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from stapo_lite.model.loading import beside_vllm

SIZES = {
    "vocab_size": VOCABULARY,  # which vLLM pads to 320
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LAYERS = ["sliding_attention", "full_attention"]
HYBRID = SIZES | {
    "num_hidden_layers": 4,  # the last one attends
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,  # vLLM's kernels for a CPU take heads of 64 and 128
    "linear_value_head_dim": 64,
    "tie_word_embeddings": True,
}
TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 128}
IN_HALF = ("Qwen3.5, text", "Qwen3.5")
"""Families that vLLM's CPU build computes in bfloat16 only."""
FAMILIES = {
    "Qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "Qwen3, tied": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "Qwen2.5": Qwen2Config(**SIZES, tie_word_embeddings=True),  # with biases
    "Llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "Mistral": MistralConfig(**SIZES, tie_word_embeddings=False),
    "Gemma 3": Gemma3TextConfig(  # its norms add one to their weights
        **SIZES | {"initializer_range": 0.05},
        head_dim=32,
        layer_types=LAYERS,
        sliding_window=16,
    ),
    "Phi-4": Phi3Config(**SIZES, tie_word_embeddings=False),  # fused in transformers, too
    "Granite": GraniteConfig(**SIZES, tie_word_embeddings=True),
    "Qwen3.5, text": Qwen3_5TextConfig(**HYBRID),
    "Qwen3.5": Qwen3_5Config(  # as on the Hub: the language model is part of a larger one
        text_config=HYBRID, vision_config=TOWER, tie_word_embeddings=True
    ),
    # vLLM serves these with transformers' own modules.
    "SmolLM3": SmolLM3Config(**SIZES, tie_word_embeddings=True),
    "OLMo 2": Olmo2Config(**SIZES, tie_word_embeddings=False),
    "OLMo 3": Olmo3Config(**SIZES, layer_types=LAYERS, sliding_window=16),
}


def random_checkpoint(folder, config):
    """A model whose norms and biases are random, too."""
    with beside_vllm(config):  # other tests of this process may have served the family
        build(folder, config, torch.bfloat16)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    weights = load_file(path)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = weight + 0.3 * torch.randn(weight.shape, generator=generator).bfloat16()
    save_file(weights, path, {"format": "pt"})
    return folder
