"""The chunked head against a dense float64 softmax that shares no code with it."""

import pytest
import torch
from helpers import dense, relative
from memory import peak_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from stapo_lite.algorithm.lm_head import token_statistics, top_tokens

N, D, V = 140, 24, 271
BUDGET = 4 * (
    2 * 128 * 128 + 2 * 128 * D + 128 * D
)  # the smallest tiles, 128 x 128: two by three of them


def make(dtype=torch.float32, bias=False, *, n=N, d=D, v=V):
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(n, d, generator=generator) * 1.5).to(dtype)
    weight = torch.randn(v, d, generator=generator).to(dtype)
    offset = torch.randn(v, generator=generator).to(dtype) if bias else None
    return hidden, weight, offset, torch.randint(0, v, (n,), generator=generator)


@pytest.mark.parametrize(
    ("dtype", "bias", "temperature", "entropy", "tolerance"),
    [
        (torch.float32, False, 1.0, False, 1e-6),
        (torch.float32, True, 0.6, False, 1e-6),
        (torch.bfloat16, False, 0.6, False, 4e-3),
        (torch.bfloat16, True, 1.7, False, 4e-3),
        (torch.float32, False, 0.7, True, 1e-5),
        (torch.float32, True, 0.7, True, 1e-5),
    ],
)
def test_statistics_and_gradient_match_dense(dtype, bias, temperature, entropy, tolerance):
    hidden, weight, offset, targets = make(dtype, bias)
    reference = hidden.double().requires_grad_()
    expected = dense(reference, weight, offset, targets, temperature)
    hidden.requires_grad_()
    budget = 3 * BUDGET if entropy else BUDGET
    options = {
        "bias": offset,
        "temperature": temperature,
        "memory_bytes": budget,
        "differentiable_entropy": entropy,
    }
    actual = token_statistics(hidden, weight, targets, **options)
    assert [values.requires_grad for values in actual] == [True, entropy, entropy]
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        assert (
            got - want
        ).abs().max() < 2e-5  # fp32-accumulated whatever the dtype of the operands
    upstream = torch.randn(3, N, generator=torch.Generator().manual_seed(1))
    count = 3 if entropy else 1
    for values in (actual, expected):
        (torch.stack(list(values[:count])) * upstream[:count]).sum().backward()
    assert hidden.grad.dtype == dtype
    assert relative(hidden.grad, reference.grad) < tolerance


@pytest.mark.parametrize(("k", "budget"), [(1, BUDGET), (20, BUDGET), (20, 1 << 20), (V, BUDGET)])
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)])
def test_top_tokens_match_dense(dtype, bias, k, budget):
    hidden, weight, offset, _ = make(dtype, bias)
    logits = hidden.double() @ weight.double().T + (0 if offset is None else offset.double())
    expected = (logits / 1.3).softmax(-1).topk(k)
    ids, probabilities = top_tokens(
        hidden, weight, k, bias=offset, temperature=1.3, memory_bytes=budget
    )
    exact = (logits / 1.3).softmax(-1).gather(1, ids)  # near ties may change places
    torch.testing.assert_close(exact, expected.values, rtol=1e-4, atol=0)
    torch.testing.assert_close(probabilities.double(), expected.values, rtol=1e-5, atol=1e-9)


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.addmm_.default:
            self.count += args[1].shape[0] * args[1].shape[1] * args[2].shape[1]
        return function(*args, **(kwargs or {}))


def test_products_with_a_gradient_and_one_without():
    hidden, weight, _, targets = make()
    hidden.requires_grad_()
    for entropy, products in ((False, 2), (True, 3)):
        options = {"memory_bytes": BUDGET, "differentiable_entropy": entropy}
        with Products() as both_passes:
            token_statistics(hidden, weight, targets, **options).logprobs.sum().backward()
        with torch.no_grad(), Products() as forward:
            token_statistics(hidden, weight, targets, **options)
        assert (both_passes.count, forward.count) == (products * N * D * V, N * D * V)


@pytest.mark.parametrize(
    ("sizes", "dtype", "scale", "rtol", "atol"),
    [
        ({"n": 37}, torch.float32, 1e-3, 1e-5, 1e-5),
        ({"n": 37}, torch.float32, 60.0, 1e-5, 1e-5),
        ({}, torch.float32, 1.0, 0, 2e-5),
        (
            {"n": 64, "d": 512, "v": 5000},
            torch.bfloat16,
            2 * 512**-0.5,
            0,
            1e-5,
        ),  # logits in bf16: off by 1e-2
        (
            {"n": 8, "d": 16, "v": 150_000},
            torch.float32,
            0.2 / 1.5,
            1e-6,
            2e-6,
        ),  # BLAS's dot product: 3e-5
    ],
    ids=["flat", "peaked", "neither", "bf16", "a large vocabulary"],
)
def test_exact_where_rounding_would_show_and_settings_are_kept(sizes, dtype, scale, rtol, atol):
    """Autocast is on, which would round the products."""
    hidden, weight, _, targets = make(dtype, **sizes)
    weight = weight * scale
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "ieee"
    with torch.autocast("cpu", torch.bfloat16):
        actual = token_statistics(hidden, weight, targets)
    after, settings.fp32_precision = settings.fp32_precision, before
    assert after == "ieee"
    for got, want in zip(actual, dense(hidden, weight, None, targets, 1.0), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("width", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_workspace_stays_within_the_budget(dtype, entropy, width):
    hidden, weight, _, targets = make(dtype, n=512, d=width, v=20_000)
    hidden.requires_grad_()
    budget = 8 << 20  # the logits would take 40 MB

    def run():
        options = {"memory_bytes": budget, "differentiable_entropy": entropy}
        token_statistics(hidden, weight, targets, **options).logprobs.sum().backward()

    run()
    results = 2 * hidden.nbytes  # the gradient, kept and scaled
    assert 0.3 * budget < peak_bytes(run) <= 1.03 * budget + results  # and values per token


def test_no_tokens_and_a_head_that_is_not_frozen():
    hidden, weight, _, targets = make()
    empty = token_statistics(hidden[:0], weight, targets[:0])
    assert [tuple(values.shape) for values in empty] == [(0,)] * 3
    with pytest.raises(ValueError, match="the head is frozen"):
        token_statistics(hidden, weight.requires_grad_(), targets)
