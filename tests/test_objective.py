import math

import pytest
import torch

from stapo_lite.objective import clipped_token_loss

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
    old = torch.tensor([[-3.0]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    token = clipped_token_loss(logprobs, old, torch.tensor([advantage]), epsilon=0.2, epsilon_high=0.28)
    token.loss.sum().backward()
    assert token.loss.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert token.clipped_low.item() == (ratio == 0.5 and advantage < 0)
    assert token.clipped_high.item() == (ratio == 1.5 and advantage > 0)


def test_each_row_has_its_advantage():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    token = clipped_token_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -2.0]), 0.2, 0.28)
    assert token.loss.tolist() == [[-1.0] * 3, [2.0] * 3]
