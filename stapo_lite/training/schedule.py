"""What follows from a step's number alone: its learning rate, and its prompts and their seeds. A
resumed run therefore needs no state for them but how far it has come."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from stapo_lite.config import Train
from stapo_lite.types import Prompt, derived_seed


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of all updates of a step (steps from 0); it is never 0.

    Warm-up counts steps, as in the paper: veRL's scheduler advances once per batch of rollouts,
    whatever its mini-batches. transformers' schedules begin at 0, which would waste the first
    batch.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    # After the warm-up: the share of the steps that is left, from 1 down to just above 0.
    rest = (train.max_steps - step) / (train.max_steps - train.warmup_steps)
    factor = {"constant": 1.0, "linear": rest, "cosine": (1 - math.cos(math.pi * rest)) / 2}
    return train.learning_rate * factor[train.lr_scheduler_type]


class PromptShare(NamedTuple):
    """One process's part of the next prompts."""

    places: list[int]
    """Positions among the next prompts of all processes."""
    prompts: list[Prompt]
    seeds: list[int]


def share_of_prompts(
    prompts: Sequence[Prompt], seed: int, start: int, count: int, process: int, processes: int
) -> PromptShare:
    """One process's part of the draws `start` to `start + count - 1`. Neither order nor seeds
    depend on the number of processes.

    Args:
        prompts: the data set's.
        seed: the run's.
        process: number of this process, below `processes`.
    """
    order = prompt_order(len(prompts), seed, start, count)
    # Deal the draws out in turn. A draw's number decides its process, its prompt and its seed.
    places = [place for place in range(count) if (start + place) % processes == process]
    seeds = [derived_seed(seed, start + place) for place in places]
    return PromptShare(places, [prompts[order[place]] for place in places], seeds)


def prompt_order(num_prompts: int, seed: int, position: int, count: int) -> list[int]:
    """Indices of draws `position` to `position + count - 1`: each epoch a fresh permutation.

    Depends only on its arguments, so that a resumed run needs only its position.
    """
    first = position // num_prompts
    last = (position + count) // num_prompts
    order: list[int] = []
    for epoch in range(first, last + 1):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order += torch.randperm(num_prompts, generator=generator).tolist()
    start = position - first * num_prompts
    return order[start : start + count]
