import itertools
import math

import torch
from helpers import fake_completions, objective

from stapo_lite.method.masks import random_column
from stapo_lite.method.microbatches import deal, sequence_length, split_by_tokens
from stapo_lite.method.tokens import pack
from stapo_lite.types import Completion, Prompt


def test_every_sequence_is_once_within_the_budget_and_the_longest_come_first():
    lengths = [sequence_length(c) for c in fake_completions(0, [1.0] * 200, longest=60)]
    cut = split_by_tokens(lengths, max_tokens=256)
    assert sorted(itertools.chain(*cut)) == list(range(200))
    assert all(len(batch) * max(lengths[row] for row in batch) <= 256 for batch in cut)
    flat = [lengths[row] for row in itertools.chain(*cut)]
    assert flat == sorted(flat, reverse=True)
    assert split_by_tokens([2, 10], max_tokens=4) == [[1], [0]]  # one over the budget stands alone


def test_the_cut_is_the_cheapest_of_all_in_order_of_length():
    lengths = [47, 40, 33, 31, 22, 14, 9, 3]

    def cost(batches, budget):
        within = all(len(b) == 1 or len(b) * b[0] <= budget for b in batches)
        return sum(len(b) * b[0] + budget / 16 for b in batches) if within else math.inf

    def split(cut):
        ends = [0, *(i + 1 for i, here in enumerate(cut) if here), len(lengths)]
        return [lengths[a:b] for a, b in itertools.pairwise(ends)]

    ways = [split(cut) for cut in itertools.product([False, True], repeat=7)]
    for budget in range(47, 250, 7):
        ours = [[lengths[row] for row in batch] for batch in split_by_tokens(lengths, budget)]
        assert cost(ours, budget) == min(cost(batches, budget) for batches in ways) < math.inf


def test_tokens_are_packed_one_after_the_other():
    prompt = Prompt("", [7], answer="")
    completions = [Completion(prompt, [9] * n, [0.0] * n, False, 0) for n in (3, 1, 2)]
    completions[0].advantage, completions[1].advantage = 1.5, -1.0
    completions[2].loss_mask = [False, True]
    batch = pack(completions, "cpu", objective())
    assert batch.starts == [0, 3, 4, 6]
    assert batch.owner.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.advantages.tolist() == [1.5, 1.5, 1.5, -1.0, 0.0, 0.0]
    assert batch.written.tolist() == [True, True, True, True, False, True]
    assert batch.rollout_logprobs.tolist() == [0.0] * 6
    assert batch.find_places([2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert batch.find_places([]).tolist() == []
    empty = pack([], "cpu", objective())
    assert empty.starts == [0]
    tensors = (empty.owner, empty.advantages, empty.written, empty.rollout_logprobs)
    assert [len(values) for values in (*tensors, random_column(empty, []))] == [0] * 5


def test_work_is_dealt_out_evenly():
    assert deal([5, 1, 1, 1, 2], 2) == [[0], [1, 2, 3, 4]]
    assert deal([3, 0, 0, 4], 3) == [[3], [0], [1, 2]]
    assert deal([], 2) == [[], []]
    lengths = (torch.randn(512, generator=torch.Generator().manual_seed(0)).exp() * 1000).tolist()
    loads = [sum(lengths[i] for i in share) for share in deal(lengths, 8)]
    assert max(loads) < 1.001 * sum(loads) / 8
