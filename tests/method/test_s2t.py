import math

import pytest
import torch
from helpers import objective

from stapo_lite.method.masks import (
    candidate_mask,
    find_masks,
    highest_of_lowest,
    linear_quantile,
    random_scores,
    spurious_mask,
    top_entropy_mask,
)
from stapo_lite.method.tokens import pack
from stapo_lite.types import Completion, Prompt, TokenStatistics


def test_mask_of_two_completions_by_hand():
    probability = torch.tensor([[0.001, 0.001, 0.5, 0.0019], [0.001, 0.001, 0.5, 0.001]])
    entropy = torch.tensor([[0.1, 2.0, 0.1, 1.0], [0.1, 2.0, 0.1, 0.1]])
    candidates = candidate_mask(probability.log(), torch.tensor([[1.0], [-1.0]]), tau_p=0.002)
    assert candidates.tolist() == [[True, True, False, True], [False] * 4]
    tau_h = linear_quantile(entropy[candidates], quantile=0.75)
    assert tau_h == pytest.approx(1.5)  # of 0.1, 1.0, 2.0: half-way from 1 to 2
    spurious = spurious_mask(candidates, entropy, tau_h)
    assert spurious.tolist() == [[True, False, False, True], [False] * 4]


def test_inequalities_of_s2t_are_strict():
    logprobs = torch.tensor([math.log(0.25), math.log(0.25) - 1e-6])
    for advantage, expected in ((1.0, [False, True]), (0.0, [False, False])):
        assert candidate_mask(logprobs, torch.tensor([advantage]), 0.25).tolist() == expected
    candidates = torch.tensor([True, True])
    assert spurious_mask(candidates, torch.tensor([1.0, 0.5]), 1.0).tolist() == [False, True]
    # The median of float32's neighbours lies between them, and is not rounded.
    pair = torch.tensor([1.0, 1.0 + 2**-23])
    assert spurious_mask(candidates, pair, linear_quantile(pair, 0.5)).tolist() == [True, False]


def test_the_highest_entropies_include_their_threshold_and_what_is_not_a_number():
    entropy = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert linear_quantile(entropy, 1 - 0.2) == pytest.approx(0.5)
    assert top_entropy_mask(entropy, 0.5).tolist() == [False] * 4 + [True, True]
    assert top_entropy_mask(entropy, None).all()
    entropy[2] = math.nan  # for the loss to show
    assert top_entropy_mask(entropy, 0.5).tolist() == [False, False, True, False, True, True]
    assert top_entropy_mask(entropy, math.nan).all()


@pytest.mark.parametrize("quantile", [0.0, 0.05, 0.3, 0.75, 0.8, 1.0])
def test_threshold_is_the_linear_quantile_and_one_or_equal_entropies_silence_none(quantile):
    for count in (2, 3, 10, 1001):
        entropies = torch.rand(count, generator=torch.Generator().manual_seed(count))
        expected = torch.quantile(entropies.double(), quantile).item()
        assert linear_quantile(entropies, quantile) == pytest.approx(expected, abs=1e-12)
    for entropies in (torch.tensor([0.3]), torch.full((5,), 0.1), torch.full((7,), 1 / 3)):
        candidates = torch.ones_like(entropies, dtype=torch.bool)
        assert not spurious_mask(candidates, entropies, linear_quantile(entropies, quantile)).any()
    assert linear_quantile(torch.zeros(0), quantile) is None
    assert not spurious_mask(candidates, entropies, None).any()


def test_random_scores_follow_from_tokens_and_salt():
    scores = random_scores([5, 6, 7], salt=1)
    assert torch.equal(scores, random_scores([5, 6, 7], salt=1))
    assert not torch.equal(scores, random_scores([5, 6, 7], salt=2))
    assert not torch.equal(scores, random_scores([5, 6, 8], salt=1))
    assert ((scores >= 0) & (scores < 1)).all()


def test_a_share_of_stare_is_a_whole_number_of_tokens_despite_rounding():
    values = torch.arange(100.0)
    assert highest_of_lowest(values, 0.07) == 6  # 0.07 * 100 > 7 in floating point
    assert highest_of_lowest(values, 0.071) == 7
    assert highest_of_lowest(values[:3], 1e-9) == 0
    assert highest_of_lowest(values[:0], 0.07) == -math.inf


@pytest.mark.parametrize(
    ("entropy", "weights"),
    [
        ([0.2, 0.4, 2.0, 2.0], [1.0, 1.1, 1.0, 1.0]),  # of the first two the mean is 0.3
        ([0.6, 0.8, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]),  # 0.7
    ],
)
def test_stares_mean_entropy_is_that_of_the_tokens_that_the_model_wrote(entropy, weights):
    kind = objective("stare", stare={"target_entropy": 0.5})
    mask = [True, True, False, False]
    completion = Completion(Prompt("", [7], ""), [9] * 4, [0.0] * 4, False, 0, loss_mask=mask)
    completion.advantage = 1.0
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    statistics = TokenStatistics(logprobs, torch.tensor(entropy), torch.zeros(4))
    masks = find_masks(statistics, pack([completion], "cpu", kind), kind, gather=lambda x: x)
    assert masks.amplification.tolist() == pytest.approx(weights)
