"""Bytes of a run's parts, from the model's config alone."""

from itertools import chain
from typing import Any, NamedTuple

from stapo_lite.config import Config
from stapo_lite.model.adapter import linear_layers, target_layers
from stapo_lite.model.loading import load_model_config, without_weights

GIB = 2**30
NF4_BYTES = 0.5 + 4 / 64
"""Bytes of a weight in vLLM's 4-bit layers: half a byte, and an fp32 scale for 64 weights."""
RULE_BYTES = 96
"""Bytes that transformers' own gated delta rule saves for the backward pass, for each token and
feature of its values. (flash-linear-attention saves less.)"""


class Sizes(NamedTuple):
    """Sizes of a model with an adapter."""

    base: int
    """Bytes of the frozen weights."""
    adapter: int
    """Parameters that are trained."""
    cached_token: int
    """Bytes of a token in the KV cache, without vLLM's `kv_cache_dtype`."""
    cached_sequence: int
    """Bytes of the states of a sequence in layers of linear attention, in fp32."""


def count_sizes(config: Config) -> Sizes:
    """Count the parameters of a run's model on the meta device.

    Raises:
        InputError: there is no such model, or it lacks a target module.
    """
    model_config = load_model_config(config.model)
    text = model_config.get_text_config()
    model = without_weights(model_config)
    width = value_bytes(config)
    linear_width = NF4_BYTES if config.quantization else width
    parameters = sum(parameter.numel() for parameter in model.parameters())
    in_linears = sum(layer.weight.numel() for layer in chain(*linear_layers(model).values()))
    base = in_linears * linear_width + (parameters - in_linears) * width
    # A is [r, in] and B [out, r].
    adapted = chain(*target_layers(model, config.lora.target_modules).values())
    adapter = sum(config.lora.r * (layer.in_features + layer.out_features) for layer in adapted)
    # Keys and values of every layer with attention, and a state [head size of keys, features of all
    # values] of every other one.
    linear = linear_attention_layers(text)
    attending = text.num_hidden_layers - linear
    cached_token = 2 * attending * head_size(text) * key_heads(text) * width
    cached_sequence = 0
    if linear:
        cached_sequence = 4 * linear * text.linear_key_head_dim * value_features(text)
    return Sizes(int(base), adapter, cached_token, cached_sequence)


def count_activations(config: Config, tokens: int, checkpointing: bool) -> int:
    """Bytes that autograd and the LM head take for a micro-batch of some tokens.

    Assumes layers like those of Llama and Qwen on a card: fused norms (`fused.py`), a gated MLP,
    attention scores that are never in memory. The result is within 1 % of the tensors of this
    package's own update (Qwen3 1.7B to 14B). It is some percent too low in fp16 on a T4, where
    attention repeats keys and values.
    """
    text: Any = load_model_config(config.model).get_text_config()
    layers = text.num_hidden_layers
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", 4 * hidden)
    projected = head_size(text) * (text.num_attention_heads + key_heads(text))
    width = value_bytes(config)
    linear = linear_attention_layers(text)
    # Bytes of one token in one layer. A norm saves its input, which those of Qwen3.5 make an fp32
    # copy of, and its output; the MLP gate, SiLU, up and their product; attention queries, keys,
    # values and its output. Qwen3 norms queries and keys.
    normed = 4 if linear else width
    every = 2 * normed * hidden + width * (2 * hidden + 4 * inner)
    attention = (2 * width + normed) * projected
    rule = RULE_BYTES * value_features(text) if linear else 0
    if checkpointing:  # only the input of each layer is saved; one layer at a time is recomputed
        saved = hidden * width * layers
        recomputed = every + max(attention, rule)
    else:
        saved = every * layers + attention * (layers - linear) + rule * linear
        recomputed = 0
    gradients = 2 * width * inner  # of gate and up
    final = 11 * width * hidden  # the last norm, and what the LM head reads
    # The peak is in the decoder's backward pass or in the LM head.
    decoder = tokens * (saved + max(recomputed + gradients, final))
    head = tokens * (saved + 3 * width * hidden) + int(config.train.lm_head_memory_gb * GIB)
    return max(decoder, head)


def linear_attention_layers(text: Any) -> int:
    """Layers that have a state in place of keys and values (Qwen3.5)."""
    return (getattr(text, "layer_types", None) or []).count("linear_attention")


def value_features(text: Any) -> int:
    """Features of all values of a layer of linear attention."""
    return text.linear_num_value_heads * text.linear_value_head_dim


def value_bytes(config: Config) -> int:
    """Bytes of a value in the run's dtype, which is resolved."""
    return 4 if config.dtype == "float32" else 2


def head_size(text: Any) -> int:
    """Features of an attention head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def key_heads(text: Any) -> int:
    """Attention heads with keys of their own: all of them in families without grouped queries."""
    return getattr(text, "num_key_value_heads", text.num_attention_heads)
