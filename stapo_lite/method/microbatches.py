"""Cut a step's completions into mini-batches, these into the processes' shares, and shares into
micro-batches under a token budget with little padding."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from stapo_lite.config import Objective
from stapo_lite.method.tokens import decides_masks, is_remembered, is_trained
from stapo_lite.types import Completion

T = TypeVar("T")


def sequence_length(completion: Completion) -> int:
    """Tokens of prompt and completion."""
    return len(completion.prompt.token_ids) + len(completion.token_ids)


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences of similar length so that rows x longest stays within `max_tokens`.

    Sorts by length and finds the cheapest split by dynamic programming: a micro-batch costs its
    tokens, padding included, plus a fixed `max_tokens / 16`. The longest come first, so that memory
    runs out at once if it does. A single sequence longer than the budget gets a micro-batch of its
    own.

    Returns:
        The indices of each micro-batch's sequences.
    """
    # In this order a micro-batch of the best split is a run of neighbours.
    ordered = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    # For the best split of ordered[i:]: its cost, and where its first micro-batch ends. Begin at
    # the end, where nothing is left to split.
    cost = [0.0] * (len(ordered) + 1)
    end = [0] * len(ordered)
    for start in reversed(range(len(ordered))):
        longest = lengths[ordered[start]]
        max_rows = max(1, max_tokens // longest)
        cuts = []
        for stop in range(start + 1, min(start + max_rows, len(ordered)) + 1):
            cuts.append((max_tokens / 16 + (stop - start) * longest + cost[stop], stop))
        cost[start], end[start] = min(cuts)
    # Follow the best cuts from the beginning.
    batches = []
    start = 0
    while start < len(ordered):
        batches.append(ordered[start : end[start]])
        start = end[start]
    return batches


def count_work(completions: Sequence[Completion], objective: Objective, first: bool) -> list[int]:
    """The work of each completion of a mini-batch: its tokens, prompt included, times its passes
    through the decoder. Training takes 4 (forward, recomputation of checkpointed layers, and
    backward, which counts twice), and measuring beforehand 1.

    Args:
        first: whether it is the step's first mini-batch, which is measured for its masks only.
    """
    is_measured = decides_masks if first else is_remembered
    work = []
    for completion in completions:
        passes = 0
        if is_trained(completion, objective):
            passes += 4
        if is_measured(completion, objective):
            passes += 1
        work.append(passes * sequence_length(completion))
    return work


def deal(work: Sequence[float], parts: int) -> list[list[int]]:
    """Distribute items so that each part has about the same work: deal them out by size, each to
    the part with the least work so far.

    Returns:
        The indices of each part, in ascending order.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    # The largest first, so that small ones level the rest out.
    for index in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        lightest = min(shares, key=lambda share: sum(work[i] for i in share))
        lightest.append(index)
    return [sorted(share) for share in shares]


def cut_evenly(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Cut items into the fewest runs of at most `most` items, with lengths that differ by at most
    one: the 17 groups that dynamic sampling may leave become 8 and 9, not 16 and an update on a
    single group."""
    count = math.ceil(len(items) / most)
    cuts = [len(items) * i // max(1, count) for i in range(count + 1)]
    return [items[start:end] for start, end in pairwise(cuts)]
