"""The chunked head against a dense float64 softmax that shares no code with it."""

import pytest
import torch
from memory import peak_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from stapo_lite import lm_head
from stapo_lite.lm_head import token_statistics

N, D, V = 140, 24, 271
BUDGET = 4 * (2 * 128 * 128 + 2 * 128 * D + 128 * D)  # the smallest tiles, 128 x 128: two by three of them


def make(dtype, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(N, D, generator=generator) * 1.5).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    offset = torch.randn(V, generator=generator).to(dtype) if bias else None
    return hidden, weight, offset, torch.randint(0, V, (N,), generator=generator)


def dense(hidden, weight, bias, targets, temperature):
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    p = log_p.exp()
    return log_p[torch.arange(len(targets)), targets], -(p * log_p).sum(-1), p.square().sum(-1)


def relative(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_frozen_head_matches_dense(dtype, tolerance, bias, temperature):
    hidden, weight, offset, targets = make(dtype, bias)
    reference = hidden.double().requires_grad_()
    expected = dense(reference, weight, offset, targets, temperature)
    hidden.requires_grad_()
    actual = token_statistics(hidden, weight, targets, bias=offset, temperature=temperature, memory_bytes=BUDGET)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).abs().max() < 2e-5  # fp32-accumulated whatever the dtype of the operands
    assert not actual.entropy.requires_grad
    assert not actual.collision.requires_grad
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(1))
    (actual.logprobs * upstream).sum().backward()
    (expected[0] * upstream).sum().backward()
    assert hidden.grad.dtype == dtype
    assert relative(hidden.grad, reference.grad) < tolerance


@pytest.mark.parametrize(("k", "budget"), [(1, BUDGET), (20, BUDGET), (20, 1 << 20), (V, BUDGET)])
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)])
def test_top_tokens_match_dense(dtype, bias, k, budget):
    hidden, weight, offset, _ = make(dtype, bias)
    logits = hidden.double() @ weight.double().T + (0 if offset is None else offset.double())
    expected = (logits / 1.3).softmax(-1).topk(k)
    ids, probabilities = lm_head.top_tokens(hidden, weight, k, bias=offset, temperature=1.3, memory_bytes=budget)
    exact = (logits / 1.3).softmax(-1).gather(1, ids)  # near ties may change places
    torch.testing.assert_close(exact, expected.values, rtol=1e-4, atol=0)
    torch.testing.assert_close(probabilities.double(), expected.values, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_recomputed_head_matches_dense(bias):
    hidden, weight, offset, targets = make(torch.float32, bias)
    reference = hidden.double().requires_grad_()
    hidden.requires_grad_()
    actual = token_statistics(
        hidden, weight, targets, bias=offset, temperature=0.7, memory_bytes=3 * BUDGET, differentiable_entropy=True
    )
    expected = dense(reference, weight, offset, targets, 0.7)
    weights = torch.randn(3, N, generator=torch.Generator().manual_seed(1))
    sum((got * w).sum() for got, w in zip(actual, weights, strict=True)).backward()
    sum((want * w).sum() for want, w in zip(expected, weights, strict=True)).backward()
    for got, want in zip(actual, expected, strict=True):
        assert (got - want).abs().max() < 2e-5
    assert relative(hidden.grad, reference.grad) < 1e-5


def test_a_head_that_wants_a_gradient_is_refused():
    hidden, weight, _, targets = make(torch.float32, False)
    with pytest.raises(ValueError, match="the head is frozen"):
        token_statistics(hidden, weight.requires_grad_(), targets)


class Recorder(TorchDispatchMode):
    """Notes the largest tensor made, and the matrix products."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.multiplications = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, torch.Tensor) else []:
            self.largest = max(self.largest, tensor.numel())
        if function is torch.ops.aten.addmm_.default:
            self.multiplications += args[1].shape[0] * args[1].shape[1] * args[2].shape[1]
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_nothing_of_size_tokens_by_vocabulary(entropy):
    hidden, weight, _, targets = make(torch.float32, False)
    hidden = hidden.repeat(20, 1).requires_grad_()
    with Recorder() as recorder:
        token_statistics(
            hidden, weight, targets.repeat(20), memory_bytes=BUDGET, differentiable_entropy=entropy
        ).logprobs.sum().backward()
    assert recorder.largest <= len(hidden) * D  # the gradient itself; tokens x vocabulary is 9 times as much


def test_two_products_with_gradient_and_one_without():
    hidden, weight, _, targets = make(torch.float32, False)
    hidden.requires_grad_()
    with Recorder() as with_gradient:
        token_statistics(hidden, weight, targets, memory_bytes=BUDGET).logprobs.sum().backward()
    with torch.no_grad(), Recorder() as without:
        token_statistics(hidden, weight, targets, memory_bytes=BUDGET)
    assert with_gradient.multiplications == 2 * N * D * V
    assert without.multiplications == N * D * V


@pytest.mark.parametrize("scale", [1e-3, 60.0])
def test_flat_and_peaked_distributions(scale):
    hidden, weight, _, targets = make(torch.float32, False)
    hidden, targets = hidden[:37], targets[:37]
    actual = token_statistics(hidden * scale, weight, targets, memory_bytes=BUDGET)
    expected = dense(hidden * scale, weight, None, targets, 1.0)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_autocast_outside_does_not_round_the_logits():
    hidden, weight, _, targets = make(torch.float32, False)
    with torch.autocast("cpu", torch.bfloat16):
        actual = token_statistics(hidden, weight, targets)
    assert (actual.logprobs - dense(hidden, weight, None, targets, 1.0)[0]).abs().max() < 2e-5


@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_workspace_stays_within_the_budget(dtype, entropy, width):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(20_000, width, generator=generator).to(dtype)
    targets = torch.randint(0, 20_000, (512,), generator=generator)
    budget = 8 << 20  # the logits would take 40 MB

    def run():
        token_statistics(
            hidden, weight, targets, memory_bytes=budget, differentiable_entropy=entropy
        ).logprobs.sum().backward()

    run()
    results = 2 * hidden.nbytes  # the gradient, kept and scaled
    assert 0.3 * budget < peak_bytes(run) <= 1.03 * budget + results  # and values per token


def test_cpu_products_of_bf16_keep_fp32_accuracy_and_the_setting():
    """At a width where rounding logits to bf16 would cost 1e-2."""
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(64, 512, generator=generator)).bfloat16()
    weight = (torch.randn(5000, 512, generator=generator) * 512**-0.5).bfloat16()
    targets = torch.randint(0, 5000, (64,), generator=generator)
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "ieee"
    actual = token_statistics(hidden, weight, targets)
    after, settings.fp32_precision = settings.fp32_precision, before
    assert after == "ieee"
    for got, want in zip(actual, dense(hidden, weight, None, targets, 1.0), strict=True):
        assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("budget", [1 << 12, 1 << 20, 256 << 20])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (1000, 64), (20000, 4096)])
def test_tiles_fit_the_budget(tokens, width, budget):
    n, v = lm_head.chunk_sizes(tokens, 151_936, width, budget)
    assert n == tokens or n % 128 == 0
    assert v == 151_936 or v % 128 == 0
    if min(n, tokens) > 128 or v > 128:
        assert 4 * (2 * n * v + 2 * n * width + v * width) <= budget


def test_no_tokens():
    hidden = torch.zeros(0, D, requires_grad=True)
    actual = token_statistics(hidden, torch.zeros(V, D), torch.zeros(0, dtype=torch.long))
    assert [tuple(values.shape) for values in actual] == [(0,)] * 3


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    hidden, weight, _, targets = make(torch.float32, False)
    with pytest.raises(ValueError, match=r"weight \[V, D\]"):
        token_statistics(hidden, weight[:, :-1], targets)
    with pytest.raises(ValueError, match="cast one"):
        token_statistics(hidden, weight.bfloat16(), targets)


def test_a_large_vocabulary_adds_up_exactly():
    """A flat distribution over 150,000 tokens, where a BLAS dot product in fp32 is off by 3e-5."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 16, generator=generator)
    weight = torch.randn(150_000, 16, generator=generator) * 0.2
    targets = torch.randint(0, 150_000, (8,), generator=generator)
    actual = token_statistics(hidden, weight, targets)
    for got, want in zip(actual, dense(hidden, weight, None, targets, 1.0), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-6)
