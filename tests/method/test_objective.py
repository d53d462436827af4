import math

import pytest
import torch

from stapo_lite.method.loss import k3, sampler_correction, token_loss

# ratio, advantage -> objective, its derivative by log pi, the bound that took effect. The bounds
# are 0.8 and 1.28, for dppo -0.2 and 0.28 from a probability of 0.5.
SIGMOID = 1 / (1 + math.exp(-0.5))
CASES = {
    "clip": [
        (1.0, 2.0, 2.0, 2.0, ""),
        (1.2, 2.0, 2.4, 2.4, ""),
        (1.5, 2.0, 2.56, 0.0, "high"),
        (0.5, 2.0, 1.0, 1.0, ""),  # the pessimistic side is never clipped
        (1.0, -1.0, -1.0, -1.0, ""),
        (0.5, -1.0, -0.8, 0.0, "low"),
        (1.5, -1.0, -1.5, -1.5, ""),
        (1.7, 0.0, 0.0, 0.0, ""),
    ],
    "cispo": [  # times log pi, whose derivative is 1
        (1.0, 2.0, 2 * math.log(0.5), 2.0, ""),
        (1.5, 2.0, 2.56 * math.log(0.75), 2.56, "high"),
        (0.5, 2.0, 1.6 * math.log(0.25), 1.6, "low"),
        (1.5, -1.0, -1.28 * math.log(0.75), -1.28, "high"),
    ],
    "dppo": [
        (1.5, 2.0, 3.0, 3.0, ""),  # 0.5 to 0.75
        (1.6, 2.0, 0.0, 0.0, "high"),  # to 0.8
        (0.5, 2.0, 1.0, 1.0, ""),
        (0.7, -1.0, -0.7, -0.7, ""),  # to 0.35
        (0.5, -1.0, 0.0, 0.0, "low"),  # to 0.25
        (1.6, -1.0, -1.6, -1.6, ""),
    ],
    "sapo": [
        (1.0, 2.0, 4.0, 2.0, ""),  # on policy the gradient is A
        (1.0, -1.0, -2 / 1.05, -1.0, ""),
        (1.5, 2.0, 8 * SIGMOID, 8 * SIGMOID * (1 - SIGMOID) * 1.5, ""),
    ],
}


@pytest.mark.parametrize("kind", CASES)
def test_token_losses_by_hand(kind):
    ratios, advantages, values, derivatives = torch.tensor([c[:4] for c in CASES[kind]]).unbind(1)
    old = torch.full_like(ratios, 0.5).log()
    logprobs = (old + ratios.log()).requires_grad_()
    token = token_loss(kind, logprobs, logprobs - old, advantages, epsilon=0.2, epsilon_high=0.28)
    token.loss.sum().backward()
    actual = torch.stack([token.loss, logprobs.grad, token.slope])
    expected = torch.stack([-values, -derivatives, derivatives])
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert token.clipped_low.tolist() == [case[4] == "low" for case in CASES[kind]]
    assert token.clipped_high.tolist() == [case[4] == "high" for case in CASES[kind]]


def test_k3_by_hand_with_its_gradient():
    logprobs = torch.tensor([0.5, 0.2]).log().requires_grad_()
    kl = k3(logprobs, torch.tensor([0.25, 0.2]).log())
    assert kl.tolist() == pytest.approx([math.log(2) - 0.5, 0.0], abs=1e-6)
    kl.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([1 - 0.5, 0.0], abs=1e-6)
    # 1e-3 apart it is half the square; e^x - x - 1 in float32 would be wrong by a tenth.
    close = k3(torch.tensor(-2.0), torch.tensor(-2.0 + 2**-10)).item()
    assert close == pytest.approx(2**-21, rel=1e-3)


@pytest.mark.parametrize("kind", ["clip", "cispo", "gspo", "dppo", "sapo"])
def test_extreme_ratios_give_numbers(kind):
    log_ratio = torch.tensor([200.0, 200.0, -200.0, -200.0])
    logprobs = log_ratio.clamp(max=0.0)
    old_logprobs = logprobs - log_ratio
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = token_loss(kind, logprobs, log_ratio, advantages, 0.2, 0.28)
    assert loss.loss.isfinite().all()
    assert loss.slope.isfinite().all()
    for mode in ("token-truncate", "icepop", "sequence-mask"):
        rows = torch.arange(4)
        weights, capped = sampler_correction(logprobs, old_logprobs, rows, 4, mode, cap=2.0)
        assert (weights * loss.slope).isfinite().all()
        expected = [2.0, 2.0, 0.0, 0.0] if mode == "token-truncate" else [0.0] * 4
        assert weights.tolist() == expected
        assert capped[:2].all()
