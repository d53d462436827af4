"""Estimate how long a step takes on a card, from data sheets."""

from typing import Any, NamedTuple

from stapo_lite.config import Config
from stapo_lite.extras.planning.plan import (
    GIB,
    Plan,
    as_json,
    checkpointed_layers,
    kv_bytes,
    model_sizes,
)

MEAN_LENGTH = 1 / 3
"""Mean length of a completion, as a share of `max_completion_length`: an assumption."""
MEAN_PROMPT = 1 / 4
"""Mean length of a prompt, as a share of `max_prompt_length`: an assumption."""
UNDER_WAY = 1 / 2
"""Share of its mean length that a completion is assumed to hold in the KV cache. With this, the
chosen number of sequences needs a fifth fewer decoding steps than with 1 (docs/results.md)."""
LORA_COST = 1.25
"""Decoding time with a separate adapter, relative to without; 1.25 to 2 were reported
(docs/cards.md)."""
FUSED_4_BITS = 32
"""Most sequences at a time for which bitsandbytes multiplies by 4-bit weights directly. For more,
it writes them out in 16 bits first and reads them again."""
OFF_BY = 1.5
"""Factor by which an estimate may be off, up or down."""
COMPILED = 0.8
"""Training time with `train.compile`, relative to without; 0.75 to 0.84 were reported."""
READING = 0.6
"""Share of its bandwidth at which vLLM reads weights and cache."""


class Card(NamedTuple):
    """A card by its data sheet; memory as its driver reports it."""

    memory: int
    """Bytes."""
    flops: float
    """Dense 16-bit operations (FLOPs) per second, by the data sheet; a multiplication and an
    addition are two."""
    bandwidth: float
    """Bytes a second."""
    busy: float = 0.35
    """Share of its peak that the card computes at while it trains."""


KNOWN_CARDS = {
    "T4": Card(int(14.6 * GIB), 65e12, 0.32e12),
    "A10": Card(int(21.9 * GIB), 125e12, 0.6e12),
    "RTX 4090": Card(int(23.5 * GIB), 165e12, 1.01e12, busy=0.65),
    "RTX 5090": Card(int(31.3 * GIB), 210e12, 1.79e12, busy=0.65),
    "L40S": Card(int(44.4 * GIB), 362e12, 0.86e12),
    "A100": Card(int(79.1 * GIB), 312e12, 2.0e12),
    "H100": Card(int(79.2 * GIB), 990e12, 3.35e12),
    "H200": Card(int(139.7 * GIB), 990e12, 4.8e12),
}


def step_seconds(config: Config, model: Any, plan: Plan, card: Card, processes: int = 1) -> float:
    """Seconds of a step, rollouts and updates: each decoding step adds a token to every sequence
    and reads weights and KV cache once; training takes two operations per weight and token in each
    pass. A group's prompt is in the cache once."""
    rollout, train, sizes = config.rollout, config.train, model_sizes(as_json(model))
    count = train.batch_size * rollout.num_generations / processes
    length = MEAN_LENGTH * rollout.max_completion_length
    prompt = MEAN_PROMPT * config.data.max_prompt_length
    held = prompt / rollout.num_generations + UNDER_WAY * length
    at_once = max(1.0, min(count, rollout.max_num_seqs, plan.kv_tokens / held))
    cache = at_once * (prompt + UNDER_WAY * length) * sizes.kv_per_token * kv_bytes(config)
    reads = plan.rollout["vLLM: weights"] + cache
    if rollout.quantization == "bitsandbytes" and at_once > FUSED_4_BITS:
        reads += 2 * config.bytes_per_value * sum(sizes.matrices)
    decoding = LORA_COST * count / at_once * length * reads / (READING * card.bandwidth)
    layers = model.num_hidden_layers
    # Statistics before the first update, forward, backward (no weight gradients of the base), and
    # recomputation.
    passes = 3 + checkpointed_layers(train.gradient_checkpointing, layers) / layers
    operations = count * (prompt + length) * 2 * sum(sizes.matrices) * passes
    training = operations / (card.busy * card.flops) * (COMPILED if train.compile else 1)
    return decoding + training


def time_range(seconds: float) -> str:
    """An estimated time as a range, in words."""
    low, high = seconds / OFF_BY, seconds * OFF_BY
    for unit, length in (("h", 3600), ("min", 60), ("s", 1)):
        if low >= 2 * length or unit == "s":
            break
    return f"{low / length:.0f} to {high / length:.0f} {unit}"
