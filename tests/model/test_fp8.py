"""The trainer's half of fp8, on weights that are quantised by hand: vLLM's CPU build cannot."""

from types import SimpleNamespace

import pytest
import torch
from base_weights import check_weights
from helpers import MINIMAL, fake_completions, learn, relative
from torch import nn

from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.model.fp8 import FP8Linear
from stapo_lite.model.loading import load_weights
from stapo_lite.model.one_base import base_on
from stapo_lite.model.policy import make_policy
from stapo_lite.rollout.vllm_weights import split
from stapo_lite.types import FP8Weight

CPU = torch.device("cpu")


def quantise(weight, per_channel):
    """As vLLM does: 448 is the largest value of float8_e4m3fn."""
    largest = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max().reshape(1)
    scale = largest.float() / 448
    return FP8Weight((weight.float() / scale).to(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-6), (True, 0.01)])
def test_the_layer_is_that_of_the_dequantised_weight(per_channel, bias, autocast, tolerance):
    """In autocast it computes in bfloat16, and its gradient is in float32 all the same."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if autocast else torch.float32
    plain = nn.Linear(64, 32, bias=bias, dtype=dtype).requires_grad_(False)
    weight = quantise(plain.weight, per_channel)
    layer = FP8Linear(plain, weight)
    x, theirs = (torch.randn(2, 3, 64).requires_grad_() for _ in range(2))
    theirs.data.copy_(x.data)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    dequantised = weight.values.float() * weight.scale
    expected = nn.functional.linear(theirs, dequantised, plain.bias.float() if bias else None)
    assert y.dtype == dtype
    assert relative(y.float(), expected) < tolerance
    for each in (y, expected):
        each.sum().backward()
    assert x.grad.dtype == torch.float32
    assert relative(x.grad, theirs.grad) < tolerance


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_layouts_of_vllm(per_channel):
    """Transposed; of several layers by their rows, with one scale, or with one of each row."""
    rows = torch.randn(7, 6)
    whole = quantise(rows, per_channel)
    layer = SimpleNamespace(weight_scale=nn.Parameter(whole.scale), output_sizes=[4, 2, 1])
    parameter = nn.Parameter(whole.values.T, requires_grad=False)
    [alone] = split(layer, parameter, 1)
    assert torch.equal(alone.values.float(), whole.values.float())
    parts = split(layer, parameter, 3)
    assert [part.values.shape for part in parts] == [(4, 6), (2, 6), (1, 6)]
    dequantised = torch.cat([part.values.float() * part.scale for part in parts])
    assert torch.equal(dequantised, whole.values.float() * whole.scale)
    storage = parameter.untyped_storage().data_ptr()
    assert {part.values.untyped_storage().data_ptr() for part in parts} == {storage}


def test_a_layout_in_blocks_is_not_taken():
    """As in a checkpoint that was quantised before: its scales are `weight_scale_inv`, or more."""
    parameter = nn.Parameter(torch.zeros(6, 4).to(torch.float8_e4m3fn), requires_grad=False)
    assert split(SimpleNamespace(), parameter, 1) == []
    blocks = SimpleNamespace(weight_scale=torch.ones(2, 3))
    assert split(blocks, parameter, 1) == []


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_policy_in_8_bits(tiny_model, checkpointing):
    """It learns, and its statistics are those of a policy with the dequantised weights."""
    config = load_config(MINIMAL | {"model": str(tiny_model), "dtype": "float32", "lora": {"r": 8}})
    other = load_weights(config.model, "float32")
    weights = {name: parameter.data for name, parameter in other.named_parameters()}
    for name in weights:
        if name.endswith("_proj.weight"):
            weight = weights[name] = quantise(weights[name], True)
            other.get_parameter(name).data = weight.values.float() * weight.scale
    base = base_on(weights, config.model, "float32", CPU)
    check_weights(base, config.model)
    policy, expected = make_policy(base, config), make_policy(other, config)
    policy.save_memory(checkpointing, offload=False)
    for name, parameter in policy.parameters.items():
        assert torch.equal(parameter, expected.parameters[name])  # PEFT did not round it to 8 bits
    completions = fake_completions(0, [1.0] * 4)
    likelihoods = [learn(each, completions, 1e-2) for each in (policy, expected)]
    assert likelihoods[0] == pytest.approx(likelihoods[1], rel=1e-4)
    assert likelihoods[0][-1] > likelihoods[0][0] + 1


@pytest.mark.parametrize("change", [None, "share_base=off", "engine=transformers"])
def test_8_bits_need_a_shared_base(change):
    both = ["quantization=fp8", "rollout.quantization=fp8"]
    assert load_config(MINIMAL, both).may_share_base
    changes = [*both, f"rollout.{change}"] if change else both[:1]
    with pytest.raises(InputError, match="quantization=fp8 need .*rollout.quantization=fp8"):
        load_config(MINIMAL, changes)
