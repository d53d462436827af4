"""The chunked head against a dense float64 softmax that shares no code with it."""

import pytest
import torch
from helpers import dense, relative
from memory import peak_bytes
from torch.utils.flop_counter import FlopCounterMode

from stapo_lite.method.lm_head import Head, token_statistics, top_tokens

N, D, V = 140, 24, 271
BUDGET = 4 * (2 * 128 * 128 + 3 * 128 * D)  # the smallest tiles, 128 x 128: two by three of them
WHOLE = 1 << 20  # a single tile
FP32, BF16 = torch.float32, torch.bfloat16


def make(dtype=FP32, bias=False, *, n=N, d=D, v=V):
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(n, d, generator=generator) * 1.5).to(dtype)
    weight = torch.randn(v, d, generator=generator).to(dtype)
    offset = torch.randn(v, generator=generator).to(dtype) if bias else None
    return hidden, weight, offset, torch.randint(0, v, (n,), generator=generator)


@pytest.mark.parametrize("budget", [BUDGET, 3 * BUDGET, WHOLE])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 1e-6), (BF16, 4e-3)])
@pytest.mark.parametrize(("bias", "temperature"), [(False, 1.0), (True, 0.6), (True, 1.7)])
def test_statistics_and_gradient_match_dense(dtype, tolerance, bias, temperature, entropy, budget):
    hidden, weight, offset, targets = make(dtype, bias)
    reference = hidden.double().requires_grad_()
    expected = dense(reference, weight, offset, targets, temperature)
    hidden.requires_grad_()
    options = {"bias": offset, "temperature": temperature, "memory_bytes": budget}
    actual = token_statistics(hidden, Head(weight, **options), targets, entropy)
    assert [values.requires_grad for values in actual] == [True, entropy, False]
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == FP32
        # accumulated in fp32 whatever the dtype of the operands
        assert (got - want).abs().max() < 2e-5
    upstream = torch.randn(2, N, generator=torch.Generator().manual_seed(1))[: 1 + entropy]
    for values in (actual, expected):
        (torch.stack(values[: 1 + entropy]) * upstream).sum().backward()
    assert hidden.grad.dtype == dtype
    assert relative(hidden.grad, reference.grad) < tolerance


@pytest.mark.parametrize(("k", "budget"), [(1, BUDGET), (20, BUDGET), (20, WHOLE), (V, BUDGET)])
@pytest.mark.parametrize(("dtype", "bias"), [(FP32, True), (BF16, False)])
def test_top_tokens_match_dense(dtype, bias, k, budget):
    hidden, weight, offset, _ = make(dtype, bias)
    logits = hidden.double() @ weight.double().T + (0 if offset is None else offset.double())
    expected = (logits / 1.3).softmax(-1).topk(k)
    options = {"bias": offset, "temperature": 1.3, "memory_bytes": budget}
    ids, probabilities = top_tokens(hidden, Head(weight, **options), k)
    exact = (logits / 1.3).softmax(-1).gather(1, ids)  # near ties may change places
    torch.testing.assert_close(exact, expected.values, rtol=1e-4, atol=0)
    torch.testing.assert_close(probabilities.double(), expected.values, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("entropy", "products"), [(False, 2), (True, 3)])
def test_both_passes_take_two_or_three_products_and_forward_alone_one(entropy, products):
    hidden, weight, _, targets = make()
    hidden.requires_grad_()
    head = Head(weight, memory_bytes=BUDGET)
    counted = {
        torch.ops.aten.mm: lambda a, b, **_: a[0] * a[1] * b[1],
        torch.ops.aten.addmm_: lambda out, a, b, **_: a[0] * a[1] * b[1],
    }
    with FlopCounterMode(display=False, custom_mapping=counted) as both_passes:
        token_statistics(hidden, head, targets, entropy).logprobs.sum().backward()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=counted) as forward:
        token_statistics(hidden, head, targets, entropy)
    assert both_passes.get_total_flops() == products * N * D * V
    assert forward.get_total_flops() == N * D * V


@pytest.mark.parametrize(
    ("sizes", "dtype", "scale", "rtol", "atol"),
    [
        ({"n": 37}, FP32, 1e-3, 1e-5, 1e-5),
        ({"n": 37}, FP32, 60.0, 1e-5, 1e-5),
        ({}, FP32, 1.0, 0, 2e-5),
        # Logits in bf16 would be off by 1e-2, BLAS's dot product over the vocabulary by 3e-5.
        ({"n": 64, "d": 512, "v": 5000}, BF16, 2 * 512**-0.5, 0, 1e-5),
        ({"n": 8, "d": 16, "v": 150_000}, FP32, 0.2 / 1.5, 1e-6, 2e-6),
    ],
    ids=["flat", "peaked", "neither", "bf16", "a large vocabulary"],
)
def test_statistics_are_exact_whatever_autocast_says(sizes, dtype, scale, rtol, atol):
    hidden, weight, _, targets = make(dtype, **sizes)
    weight = weight * scale
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "ieee"
    with torch.autocast("cpu", BF16):
        actual = token_statistics(hidden, Head(weight), targets)
    after, settings.fp32_precision = settings.fp32_precision, before
    assert after == "ieee"
    for got, want in zip(actual, dense(hidden, weight, None, targets, 1.0), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("width", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_workspace_stays_within_the_budget(dtype, entropy, width):
    hidden, weight, _, targets = make(dtype, n=512, d=width, v=20_000)
    hidden.requires_grad_()
    budget = 8 << 20  # the logits would take 40 MB

    def run():
        head = Head(weight, memory_bytes=budget)
        token_statistics(hidden, head, targets, entropy).logprobs.sum().backward()

    run()
    results = (2 + entropy) * hidden.nbytes  # the gradients, kept and scaled
    assert 0.3 * budget < peak_bytes(run) <= 1.03 * budget + results  # and values per token


def test_a_head_that_is_not_frozen_is_refused_and_no_tokens_have_no_statistics():
    hidden, weight, _, targets = make()
    empty = token_statistics(hidden[:0], Head(weight), targets[:0])
    assert [tuple(values.shape) for values in empty] == [(0,)] * 3
    with pytest.raises(ValueError, match="the head is frozen"):
        token_statistics(hidden, Head(weight.requires_grad_()), targets)
