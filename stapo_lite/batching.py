"""Completions -> micro-batches under a token budget, with little padding."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from stapo_lite.config import RunError
from stapo_lite.types import Completion, MicroBatch

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TokenBudget:
    """The most tokens of a micro-batch, padding included; half as many each time that they do not fit into memory.

    Args:
        in_step: where processes must run the same number of micro-batches: the largest of their numbers, from our own.
            Who has fewer gets empty ones, and none can go on alone where memory runs out.

    Attributes:
        halvings: so far; they last.
    """

    def __init__(self, tokens: int, halvings: int = 0, in_step: Callable[[int], int] | None = None):
        self._tokens, self.halvings, self._in_step = tokens, halvings, in_step

    @property
    def tokens(self) -> int:
        return max(1, self._tokens >> self.halvings)

    def fit(self, completions: Sequence[Completion], work: Callable[[list[list[Completion]]], T]) -> T:
        """`work` on the completions in micro-batches, from the start again in smaller ones where memory runs out.

        Raises:
            RunError: a single sequence is too much.
        """
        while True:
            micro_batches = split_by_tokens(completions, self.tokens)
            if self._in_step is not None:
                micro_batches += [[]] * (self._in_step(len(micro_batches)) - len(micro_batches))
            try:
                return work(micro_batches)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if self._in_step is not None:
                    raise RunError("memory ran out: lower train.max_tokens_per_microbatch, use --resume") from error
                if all(len(rows) == 1 for rows in micro_batches):
                    raise RunError(
                        "memory ran out on a single sequence: lower rollout.max_completion_length or "
                        "train.lm_head_memory_gb, or see what `python -m stapo_lite.plan` suggests"
                    ) from error
            clear_device_cache(garbage_collection=True)  # only here is the error gone, and with it what it held
            self.halvings += 1
            logger.warning("memory ran out: from now on micro-batches have at most %d tokens", self.tokens)


def sequence_length(completion: Completion) -> int:
    return len(completion.prompt.token_ids) + len(completion.token_ids)


def out_of_memory(error: RuntimeError) -> bool:
    """Of the device, or of the host; accelerate's check knows neither pinned memory's nor cuBLAS's wording."""
    kinds = ("cuda error: out of memory", "cublas_status_alloc_failed")  # vLLM writes Error where torch writes error
    return should_reduce_batch_size(error) or any(kind in str(error).lower() for kind in kinds)


def split_by_tokens(completions: Sequence[Completion], max_tokens: int) -> list[list[Completion]]:
    """Group sequences of similar length so that rows x longest stays within `max_tokens`.

    The cheapest cut of the sequences in order of length, where a micro-batch costs its tokens, padding included, and
    a sixteenth of `max_tokens` for being run at all (dynamic programming). Longest first: the micro-batch that needs
    the most memory runs first. A single sequence longer than the budget gets a micro-batch of its own.
    """
    ordered = sorted(completions, key=sequence_length, reverse=True)
    cost, end = [0.0] * (len(ordered) + 1), [0] * len(ordered)  # of the best cut from here on, and of its first batch
    for start in reversed(range(len(ordered))):
        longest = sequence_length(ordered[start])
        stops = range(start + 1, min(len(ordered), start + max(1, max_tokens // max(1, longest))) + 1)
        cost[start], end[start] = min((max_tokens / 16 + (stop - start) * longest + cost[stop], stop) for stop in stops)
    batches, start = [], 0
    while start < len(ordered):
        batches.append(ordered[start : end[start]])
        start = end[start]
    return batches


def split_evenly(work: Sequence[float], parts: int) -> list[list[int]]:
    """Deal items out so that each part has about the same work: the largest first, to whoever has the least so far.

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
    """Runs of items, as few as hold at most `most` each, whose lengths differ by one at most: what dynamic sampling
    leaves of a batch must not end in a mini-batch of one group, which would get a whole update."""
    count = -(-len(items) // most)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]


def collate(completions: Sequence[Completion], pad_token_id: int, device: torch.device | str) -> MicroBatch:
    """Lay sequences out as prompt, completion, padding.

    Padding on the right needs no attention mask in a causal model: no real token sees it.
    """
    prompt_lengths = torch.tensor([len(c.prompt.token_ids) for c in completions])
    completion_lengths = torch.tensor([len(c.token_ids) for c in completions])
    input_ids = pad_rows([torch.tensor(c.prompt.token_ids + c.token_ids) for c in completions], pad_token_id)
    completion_ids = pad_rows([torch.tensor(c.token_ids) for c in completions], pad_token_id)
    completion_mask = torch.arange(completion_ids.shape[1]) < completion_lengths[:, None]
    advantages = torch.tensor([c.advantage for c in completions], dtype=torch.float32)
    fields = (input_ids, completion_ids, completion_mask, prompt_lengths, advantages)
    return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in fields))


def pad_rows(rows: Sequence[torch.Tensor], value: int = 0) -> torch.Tensor:
    """Per-token values of several completions, each [length], as [B, C] with `value` (0, False) behind."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
