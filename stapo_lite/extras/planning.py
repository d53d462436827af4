"""Does a run fit a card? An estimate from the model's config alone; nothing is loaded.

A run measures its memory itself (`training/memory.py`). This estimate is for choosing a card.
"""

from stapo_lite.config import Config
from stapo_lite.model.sizes import GIB, count_activations, count_sizes
from stapo_lite.training.memory import (
    MARGIN,
    UPDATE_BYTES,
    VALUE_BYTES,
    MemorySetting,
    kept_adapters,
)

RESERVED = int(2.5 * GIB)
"""CUDA, vLLM's activations and its graphs: 1.9 GiB with Qwen3-1.7B on an H100, 2.7 with 8B."""


def plan(config: Config, gib: float) -> str:
    """A table in GiB for trainer and vLLM on one card, with one base for both.

    Args:
        gib: memory of the card.
    """
    card = int(gib * GIB)
    sizes = count_sizes(config)
    always = sizes.base + VALUE_BYTES * sizes.adapter * kept_adapters(config)
    room = card - always - RESERVED - int(MARGIN * card)
    longest = config.max_sequence_length
    sequences = max(0, room) / (sizes.cached_sequence + longest * sizes.cached_token)
    rows = {
        "GiB of base": sizes.base,
        "GiB of CUDA and vLLM, about": RESERVED,
        "GiB that rollouts have for their cache": room,
        "GiB of adapter and optimiser, in updates": (VALUE_BYTES + UPDATE_BYTES) * sizes.adapter,
    }
    tokens = max(config.max_sequence_length, 8192)
    for checkpointing in (False, True):
        setting = MemorySetting(False, checkpointing, tokens)
        rows[f"GiB for {setting}"] = count_activations(config, tokens, checkpointing)
    lines = [f"{name:<64}{size / GIB:6.2f}" for name, size in rows.items()]
    lines.append(
        f"The cache of rollouts holds {int(sequences * longest):,} tokens: "
        f"{sequences:.1f} of the longest sequences."
    )
    return "\n".join(lines)
