"""`memory: auto`: choose the memory keys that a config leaves open, for the memory of card and
host.

Two choices, each from a ladder of settings, where every rung takes more memory than the last:

    rollouts   as many concurrent sequences as the KV cache holds at a typical length
    update     offloaded activations; then more tokens per micro-batch; then fewer layers
               checkpointed; then still more tokens

vLLM sleeps during updates, unless the host cannot hold its weights and vLLM cannot read them again
(bitsandbytes). The trainer's base is parked during rollouts, which costs seconds a step, unless the
card holds a whole step's KV cache beside it. So more memory never means fewer sequences or tokens
at a time, more offloading, or more layers checkpointed.
"""

import bisect
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, reduce
from accelerate.utils.memory import clear_device_cache

from stapo_lite.config import Config, flatten, load_config
from stapo_lite.errors import InputError
from stapo_lite.extras.planning.plan import (
    CUDA_CONTEXT,
    GIB,
    Hardware,
    Plan,
    checkpointed_layers,
    make_plan,
)
from stapo_lite.extras.planning.speed import (
    FUSED_4_BITS,
    KNOWN_CARDS,
    MEAN_LENGTH,
    UNDER_WAY,
    Card,
    step_seconds,
    time_range,
)
from stapo_lite.machine import host_memory_left, on_wsl
from stapo_lite.model.loading import load_model_config

Choice = dict[str, Any]
"""Values of some of KEYS."""
UPDATE_KEYS = (
    "train.offload_activations",
    "train.max_tokens_per_microbatch",
    "train.gradient_checkpointing",
)
SHARE = "rollout.gpu_memory_utilization"
KEYS = ("train.park_trainer", "rollout.sleep_level", SHARE, "rollout.max_num_seqs", *UPDATE_KEYS)
"""What is chosen if a config leaves it open."""
MARGIN = 0.04
"""Share of the card that is left unplanned in both phases, for fragmentation in the allocators."""
MOST_SEQUENCES = 512
"""vLLM captures CUDA graphs up to this many; more at a time would save few reads of the weights."""
COMFORTABLE_TOKENS = 8192
"""Tokens of a micro-batch that keep a card busy; memory beyond that is better spent on keeping
activations."""
MOST_TOKENS = 65_536


def fit(config: Config, engine: str, going_on: Path | None, processes: int) -> Config:
    """Set the memory keys that the config leaves open, for the free memory of this machine. Without
    a GPU the config is returned as it is.

    Collective: all processes choose for the card with the least free memory.

    Args:
        engine: from `resolve_engine`.
        going_on: folder of a run resumed from a checkpoint: its choice is kept. None otherwise.

    Raises:
        InputError: nothing fits.
    """
    if config.memory == "off" or engine == "transformers" or not torch.cuda.is_available():
        return config
    if going_on is not None and (going_on / "config.yaml").exists():
        before = flatten(load_config(going_on / "config.yaml").model_dump())
        return apply(config, {key: before[key] for key in KEYS})
    if processes > 1:  # NCCL takes its buffers with the first collective
        reduce(torch.zeros(1, device="cuda"))
    # An earlier run in the same notebook may have left memory in caches.
    clear_device_cache(garbage_collection=True)
    if hasattr(torch.accelerator, "empty_host_cache"):  # not in torch 2.11
        torch.accelerator.empty_host_cache()
    here, total = memory_left()
    host = host_memory_left() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory, host = map(min, zip(*gather_object([(here, host)]), strict=True))
    model = load_model_config(config.model).get_text_config()
    cards = Hardware(memory, host, processes, host / 2 if on_wsl() else None)
    choice = choose(config, model, cards)
    if choice and os.environ.get("RANK", "0") == "0":
        chosen = apply_all(config, choice, model, cards)
        print(describe(chosen, make_plan(chosen, model, cards), model, cards))
    return apply(config, of_whole_card(choice, memory, total))


def fit_server(config: Config) -> Config:
    """Set the keys that the config leaves open, for a server on this machine: on a GPU, vLLM gets
    all free memory of the card that has the least.

    Raises:
        InputError: that is not enough.
    """
    if config.memory == "off" or not torch.cuda.is_available():
        return config
    memory, total = min(map(memory_left, range(torch.cuda.device_count())))
    model, cards = load_model_config(config.model).get_text_config(), Hardware(memory)
    choice = choose_for_server(config, model, cards)
    for problem in make_plan(apply(config, choice), model, cards).problems:
        if problem.startswith("rollouts"):
            raise InputError(
                f"{problem}: choose a larger card, shorter completions or rollout.quantization"
            )
    config = apply(config, of_whole_card(choice, memory, total))
    share, count = config.rollout.gpu_memory_utilization, config.rollout.max_num_seqs
    print(
        f"card of {memory / GIB:.1f} GiB: vLLM takes {share:.0%} of the whole, {count} sequences "
        "at a time"
    )
    return config


def memory_left(card: int | None = None) -> tuple[int, int]:
    """Free and total bytes of a card (by default the current one). This process's CUDA context
    counts as free."""
    free, total = torch.cuda.mem_get_info(card)
    return min(total, free + CUDA_CONTEXT), total


def of_whole_card(choice: Choice, memory: int, total: int) -> Choice:
    """The choice with vLLM's share converted from free memory to the whole card."""
    if SHARE not in choice:
        return choice
    return choice | {SHARE: math.floor(100 * choice[SHARE] * memory / total) / 100}


def choose_for_server(config: Config, model: Any, cards: Hardware) -> Choice:
    """Values for vLLM's keys if it has the card to itself; none with `memory: off`."""
    if config.memory == "off":
        return {}
    return choose_sequences({"rollout.sleep_level": 1}, config, model, Hardware(cards.gpu_memory))


def choose(config: Config, model: Any, cards: Hardware) -> Choice:
    """Values for the memory keys that a config leaves open; none with `memory: off`.

    Args:
        model: the transformers config of the decoder.

    Raises:
        InputError: nothing fits; the message names changes that would help.
    """
    choice = find(config, model, cards)
    if choice is None:
        changes = "; or ".join(remedies(config, model, cards)) or "a smaller model"
        there = f"a card of {cards.gpu_memory / GIB:.1f} GiB"
        if cards.host_memory is not None:
            there += f" and {cards.host_memory / GIB:.0f} GiB of host memory"
        raise InputError(f"the run does not fit {there}; it would with {changes}")
    return choice


def left_open(config: Config) -> list[str]:
    """Keys (of KEYS) that the user has not given."""
    given = flatten(config.model_dump(exclude_unset=True))
    return [key for key in KEYS if key not in given]


def find(config: Config, model: Any, cards: Hardware) -> Choice | None:
    """The best choice that fits, or None if none does. It is empty with `memory: off`, and if the
    config gives all keys."""
    if config.memory == "off" or not left_open(config):
        return {}
    ladder = update_ladder(config, model, cards)
    completions = config.train.batch_size * config.rollout.num_generations
    if config.rollout.engine == "server":  # servers queue the rest
        choice = {"rollout.max_num_seqs": min(MOST_SEQUENCES, completions)}
        return climb(ladder, choice, config, model, cards)
    least = ladder[min(1, len(ladder) - 1)]
    tokens = completions // cards.processes * config.max_sequence_length
    for park, sleep, only_with_room in parking_options(config):
        parking = {"train.park_trainer": park, "rollout.sleep_level": sleep}
        choice = choose_sequences(parking | least, config, model, cards)
        if only_with_room and make_plan(apply(config, choice), model, cards).kv_tokens < tokens:
            continue
        rungs = ladder if sleep else [least]  # an engine that stays awake takes the rest
        found = climb(rungs, choice, config, model, cards)
        if found is not None:
            return found
    return None


def parking_options(config: Config) -> list[tuple[bool, int, bool]]:
    """Where the trainer's base and vLLM's weights wait while the other works, fastest first. A
    parked base is not shared.

    Returns:
        `train.park_trainer`; `rollout.sleep_level`; whether the option is only for cards whose KV
        cache holds all sequences of a step at their longest.
    """
    options = [
        (False, 1, not config.may_share_base),
        (True, 1, False),
        (True, 2, False),  # if the host holds only one copy
        (False, 1, False),
        (False, 2, False),
        (False, 0, False),  # if it holds none, and vLLM cannot read them again
    ]
    if config.rollout.quantization != "bitsandbytes":  # whose weights vLLM cannot read again
        return options
    return [option for option in options if option[1] != 2]


def climb(
    ladder: list[Choice], choice: Choice, config: Config, model: Any, cards: Hardware
) -> Choice | None:
    """The choice with the highest rung of the ladder that fits, or None if none does. Above a rung
    that does not fit, none fits, except that the lowest may be too large for the host, which holds
    its activations."""
    serving = config.rollout.engine == "server"

    def too_much(rung: Choice) -> bool:
        planned = make_plan(apply(config, choice | rung), model, cards)
        for problem in planned.problems:
            if not serving or not problem.startswith("rollouts"):  # servers have their own cards
                return True
        return sum(planned.update.values()) > (1 - MARGIN) * cards.gpu_memory

    if too_much(ladder[0]):
        ladder = ladder[1:]
    fitting = bisect.bisect(ladder, False, key=too_much)
    return choice | ladder[fitting - 1] if fitting else None


def choose_sequences(choice: Choice, config: Config, model: Any, cards: Hardware) -> Choice:
    """Give vLLM the rest of the card, and as many sequences as its KV cache holds at the length
    that UNDER_WAY assumes. If they grow longer, vLLM preempts and recomputes some."""
    planned, rollout = make_plan(apply(config, choice), model, cards), config.rollout
    trainer = trainer_bytes(planned.rollout)
    if not choice["rollout.sleep_level"]:
        trainer = max(trainer, trainer_bytes(planned.update))
    share = math.floor(100 * (1 - MARGIN - trainer / cards.gpu_memory)) / 100
    choice = choice | {SHARE: max(0.01, share)}
    completion = UNDER_WAY * MEAN_LENGTH * rollout.max_completion_length
    # A group's prompt is in the cache once.
    length = config.data.max_prompt_length / rollout.num_generations + completion

    def too_many(count: int) -> bool:
        with_count = apply(config, choice | {"rollout.max_num_seqs": count})
        return make_plan(with_count, model, cards).kv_tokens < count * length

    group = rollout.num_generations  # vLLM admits whole groups
    most = min(MOST_SEQUENCES, config.train.batch_size * group // cards.processes)
    counts = [group, *range(group + 8, most, 8), max(group, most)]
    fitting = bisect.bisect(counts, False, key=too_many)
    options = [counts[max(0, fitting - 1)]]
    if rollout.quantization == "bitsandbytes" and group <= FUSED_4_BITS < options[0]:
        options.append(FUSED_4_BITS)  # fewer may be faster

    def seconds(count: int) -> float:
        with_count = apply(config, choice | {"rollout.max_num_seqs": count})
        return guess_seconds(with_count, model, cards)

    return choice | {"rollout.max_num_seqs": min(options, key=seconds)}


def trainer_bytes(phase: dict[str, int]) -> int:
    """Bytes on the card in a phase, without vLLM's."""
    return sum(size for name, size in phase.items() if not name.startswith("vLLM"))


def update_ladder(config: Config, model: Any, cards: Hardware) -> list[Choice]:
    """Rungs of the update ladder, least memory first."""
    train, longest = config.train, config.max_sequence_length
    completions = train.mini_batch_size * config.rollout.num_generations / cards.processes
    most = max(longest, min(math.ceil(completions) * longest, MOST_TOKENS))
    enough = max(longest, min(most, COMFORTABLE_TOKENS))
    step = max(256, enough // 16)
    values: list[tuple[bool, int, bool | int]] = [(True, longest, True)]
    values += [(False, tokens, True) for tokens in [*range(longest, enough, step), enough]]
    values += [(False, enough, count) for count in range(model.num_hidden_layers - 1, 0, -1)]
    values += [(False, tokens, False) for tokens in [*range(enough, most, step), most]]
    ladder = []
    for value in values:
        rung = dict(zip(UPDATE_KEYS, value, strict=True))
        applied = apply(config, rung).train
        if applied.gradient_checkpointing is True or not applied.offload_activations:
            ladder.append(rung)
    return ladder


def apply(config: Config, choice: Choice) -> Config:
    """Set the keys of a choice that the config leaves open."""
    for key in choice.keys() & left_open(config):
        section, name = key.split(".")
        changed = getattr(config, section).model_copy(update={name: choice[key]})
        config = config.model_copy(update={section: changed})
    return config


def apply_all(config: Config, choice: Choice, model: Any, cards: Hardware) -> Config:
    """Like `apply`; with servers, also set what they would choose on such a card."""
    if config.rollout.engine == "server":
        config = apply(config, choose_for_server(config, model, cards))
    return apply(config, choice)


def remedies(config: Config, model: Any, cards: Hardware) -> Iterator[str]:
    """Yield changes that would each make the run fit; the smallest of each kind."""
    tree = config.model_dump(exclude_unset=True)

    def fits(*overrides: str, tree: dict[str, Any] = tree) -> bool:
        try:
            return find(load_config(tree, list(overrides)), model, cards) is not None
        except InputError:  # conflicting values
            return False

    given = [key for key in KEYS if key not in left_open(config)]
    without = config.model_dump(exclude_unset=True)
    for key in given:
        section, name = key.split(".")
        del without[section][name]
    if given and fits(tree=without):
        yield f"these keys left open: {', '.join(given)}"
    more = cards._replace(host_memory=None, pinned_memory=None)
    if cards.host_memory is not None and find(config, model, more) is not None:
        yield "more host memory"
    four_bits = ["quantization=nf4", "rollout.quantization=bitsandbytes"]
    if not config.quantization and fits(*four_bits):
        yield " ".join(four_bits)
    for eighths in range(7, 0, -1):
        length = config.rollout.max_completion_length * eighths // 8
        shorter = f"rollout.max_completion_length={length}"
        if fits(shorter):
            yield shorter
            break
    for card in sorted(KNOWN_CARDS.values()):
        larger = cards._replace(gpu_memory=card.memory)
        if card.memory > cards.gpu_memory and find(config, model, larger) is not None:
            yield f"a card of {card.memory / GIB:.1f} GiB"
            break


def nearest_card(cards: Hardware) -> tuple[str, Card]:
    """Name and data of the known card with the nearest memory size."""
    return min(KNOWN_CARDS.items(), key=lambda item: abs(item[1].memory - cards.gpu_memory))


def guess_seconds(config: Config, model: Any, cards: Hardware) -> float:
    """Seconds of a step on the nearest known card."""
    planned, (_, card) = make_plan(config, model, cards), nearest_card(cards)
    return step_seconds(config, model, planned, card, cards.processes)


def describe(config: Config, plan: Plan, model: Any, cards: Hardware) -> str:
    """Predicted memory on card and host and estimated time, in five lines."""
    train, rollout = config.train, config.rollout
    sampling, updating, host = (
        sum(parts.values()) / GIB for parts in (plan.rollout, plan.update, plan.host)
    )
    layers = model.num_hidden_layers
    checkpointed = checkpointed_layers(train.gradient_checkpointing, layers)
    name, card = nearest_card(cards)
    seconds = step_seconds(config, model, plan, card, cards.processes)
    whole = time_range(seconds * train.max_steps)
    kept = {"the trainer's base": train.park_trainer, "its activations": train.offload_activations}
    there = " and ".join(part for part, is_there in kept.items() if is_there)
    return f"""memory for a card of {cards.gpu_memory / GIB:.1f} GiB, predicted
  rollouts: {sampling:.1f} GiB; {rollout.max_num_seqs} sequences at a time in a KV cache of {plan.kv_tokens:,} tokens
  update: {updating:.1f} GiB; {config.largest_microbatch:,} tokens at a time, {checkpointed} of {layers} layers \
checkpointed
  host: {host:.1f} GiB{f" with {there}" if there else ""}
  time ({name}): {time_range(seconds)} a step, {whole} for {train.max_steps}, if completions are a third of the longest"""  # noqa: E501
