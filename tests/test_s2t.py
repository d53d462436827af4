import math

import numpy as np
import pytest
import torch

from stapo_lite.s2t import (
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
    tau_h = linear_quantile(entropy[candidates], quantile=0.75)  # of 0.1, 1.0, 2.0: half-way from 1 to 2
    assert tau_h == pytest.approx(1.5)
    assert spurious_mask(candidates, entropy, tau_h).tolist() == [[True, False, False, True], [False] * 4]


def test_inequalities_are_strict():
    logprobs = torch.tensor([math.log(0.25), math.log(0.25) - 1e-6])
    assert candidate_mask(logprobs, torch.tensor([1.0]), tau_p=0.25).tolist() == [False, True]
    assert candidate_mask(logprobs, torch.tensor([0.0]), tau_p=0.25).tolist() == [False, False]
    candidates = torch.tensor([True, True])
    assert spurious_mask(candidates, torch.tensor([1.0, 0.5]), threshold=1.0).tolist() == [False, True]


def test_the_threshold_is_not_rounded_to_an_entropy():
    entropy = torch.tensor([1.0, 1.0 + 2**-23])  # neighbours in float32; the median lies between them
    tau_h = linear_quantile(entropy, quantile=0.5)
    assert spurious_mask(torch.tensor([True, True]), entropy, tau_h).tolist() == [True, False]


def test_no_candidates_silence_nothing():
    tau_h = linear_quantile(torch.tensor([]), quantile=0.75)
    assert tau_h is None
    assert not spurious_mask(torch.zeros(3, dtype=torch.bool), torch.zeros(3), tau_h).any()


@pytest.mark.parametrize("entropies", [[0.3], [0.1] * 5, [1 / 3] * 7])
@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.75, 1.0])
def test_one_candidate_or_equal_entropies_silence_none(entropies, quantile):
    entropy = torch.tensor(entropies)
    tau_h = linear_quantile(entropy, quantile)
    assert not spurious_mask(torch.ones(len(entropy), dtype=torch.bool), entropy, tau_h).any()


@pytest.mark.parametrize("count", [2, 3, 10, 1001])
@pytest.mark.parametrize("quantile", [0.0, 0.05, 0.75, 0.8, 1.0])
def test_threshold_is_the_linear_quantile(count, quantile):
    entropies = torch.rand(count, generator=torch.Generator().manual_seed(count))
    expected = np.quantile(entropies.double().numpy(), quantile)
    assert linear_quantile(entropies, quantile) == pytest.approx(expected, abs=1e-12)


def test_about_three_quarters_of_the_candidates_are_silenced():
    entropies = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    spurious = spurious_mask(torch.ones(4000, dtype=torch.bool), entropies, linear_quantile(entropies, 0.75))
    assert spurious.sum() == 3000


def test_high_entropy_and_random_silence_the_same_share_of_the_candidates():
    entropies = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    candidates = torch.ones(1001, dtype=torch.bool)
    top = spurious_mask(candidates, -entropies, linear_quantile(-entropies, 0.75))
    assert top.sum() == 750
    assert entropies[top].min() > entropies[~top].max()
    scores = random_scores(range(1001), salt=3)
    assert spurious_mask(candidates, scores, linear_quantile(scores, 0.75)).sum() == 750


def test_random_scores_follow_from_tokens_and_salt():
    scores = random_scores([5, 6, 7], salt=1)
    assert torch.equal(scores, random_scores([5, 6, 7], salt=1))
    assert not torch.equal(scores, random_scores([5, 6, 7], salt=2))
    assert not torch.equal(scores, random_scores([5, 6, 8], salt=1))
    assert ((scores >= 0) & (scores < 1)).all()


def test_top_entropy_keeps_the_threshold_itself():
    entropy = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    threshold = linear_quantile(entropy, 1 - 0.2)
    assert threshold == pytest.approx(0.5)
    assert top_entropy_mask(entropy, 0.5).tolist() == [False] * 4 + [True, True]
    assert top_entropy_mask(entropy, None).all()


def test_next_tau_p_by_hand():
    def after(share):
        return next_tau_p(0.002, share, target=1e-4, low=2e-4, high=0.02)

    assert after(1e-4) == pytest.approx(0.002)
    assert after(0.0) == pytest.approx(0.002 * math.exp(0.1))
    assert after(5e-4) == pytest.approx(0.002 * math.exp(-0.4))
    assert after(1.0) == pytest.approx(0.002 * math.exp(-1))
    assert next_tau_p(0.02, 0.0, 1e-4, low=2e-4, high=0.02) == 0.02
    assert next_tau_p(2e-4, 1.0, 1e-4, low=2e-4, high=0.02) == 2e-4


@pytest.mark.parametrize("tokens", [10_000, 2_000_000])
def test_adaptive_tau_p_brings_the_silenced_share_to_the_target(tokens):
    """On a stream whose silenced share grows with tau_p, also where most steps silence nothing."""
    generator = np.random.default_rng(0)
    tau_p, shares = 0.002, []
    for _ in range(2000):
        silenced = generator.binomial(tokens, 0.3 * tau_p)  # at 0.002 six times the target
        shares.append(silenced / tokens)
        tau_p = next_tau_p(tau_p, shares[-1], target=1e-4, low=1e-5, high=0.02)
    assert np.mean(shares[200:]) == pytest.approx(1e-4, rel=0.1)
