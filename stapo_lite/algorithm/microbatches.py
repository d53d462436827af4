"""Completions as packed tensors, and their cut into micro-batches under a token budget, with little padding."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from stapo_lite.algorithm.s2t import random_scores
from stapo_lite.errors import RunError, out_of_memory
from stapo_lite.types import Completion, TokenStatistics

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class MiniBatch:
    """One process's share of a mini-batch: completions, and what is known of their tokens before an update."""

    completions: list[Completion]
    starts: list[int]
    """B + 1 places in [N]: where the tokens of each completion begin, and N."""
    rows: Tensor
    """[N] int64: the completion that each token belongs to."""
    advantages: Tensor
    """[N] fp32: that of the token's completion."""
    loss_mask: Tensor
    """[N] bool: the model wrote the token."""
    rollout_logprobs: Tensor
    """[N] fp32"""
    old: TokenStatistics | None = None
    """Statistics of the policy before the step's first update, [N], 0 where no update needs them. None at that first
    update itself, where it is the policy now: every ratio is 1, and its gradient that of the log-probability."""

    def tokens(self, rows: Sequence[int]) -> Tensor:
        """Places in [N] of the tokens of some completions, in the order of these; [n] int64."""
        places = [torch.arange(self.starts[row], self.starts[row + 1]) for row in rows]
        return send(torch.cat([torch.zeros(0, dtype=torch.int64), *places]), self.rows.device)

    def random_scores(self, salts: Sequence[int]) -> Tensor:
        """Random numbers for all tokens, [N] fp32 in [0, 1), from those of each completion and its salt."""
        scores = [random_scores(c.token_ids, salt) for c, salt in zip(self.completions, salts, strict=True)]
        return send(torch.cat([torch.zeros(0), *scores]), self.rows.device)

    def select(self, rows: Sequence[int]) -> list[Completion]:
        """Some of the completions."""
        return [self.completions[row] for row in rows]


def pack(completions: Sequence[Completion], device: torch.device | str) -> MiniBatch:
    """Put the tokens of completions one after the other, on the device."""
    lengths = [len(c.token_ids) for c in completions]
    written = [torch.tensor(c.loss_mask or [True]).expand(n) for c, n in zip(completions, lengths, strict=True)]
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return MiniBatch(
        list(completions),
        starts=[0, *itertools.accumulate(lengths)],
        rows=send(rows, device),
        advantages=send(torch.tensor([c.advantage for c in completions], dtype=torch.float32)[rows], device),
        loss_mask=send(torch.cat([torch.zeros(0, dtype=torch.bool), *written]), device),
        rollout_logprobs=send(torch.tensor(list(itertools.chain(*(c.rollout_logprobs for c in completions)))), device),
    )


def send(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy from the host to the device; to a GPU from pinned memory, so that the host does not wait for the copy."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class TokenBudget:
    """The most tokens of a micro-batch, padding included; halved each time that memory runs out.

    Attributes:
        halvings: how often the budget was halved; it is never raised again.
    """

    def __init__(self, tokens: int, halvings: int = 0):
        self._tokens, self.halvings = tokens, halvings

    @property
    def tokens(self) -> int:
        return max(1, self._tokens >> self.halvings)

    def fit(self, batch: MiniBatch, rows: Sequence[int], work: Callable[[list[list[int]]], T]) -> T:
        """Do `work` on completions in micro-batches, from the start again in smaller ones where memory runs out.

        Args:
            rows: of the completions in the mini-batch.
            work: gets the rows of each micro-batch.

        Raises:
            RunError: a single sequence is too much.
        """
        lengths = [sequence_length(completion) for completion in batch.select(rows)]
        while True:
            micro_batches = [[rows[i] for i in part] for part in split_by_tokens(lengths, self.tokens)]
            try:
                return work(micro_batches)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if all(len(part) == 1 for part in micro_batches):
                    raise RunError(
                        "memory ran out on a single sequence: lower rollout.max_completion_length or "
                        "train.lm_head_memory_gb (see `stapo plan`), and continue with --resume --force"
                    ) from error
            clear_device_cache(garbage_collection=True)  # only here is the error gone, and with it what it held
            self.halvings += 1
            logger.warning("memory ran out: from now on micro-batches have at most %d tokens", self.tokens)


def sequence_length(completion: Completion) -> int:
    """Tokens of prompt and completion."""
    return len(completion.prompt.token_ids) + len(completion.token_ids)


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences of similar length so that rows x longest stays within `max_tokens`.

    The cheapest cut of the sequences in order of length, where a micro-batch costs its tokens, padding included, and
    a sixteenth of `max_tokens` for being run at all (dynamic programming). Longest first: the micro-batch that needs
    the most memory runs first. A single sequence longer than the budget gets a micro-batch of its own.

    Returns:
        The indices of each micro-batch's sequences.
    """
    ordered = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    cost, end = [0.0] * (len(ordered) + 1), [0] * len(ordered)  # of the best cut from here on, and of its first batch
    for start in reversed(range(len(ordered))):
        longest = lengths[ordered[start]]
        stops = range(start + 1, min(len(ordered), start + max(1, max_tokens // max(1, longest))) + 1)
        cost[start], end[start] = min((max_tokens / 16 + (stop - start) * longest + cost[stop], stop) for stop in stops)
    batches, start = [], 0
    while start < len(ordered):
        batches.append(ordered[start : end[start]])
        start = end[start]
    return batches


def split_evenly(work: Sequence[float], parts: int) -> list[list[int]]:
    """Distribute items so that each part has about the same work: the largest first, to the part with the least so far.

    Returns:
        The indices of each part, in ascending order.
    """
    loads, shares = [0.0] * parts, [[] for _ in range(parts)]  # type: tuple[list[float], list[list[int]]]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        least = min(range(parts), key=loads.__getitem__)
        loads[least] += work[index]
        shares[least].append(index)
    return [sorted(share) for share in shares]


def cut_evenly(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Cut items into as few runs of at most `most` as possible, whose lengths differ by one at most. Else the batch
    that dynamic sampling leaves could end in a mini-batch of one group, which would get a whole update."""
    count = -(-len(items) // most)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]
