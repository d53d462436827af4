"""What would shorten a run: changes, the step time that would remain, and their price."""

from collections.abc import Iterator
from typing import Any

from stapo_lite.config import Config, Train, load_config
from stapo_lite.errors import InputError
from stapo_lite.extras.planning.choice import apply_all, find, guess_seconds
from stapo_lite.extras.planning.plan import Hardware

WORTH_IT = 0.95
"""A change that leaves more than this share of a step's time is not listed."""


def changes(config: Config) -> Iterator[tuple[list[str], str]]:
    """Overrides that may shorten a step, and what each costs."""
    train, rollout = config.train, config.rollout
    half = rollout.max_completion_length // 2
    yield [f"rollout.max_completion_length={half}"], "cuts longer answers off"
    yield smaller_batch(train, 2), "noisier gradients"
    if config.quantization is None and rollout.quantization is None:
        four_bits = ["quantization=nf4", "rollout.quantization=bitsandbytes"]
        yield four_bits, "rounds the base's weights"
        eight_bits = ["quantization=fp8", "rollout.quantization=fp8"]
        yield eight_bits, "rounds them less; from RTX 40 on, not tried on a card yet"
    yield ["train.compile=true"], "compiles the layers, which takes minutes at the start"
    cache = ["rollout.vllm.kv_cache_dtype=fp8", "rollout.vllm.attention_backend=TRITON_ATTN"]
    yield cache, "rounds keys and values; from RTX 40 on, not tried on a card yet"


def smaller_batch(train: Train, divisor: int) -> list[str]:
    """Overrides that divide the batch size but keep the number of updates per step."""
    mini_batch = max(1, train.mini_batch_size // divisor)
    updates = train.batch_size // train.mini_batch_size
    return [
        f"train.batch_size={mini_batch * updates}",
        f"train.mini_batch_size={mini_batch}",
    ]


def levers(config: Config, model: Any, cards: Hardware) -> list[str]:
    """Changes that shorten a step, each on its own, as lines; the most effective first.

    Args:
        config: as given, before memory keys are chosen.
        model: the transformers config of the decoder.
    """
    tree = config.model_dump(exclude_unset=True)
    before, shares = seconds(config, model, cards), []
    for overrides, price in changes(config):
        try:
            after = seconds(load_config(tree, overrides), model, cards)
        except InputError:  # conflicting values
            continue
        if before and after and after / before < WORTH_IT:
            shares.append((after / before, f"{' '.join(overrides)} ({price})"))
    return [f"to {share:.0%}: {change}" for share, change in sorted(shares)]


def within(hours: float, config: Config, model: Any, cards: Hardware) -> str:
    """What fits into so many hours, as a line: the number of steps, and, if that is too few, the
    largest batch with which all steps fit.

    Args:
        config: as given, before memory keys are chosen.
        model: the transformers config of the decoder.
    """
    tree, train = config.model_dump(exclude_unset=True), config.train

    def steps(overrides: list[str]) -> int:
        try:
            step = seconds(load_config(tree, overrides), model, cards)
        except InputError:  # a batch with fewer prompts than processes
            return 0
        return 0 if step is None else int(hours * 3600 / step)

    as_given = steps([])
    line = f"{hours:g} hours: train.max_steps={as_given}"
    if as_given >= train.max_steps:
        return line
    for halvings in range(1, train.mini_batch_size.bit_length()):
        batch = smaller_batch(train, 2**halvings)
        if steps(batch) >= train.max_steps:
            return f"{line}, or {train.max_steps} with {' '.join(batch)}"
    return line


def seconds(config: Config, model: Any, cards: Hardware) -> float | None:
    """Seconds of a step with the best choice; None if nothing fits."""
    choice = find(config, model, cards)
    if choice is None:
        return None
    return guess_seconds(apply_all(config, choice, model, cards), model, cards)
