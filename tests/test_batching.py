import itertools
import math

import pytest
import torch
from conftest import fake_completions

from stapo_lite.batching import TokenBudget, collate, pad_rows, sequence_length, split_by_tokens, split_evenly
from stapo_lite.config import RunError
from stapo_lite.types import Completion, Prompt


def completion(prompt_length, length, advantage=0.0):
    prompt = Prompt("", [7] * prompt_length, answer="")
    return Completion(prompt, list(range(10, 10 + length)), [0.0] * length, False, 0, advantage=advantage)


def test_every_sequence_once_within_the_budget_longest_first():
    completions = fake_completions(0, [1.0] * 200, longest=60)
    batches = split_by_tokens(completions, max_tokens=256)
    assert sorted(map(id, (c for batch in batches for c in batch))) == sorted(map(id, completions))
    assert all(len(batch) * max(map(sequence_length, batch)) <= 256 for batch in batches)
    lengths = [sequence_length(c) for batch in batches for c in batch]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("seed", range(3))
def test_padding_below_a_tenth_on_a_skewed_mix(seed):
    """Log-normal lengths, a tenth of them cut off; few more micro-batches than the tokens ask for."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(256, generator=generator) * 0.8 + 6).long().clamp(16, 1200).tolist()
    completions = [completion(64, n) for n in lengths]
    batches = split_by_tokens(completions, max_tokens=16384)
    tokens = sum(map(sequence_length, completions))
    laid_out = sum(len(b) * max(map(sequence_length, b)) for b in batches)
    assert 1 - tokens / laid_out < 0.1
    assert len(batches) <= 1.5 * tokens / 16384 + 1


def test_the_cheapest_cut_of_all():
    """Against every way to cut eight sequences in order of length."""
    completions = fake_completions(3, [1.0] * 8, longest=40)
    lengths = sorted(map(sequence_length, completions), reverse=True)

    def cost(batches, budget=64):
        within = all(len(b) == 1 or len(b) * b[0] <= budget for b in batches)
        return sum(len(b) * b[0] + budget / 16 for b in batches) if within else math.inf

    cuts = itertools.product([False, True], repeat=7)
    every = [[list(part) for part in _split(lengths, cut)] for cut in cuts]
    ours = [[sequence_length(c) for c in batch] for batch in split_by_tokens(completions, 64)]
    assert cost(ours) == min(map(cost, every)) < math.inf


def _split(values, cut):
    ends = [0, *(i + 1 for i, here in enumerate(cut) if here), len(values)]
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def test_a_sequence_over_the_budget_stands_alone():
    assert [len(b) for b in split_by_tokens([completion(5, 5), completion(1, 1)], max_tokens=4)] == [1, 1]


def test_layout_by_hand():
    batch = collate([completion(2, 3, advantage=1.5), completion(4, 1)], pad_token_id=0, device="cpu")
    assert batch.input_ids.tolist() == [[7, 7, 10, 11, 12], [7, 7, 7, 7, 10]]
    assert batch.completion_ids.tolist() == [[10, 11, 12], [10, 0, 0]]
    assert batch.completion_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.prompt_lengths.tolist() == [2, 4]
    assert batch.advantages.tolist() == [1.5, 0.0]


def test_pad_rows():
    assert pad_rows([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]).tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_work_is_dealt_out_evenly():
    assert split_evenly([5, 1, 1, 1, 2], 2) == [[0], [1, 2, 3, 4]]
    assert split_evenly([3, 0, 0, 4], 3) == [[3], [0], [1, 2]]
    assert split_evenly([7, 7, 7], 1) == [[0, 1, 2]]
    assert split_evenly([], 2) == [[], []]
    lengths = (torch.randn(512, generator=torch.Generator().manual_seed(0)).exp() * 1000).tolist()
    loads = [sum(lengths[i] for i in share) for share in split_evenly(lengths, 8)]
    assert max(loads) < 1.001 * sum(loads) / 8


def test_who_has_fewer_micro_batches_gets_empty_ones():
    completions = fake_completions(0, [1.0] * 6)
    budget = TokenBudget(10_000, in_step=lambda count: count + 2)
    assert budget.fit(completions, lambda parts: [len(rows) for rows in parts]) == [6, 0, 0]

    def too_much(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with pytest.raises(RunError, match="memory ran out: lower train.max_tokens_per_microbatch"):
        budget.fit(completions, too_much)
