"""The paper's theory against autograd: the gradient-norm identity and both bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stapo_lite.method.lm_head import Head, token_statistics
from stapo_lite.method.loss import logit_gradient_norm, token_loss

VOCABULARY = 50
C_V = (VOCABULARY - 1) / (VOCABULARY * math.log(VOCABULARY) ** 2)


def two_levels(high, count):
    """`count` tokens share logit `high`, the others 0."""
    logits = torch.zeros(VOCABULARY)
    logits[:count] = high
    return logits


ADVERSARIAL = {
    "uniform": torch.zeros(VOCABULARY),
    "one certain token": two_levels(40.0, 1),
    "one likely token": two_levels(6.0, 1),
    "two tokens share everything": two_levels(30.0, 2),
    "half the vocabulary": two_levels(5.0, VOCABULARY // 2),
    "one impossible token": torch.zeros(VOCABULARY).index_fill(0, torch.tensor([3]), -60.0),
    "far from zero": torch.linspace(-30, 30, VOCABULARY),
}


def check(logits, target, shift, advantage, kind="clip"):
    """One token in float64 by autograd, and in fp32 from the LM head, as training computes it."""
    a = logits.double().requires_grad_()
    logprob = torch.log_softmax(a, -1)[target].view(1)
    old, advantages = logprob.detach() + shift, torch.full_like(logprob, advantage)
    loss = token_loss(kind, logprob, logprob - old, advantages, 0.2, 0.28).loss
    exact = torch.autograd.grad(loss.sum(), a)[0].norm().item()
    s = token_statistics(logits.float()[None], Head(torch.eye(VOCABULARY)), torch.tensor([target]))
    log_ratio = s.logprobs - old.float()
    gradient = token_loss(kind, s.logprobs, log_ratio, advantages.float(), 0.2, 0.28).slope
    norm, w = logit_gradient_norm(gradient, s.logprobs, s.collision).item(), gradient.item()
    # Squares: under the root, 1 - 2 pi + collision is next to nothing if pi is near 1.
    assert norm**2 == pytest.approx(exact**2, rel=4e-5, abs=4e-6 * w**2)
    pi, entropy = s.logprobs.exp().item(), s.entropy.item()
    slack = 4e-5 * w**2  # w is off by 1e-5 where log pi is -70: fp32 has no more digits
    assert w**2 * (1 - 2 * pi + math.exp(-entropy)) <= exact**2 + slack
    assert exact**2 <= w**2 * (2 - 2 * pi - C_V * entropy**2) + slack


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("target", [0, 3, VOCABULARY - 1])
@pytest.mark.parametrize(("shift", "advantage"), [(0, 1.0), (0.1, -2.0), (-1, 1.5), (1, -1.5)])
def test_identity_and_bounds_on_extreme_distributions(name, target, shift, advantage):
    check(ADVERSARIAL[name], target, shift, advantage)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.1, 1.0, 3.0, 10.0]),
    target=st.integers(0, VOCABULARY - 1),
    shift=st.floats(-0.4, 0.4),
    advantage=st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3),
    kind=st.sampled_from(["clip", "cispo", "dppo", "sapo"]),
)
def test_identity_and_bounds_on_random_distributions(seed, scale, target, shift, advantage, kind):
    logits = scale * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    check(logits, target, shift, advantage, kind)
