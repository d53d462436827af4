"""How long a step may take on a card: arithmetic from data sheets."""

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
"""Share of its mean length that a completion is taken to hold in the KV cache. With it, a choice of
the number of sequences at a time needs a fifth fewer steps of decoding than with 1
(docs/results.md)."""
LORA_COST = 1.25
"""Time of decoding with a separate adapter, as a multiple of that without; 1.25 to 2 were reported
(docs/cards.md)."""
FUSED_4_BITS = 32
"""Sequences at a time up to which bitsandbytes multiplies by 4-bit weights as they are. For more it
writes them out in 16 bits and reads them again."""
OFF_BY = 1.5
"""How far a guess may well be off, up or down, as a factor."""
COMPILED = 0.8
"""Time of training with `train.compile`, as a share of that without: 0.75 to 0.84 were reported."""
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
    """Seconds of a step, rollouts and updates: each step of decoding gives every sequence one token
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
    # One pass before the first update, forward, backward (without the base's gradient), and what is
    # recomputed.
    passes = 3 + checkpointed_layers(train.gradient_checkpointing, layers) / layers
    operations = count * (prompt + length) * 2 * sum(sizes.matrices) * passes
    training = operations / (card.busy * card.flops) * (COMPILED if train.compile else 1)
    return decoding + training


def time_range(seconds: float) -> str:
    """What a guess at a time may well be, in words."""
    low, high = seconds / OFF_BY, seconds * OFF_BY
    for unit, length in (("h", 3600), ("min", 60), ("s", 1)):
        if low >= 2 * length or unit == "s":
            break
    return f"{low / length:.0f} to {high / length:.0f} {unit}"
