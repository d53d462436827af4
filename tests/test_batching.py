import torch
from conftest import fake_completions

from stapo_lite.batching import collate, pad_rows, sequence_length, split_by_tokens
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


def test_less_than_half_the_padding_of_batches_in_the_order_given():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(256, generator=generator) * 0.8 + 6).long().clamp(16, 4096).tolist()
    completions = [completion(64, n) for n in lengths]

    def padding(batches):
        return sum(len(b) * max(map(sequence_length, b)) for b in batches) - sum(map(sequence_length, completions))

    batches = split_by_tokens(completions, max_tokens=16384)
    rows = len(completions) // len(batches)
    unsorted = [completions[i : i + rows] for i in range(0, len(completions), rows)]
    assert padding(batches) < padding(unsorted) / 2


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
