import math

import pytest
import torch

from stapo_lite.algorithm.objective import (
    Totals,
    clipped_token_loss,
    k3,
    sampler_correction,
    segment_sum,
    sequence_weights,
)

# ratio, advantage -> loss, gradient with respect to log pi; epsilon 0.2, epsilon_high 0.28
CASES = [
    (1.0, 2.0, -2.0, -2.0),
    (1.2, 2.0, -2.4, -2.4),
    (1.5, 2.0, -2.56, 0.0),  # clipped high: 1.28 * 2
    (0.5, 2.0, -1.0, -1.0),  # the pessimistic side is never clipped
    (1.0, -1.0, 1.0, 1.0),
    (0.5, -1.0, 0.8, 0.0),  # clipped low
    (1.5, -1.0, 1.5, 1.5),
    (1.7, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CASES)
def test_clipped_loss_by_hand(ratio, advantage, loss, gradient):
    old = torch.tensor([-3.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    token = clipped_token_loss(logprobs, old, torch.tensor([advantage]), epsilon=0.2, epsilon_high=0.28)
    token.loss.sum().backward()
    assert token.loss.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert token.gradient.item() == pytest.approx(-gradient, abs=1e-6)
    assert token.clipped_low.item() == (ratio == 0.5 and advantage < 0)
    assert token.clipped_high.item() == (ratio == 1.5 and advantage > 0)


def test_each_token_has_its_advantage():
    logprobs = torch.zeros(3, requires_grad=True)
    token = clipped_token_loss(logprobs, logprobs.detach(), torch.tensor([1.0, 1.0, -2.0]), 0.2, 0.28)
    assert token.loss.tolist() == [-1.0, -1.0, 2.0]


def test_k3_by_hand_and_its_gradient():
    logprobs = torch.tensor([math.log(0.5), math.log(0.2)], requires_grad=True)
    other = torch.tensor([math.log(0.25), math.log(0.2)])
    kl = k3(logprobs, other)
    assert kl.tolist() == pytest.approx([0.5 + math.log(2) - 1, 0.0], abs=1e-6)
    kl.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([1 - 0.5, 0.0], abs=1e-6)


def test_k3_of_nearly_equal_policies_is_not_rounded_away():
    """1e-3 apart it is half the square; e^x - x - 1 in float32 would be wrong by a tenth."""
    logprobs = torch.tensor([-2.0])
    assert k3(logprobs, logprobs + 2**-10).item() == pytest.approx(2**-21, rel=1e-3)


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (p * (p / q).log()).sum()
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(exact.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("correction", "expected", "capped"),
    [
        ("token-truncate", [1.5, 0.5, 2.0, 1.5, 1.2], [False, False, True, False, False]),
        ("sequence-mask", [0.0, 0.0, 0.0, 1.8, 1.8], [True, True, True, False, False]),  # products 3.0 and 1.8
        ("off", [1.0] * 5, [False] * 5),
    ],
)
def test_sampler_correction_by_hand(correction, expected, capped):
    """Two sequences of three and two tokens, one after the other."""
    ratios, rows = torch.tensor([1.5, 0.5, 4.0, 1.5, 1.2]), torch.tensor([0, 0, 0, 1, 1])
    rollout = torch.full((5,), -2.0)
    weights, above = sampler_correction(rollout + ratios.log(), rollout, rows, 2, correction, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert above.tolist() == capped


def test_segment_sums_of_rows_in_any_order():
    values, rows = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 3])
    assert segment_sum(values, rows, 5).tolist() == [2.0, 0.0, 5.0, 8.0, 0.0]


def test_weights_make_the_three_means():
    """Two sequences of 3 and 1 kept tokens, one of none, with losses 1, 2, 3 and 10."""
    kept, losses = torch.tensor([3, 1, 0]), torch.tensor([6.0, 10.0, 0.0])
    totals = Totals(tokens=4, trained_sequences=2, sequences=3)
    expected = {"token-mean": 16 / 4, "sequence-mean": (6 / 3 + 10) / 2, "constant": 16 / (3 * 20)}
    for aggregation, mean in expected.items():
        weights = sequence_weights(kept, totals, aggregation, max_completion_length=20)
        assert (weights * losses).sum().item() == pytest.approx(mean), aggregation
