import pytest
import torch

from stapo_lite.algorithm.objective import (
    Totals,
    clipped_token_loss,
    k3,
    sampler_correction,
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


def test_clipped_loss_by_hand():
    ratios, advantages, losses, gradients = torch.tensor(CASES).unbind(1)
    old = torch.full_like(ratios, -3.0)
    logprobs = (old + ratios.log()).requires_grad_()
    token = clipped_token_loss(logprobs, old, advantages, epsilon=0.2, epsilon_high=0.28)
    token.loss.sum().backward()
    torch.testing.assert_close(token.loss, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logprobs.grad, gradients, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(token.gradient, -gradients, rtol=1e-6, atol=1e-6)
    assert token.clipped_low.tolist() == [case[:2] == (0.5, -1.0) for case in CASES]
    assert token.clipped_high.tolist() == [case[:2] == (1.5, 2.0) for case in CASES]


def test_k3_by_hand_and_its_gradient():
    logprobs = torch.tensor([0.5, 0.2]).log().requires_grad_()
    kl = k3(logprobs, torch.tensor([0.25, 0.2]).log())
    torch.testing.assert_close(
        kl, torch.tensor([2.0, 1.0]).log() + torch.tensor([-0.5, 0.0]), rtol=1e-6, atol=1e-6
    )
    kl.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([1 - 0.5, 0.0], abs=1e-6)
    # 1e-3 apart it is half the square; e^x - x - 1 in float32 would be wrong by a tenth.
    assert k3(torch.tensor(-2.0), torch.tensor(-2.0 + 2**-10)).item() == pytest.approx(
        2**-21, rel=1e-3
    )
    # an unbiased estimate of the divergence
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    torch.testing.assert_close(
        (p * k3(p.log(), q.log())).sum(), (p * (p / q).log()).sum(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("correction", "expected", "capped"),
    [
        ("token-truncate", [1.5, 0.5, 2.0, 1.5, 1.2], [False, False, True, False, False]),
        (
            "sequence-mask",
            [0.0, 0.0, 0.0, 1.8, 1.8],
            [True, True, True, False, False],
        ),  # products 3.0 and 1.8
        ("off", [1.0] * 5, [False] * 5),
    ],
)
def test_sampler_correction_by_hand(correction, expected, capped):
    """Sequences of three and two tokens, and two of none."""
    ratios, rows = torch.tensor([1.5, 0.5, 4.0, 1.5, 1.2]), torch.tensor([2, 2, 2, 0, 0])
    rollout = torch.full((5,), -2.0)
    weights, above = sampler_correction(
        rollout + ratios.log(), rollout, rows, 4, correction, cap=2.0
    )
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert above.tolist() == capped


def test_weights_make_the_three_means():
    """Two sequences of 3 and 1 kept tokens, one of none, with losses 1, 2, 3 and 10."""
    kept, losses = torch.tensor([3, 1, 0]), torch.tensor([6.0, 10.0, 0.0])
    totals = Totals(tokens=4, counted_sequences=2, sequences=3)
    expected = {"token-mean": 16 / 4, "sequence-mean": (6 / 3 + 10) / 2, "constant": 16 / (3 * 20)}
    for aggregation, mean in expected.items():
        weights = sequence_weights(kept, totals, aggregation, max_completion_length=20)
        assert (weights * losses).sum().item() == pytest.approx(mean), aggregation
