import math

import numpy as np
import pytest
import torch

from stapo_lite.algorithm.s2t import (
    candidate_mask,
    linear_quantile,
    next_tau_p,
    random_scores,
    spurious_mask,
    top_entropy_mask,
)


def test_mask_of_two_completions_by_hand():
    probability = torch.tensor([[0.001, 0.001, 0.5, 0.0019], [0.001, 0.001, 0.5, 0.001]])
    entropy = torch.tensor([[0.1, 2.0, 0.1, 1.0], [0.1, 2.0, 0.1, 0.1]])
    advantages = torch.tensor([[1.0], [-1.0]])
    candidates = candidate_mask(probability.log(), advantages, tau_p=0.002)
    assert candidates.tolist() == [[True, True, False, True], [False, False, False, False]]
    tau_h = linear_quantile(
        entropy[candidates], quantile=0.75
    )  # of 0.1, 1.0, 2.0: half-way from 1 to 2
    assert tau_h == pytest.approx(1.5)
    assert spurious_mask(candidates, entropy, tau_h).tolist() == [
        [True, False, False, True],
        [False] * 4,
    ]


def test_inequalities_are_strict_but_that_of_the_highest_entropies():
    logprobs = torch.tensor([math.log(0.25), math.log(0.25) - 1e-6])
    assert candidate_mask(logprobs, torch.tensor([1.0]), tau_p=0.25).tolist() == [False, True]
    assert candidate_mask(logprobs, torch.tensor([0.0]), tau_p=0.25).tolist() == [False, False]
    candidates = torch.tensor([True, True])
    assert spurious_mask(candidates, torch.tensor([1.0, 0.5]), threshold=1.0).tolist() == [
        False,
        True,
    ]
    neighbours = torch.tensor(
        [1.0, 1.0 + 2**-23]
    )  # in float32; the median lies between them, and is not rounded
    assert spurious_mask(candidates, neighbours, linear_quantile(neighbours, 0.5)).tolist() == [
        True,
        False,
    ]
    entropy = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert linear_quantile(entropy, 1 - 0.2) == pytest.approx(0.5)
    assert top_entropy_mask(entropy, 0.5).tolist() == [False] * 4 + [True, True]
    assert top_entropy_mask(entropy, None).all()
    # Entropies that are not finite are for the loss to show.
    entropy[2] = math.nan
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


def test_low_high_and_random_silence_the_same_share_of_the_candidates():
    """And what is random follows from tokens and salt."""
    entropies = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    candidates = torch.ones(1001, dtype=torch.bool)
    scores = {"low": entropies, "high": -entropies, "random": random_scores(range(1001), salt=3)}
    masks = {
        name: spurious_mask(candidates, score, linear_quantile(score, 0.75))
        for name, score in scores.items()
    }
    assert [mask.sum() for mask in masks.values()] == [750] * 3
    assert entropies[masks["high"]].min() > entropies[~masks["high"]].max()
    assert entropies[masks["low"]].max() < entropies[~masks["low"]].min()
    scores = random_scores([5, 6, 7], salt=1)
    assert torch.equal(scores, random_scores([5, 6, 7], salt=1))
    assert not torch.equal(scores, random_scores([5, 6, 7], salt=2))
    assert not torch.equal(scores, random_scores([5, 6, 8], salt=1))
    assert ((scores >= 0) & (scores < 1)).all()


def test_next_tau_p_by_hand():
    for tau_p, share, expected in (
        (0.002, 1e-4, 0.002),
        (0.002, 0.0, 0.002 * math.exp(0.1)),
        (0.002, 5e-4, 0.002 * math.exp(-0.4)),
        (0.002, 1.0, 0.002 * math.exp(-1)),
        (0.02, 0.0, 0.02),  # ten times the config's
        (2e-4, 1.0, 2e-4),  # a tenth
    ):
        assert next_tau_p(tau_p, share, target=1e-4, given=0.002) == pytest.approx(
            expected, rel=1e-12
        )
    assert next_tau_p(0.99, 0.0, target=1e-4, given=0.5) == 1.0  # a probability


@pytest.mark.parametrize("tokens", [10_000, 2_000_000])
def test_next_tau_p_brings_the_silenced_share_to_the_target(tokens):
    """On a stream whose silenced share grows with tau_p, also where most steps silence nothing."""
    generator = np.random.default_rng(0)
    tau_p, shares = 0.002, []
    for _ in range(2000):
        silenced = generator.binomial(tokens, 0.3 * tau_p)  # at 0.002 six times the target
        shares.append(silenced / tokens)
        tau_p = next_tau_p(tau_p, shares[-1], target=1e-4, given=0.002)
    assert np.mean(shares[200:]) == pytest.approx(1e-4, rel=0.1)
