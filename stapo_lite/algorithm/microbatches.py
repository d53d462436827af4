"""Pack completions into tensors, and split them into micro-batches under a token budget with little
padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from stapo_lite.algorithm.s2t import random_scores
from stapo_lite.types import Completion, TokenStatistics

T = TypeVar("T")


@dataclass
class MiniBatch:
    """One process's share of a mini-batch: completions, and what is known of their tokens before an
    update."""

    completions: list[Completion]
    starts: list[int]
    """B + 1 offsets into [N]: where each completion's tokens start, and N."""
    rows: Tensor
    """[N] int64: the completion that each token belongs to."""
    advantages: Tensor
    """[N] fp32: the advantage of the token's completion, plus what a teacher adds."""
    loss_mask: Tensor
    """[N] bool: the model wrote the token."""
    rollout_logprobs: Tensor
    """[N] fp32"""
    old: TokenStatistics | None = None
    """Statistics of the policy before the step's first update, [N]; 0 for tokens whose statistics
    no update needs. None for the step's first mini-batch: the old policy is then the current
    one."""

    def select(self, rows: Sequence[int]) -> list[Completion]:
        """The completions of these rows."""
        return [self.completions[row] for row in rows]

    def places(self, rows: Sequence[int]) -> Tensor:
        """Indices into [N] of these rows' tokens, row by row; [n] int64."""
        parts = [torch.zeros(0, dtype=torch.int64)]
        for row in rows:
            parts.append(torch.arange(self.starts[row], self.starts[row + 1]))
        return send(torch.cat(parts), self.rows.device)

    def random_scores(self, salts: Sequence[int]) -> Tensor:
        """Random numbers in [0, 1) for all tokens, [N] fp32.

        Args:
            salts: one for each completion.
        """
        pairs = zip(self.completions, salts, strict=True)
        scores = [random_scores(completion.token_ids, salt) for completion, salt in pairs]
        return send(torch.cat([torch.zeros(0), *scores]), self.rows.device)


def pack(completions: Sequence[Completion], device: torch.device | str) -> MiniBatch:
    """Put the tokens of all completions one after the other, on the device."""
    starts = [0]
    rows: list[int] = []
    advantages: list[float] = []
    loss_mask: list[bool] = []
    rollout_logprobs: list[float] = []
    for row, completion in enumerate(completions):
        length = len(completion.token_ids)
        starts.append(starts[-1] + length)
        rows += [row] * length
        advantages += [completion.advantage] * length
        loss_mask += completion.loss_mask or [True] * length
        rollout_logprobs += completion.rollout_logprobs
    return MiniBatch(
        list(completions),
        starts,
        rows=send(torch.tensor(rows, dtype=torch.int64), device),
        advantages=send(torch.tensor(advantages, dtype=torch.float32), device),
        loss_mask=send(torch.tensor(loss_mask, dtype=torch.bool), device),
        rollout_logprobs=send(torch.tensor(rollout_logprobs, dtype=torch.float32), device),
    )


def send(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy from host to device; for a GPU from pinned memory, so that the host does not wait."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


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
    ordered = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    # For the best split of ordered[i:]: its cost, and where its first batch ends.
    cost = [0.0] * (len(ordered) + 1)
    end = [0] * len(ordered)
    for start in reversed(range(len(ordered))):
        longest = lengths[ordered[start]]
        most = max(1, max_tokens // longest)
        cuts = []
        for stop in range(start + 1, min(start + most, len(ordered)) + 1):
            cuts.append((max_tokens / 16 + (stop - start) * longest + cost[stop], stop))
        cost[start], end[start] = min(cuts)
    batches = []
    start = 0
    while start < len(ordered):
        batches.append(ordered[start : end[start]])
        start = end[start]
    return batches


def deal(work: Sequence[float], parts: int) -> list[list[int]]:
    """Distribute items so that each part has about the same work: deal them out by size, each to
    the part with the least work so far.

    Returns:
        The indices of each part, in ascending order.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        min(shares, key=lambda share: sum(work[i] for i in share)).append(index)
    return [sorted(share) for share in shares]


def cut_evenly(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Cut items into the fewest runs of at most `most` items, with lengths that differ by at most
    one: the 17 groups that dynamic sampling may leave become 8 and 9, not 16 and an update on a
    single group."""
    count = math.ceil(len(items) / most)
    cuts = [len(items) * i // max(1, count) for i in range(count + 1)]
    return [items[start:end] for start, end in pairwise(cuts)]
