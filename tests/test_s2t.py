import math

import numpy as np
import pytest
import torch

from stapo_lite.s2t import candidate_mask, entropy_threshold, spurious_mask


def test_mask_of_two_completions_by_hand():
    probability = torch.tensor([[0.001, 0.001, 0.5, 0.0019], [0.001, 0.001, 0.5, 0.001]])
    entropy = torch.tensor([[0.1, 2.0, 0.1, 1.0], [0.1, 2.0, 0.1, 0.1]])
    advantages = torch.tensor([[1.0], [-1.0]])
    candidates = candidate_mask(probability.log(), advantages, tau_p=0.002)
    assert candidates.tolist() == [[True, True, False, True], [False, False, False, False]]
    tau_h = entropy_threshold(entropy[candidates], quantile=0.75)  # of 0.1, 1.0, 2.0: half-way from 1 to 2
    assert tau_h == pytest.approx(1.5)
    assert spurious_mask(candidates, entropy, tau_h).tolist() == [[True, False, False, True], [False] * 4]


def test_inequalities_are_strict():
    logprobs = torch.tensor([math.log(0.25), math.log(0.25) - 1e-6])
    assert candidate_mask(logprobs, torch.tensor([1.0]), tau_p=0.25).tolist() == [False, True]
    assert candidate_mask(logprobs, torch.tensor([0.0]), tau_p=0.25).tolist() == [False, False]
    candidates = torch.tensor([True, True])
    assert spurious_mask(candidates, torch.tensor([1.0, 0.5]), tau_h=1.0).tolist() == [False, True]


def test_the_threshold_is_not_rounded_to_an_entropy():
    entropy = torch.tensor([1.0, 1.0 + 2**-23])  # neighbours in float32; the median lies between them
    tau_h = entropy_threshold(entropy, quantile=0.5)
    assert spurious_mask(torch.tensor([True, True]), entropy, tau_h).tolist() == [True, False]


def test_no_candidates_silence_nothing():
    tau_h = entropy_threshold(torch.tensor([]), quantile=0.75)
    assert tau_h == -math.inf
    assert not spurious_mask(torch.zeros(3, dtype=torch.bool), torch.zeros(3), tau_h).any()


@pytest.mark.parametrize("entropies", [[0.3], [0.1] * 5, [1 / 3] * 7])
@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.75, 1.0])
def test_one_candidate_or_equal_entropies_silence_none(entropies, quantile):
    entropy = torch.tensor(entropies)
    tau_h = entropy_threshold(entropy, quantile)
    assert not spurious_mask(torch.ones(len(entropy), dtype=torch.bool), entropy, tau_h).any()


@pytest.mark.parametrize("count", [2, 3, 10, 1001])
@pytest.mark.parametrize("quantile", [0.0, 0.05, 0.75, 0.8, 1.0])
def test_threshold_is_the_linear_quantile(count, quantile):
    entropies = torch.rand(count, generator=torch.Generator().manual_seed(count))
    expected = np.quantile(entropies.double().numpy(), quantile)
    assert entropy_threshold(entropies, quantile) == pytest.approx(expected, abs=1e-12)


def test_about_three_quarters_of_the_candidates_are_silenced():
    entropies = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    spurious = spurious_mask(torch.ones(4000, dtype=torch.bool), entropies, entropy_threshold(entropies, 0.75))
    assert spurious.sum() == 3000
