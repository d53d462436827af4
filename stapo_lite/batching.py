"""Completions -> micro-batches under a token budget, with little padding."""

from collections.abc import Sequence

import torch

from stapo_lite.types import Completion, MicroBatch


def sequence_length(completion: Completion) -> int:
    return len(completion.prompt.token_ids) + len(completion.token_ids)


def split_by_tokens(completions: Sequence[Completion], max_tokens: int) -> list[list[Completion]]:
    """Group sequences of similar length so that rows x longest stays within `max_tokens`.

    Longest first: the micro-batch that needs the most memory runs first. A single sequence longer
    than the budget gets a micro-batch of its own.
    """
    batches: list[list[Completion]] = []
    for completion in sorted(completions, key=sequence_length, reverse=True):
        if batches and (len(batches[-1]) + 1) * sequence_length(batches[-1][0]) <= max_tokens:
            batches[-1].append(completion)
        else:
            batches.append([completion])
    return batches


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
