"""The trainer's half of fp8, on weights that are quantised by hand: vLLM's CPU build cannot."""

from types import SimpleNamespace

import pytest
import torch
from helpers import MINIMAL, fake_completions, learn, relative
from torch import nn

from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.model.fp8 import FP8Linear
from stapo_lite.model.loading import load_weights
from stapo_lite.model.one_base import base_on, check_weights
from stapo_lite.model.policy import make_policy
from stapo_lite.rollout.vllm_weights import split
from stapo_lite.types import FP8Weight

CPU = torch.device("cpu")


def quantise(weight, per_channel):
    """As vLLM does: 448 is the largest value of float8_e4m3fn."""
    largest = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max().reshape(1)
    scale = largest.float() / 448
    return FP8Weight((weight.float() / scale).to(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_is_a_linear_one_of_the_dequantised_weight(per_channel, bias):
    torch.manual_seed(0)
    plain = nn.Linear(6, 4, bias=bias).requires_grad_(False)
    layer = FP8Linear(plain, quantise(plain.weight, per_channel))
    plain.weight.copy_(layer.dequantised())
    x, theirs = (torch.randn(2, 3, 6).requires_grad_() for _ in range(2))
    theirs.data.copy_(x.data)
    for module, given in ((layer, x), (plain, theirs)):
        module(given).square().sum().backward()
    assert relative(layer(x), plain(theirs)) < 1e-6
    assert relative(x.grad, theirs.grad) < 1e-6
    assert layer.weight.grad is None


def test_by_hand():
    """448 is the largest 8-bit value; 0.5 and 7 are held exactly."""
    weight = FP8Weight(torch.tensor([[448.0, 0.5]]).to(torch.float8_e4m3fn), torch.tensor([2.0]))
    layer = FP8Linear(nn.Linear(2, 1, bias=False), weight)
    x = torch.tensor([[1.0, 3.0]], requires_grad=True)
    y = layer(x)
    assert y.item() == 2 * (448 + 1.5)
    y.backward()
    assert x.grad.tolist() == [[896.0, 1.0]]


def test_in_autocast_it_computes_in_bfloat16():
    torch.manual_seed(0)
    plain = nn.Linear(64, 32, bias=False)
    layer = FP8Linear(plain, quantise(plain.weight, True))
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert relative(y.float(), x.detach() @ layer.dequantised().T) < 0.01
    assert relative(x.grad, layer.dequantised().sum(0).expand(5, -1)) < 0.01


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


@pytest.fixture
def weights(tiny_model):
    base = load_weights(str(tiny_model), "float32")
    linears = {name for name, module in base.model.named_modules() if type(module) is nn.Linear}
    return {
        name: quantise(parameter.data, True)
        if name.removeprefix("model.").removesuffix(".weight") in linears
        else parameter.data
        for name, parameter in base.named_parameters()
    }


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_policy_in_8_bits(tiny_model, weights, checkpointing):
    """It learns, and its statistics are those of a policy with the dequantised weights."""
    config = load_config(
        MINIMAL
        | {"model": str(tiny_model), "dtype": "float32", "lora": {"r": 8}}
        | {"train": {"gradient_checkpointing": checkpointing}}
    )
    base = base_on(weights, str(tiny_model), "float32", CPU)
    check_weights(base, str(tiny_model))
    policy = make_policy(base, config)
    other = load_weights(str(tiny_model), "float32")
    for name, weight in weights.items():
        if isinstance(weight, FP8Weight):
            other.get_parameter(name).data = weight.values.float() * weight.scale
    expected = make_policy(other, config)
    for name, parameter in policy.parameters.items():
        assert torch.equal(parameter, expected.parameters[name])  # PEFT did not round it to 8 bits
    completions = fake_completions(0, [1.0] * 4)
    likelihoods = [learn(each, completions, "adamw", 1e-2) for each in (policy, expected)]
    assert likelihoods[0] == pytest.approx(likelihoods[1], rel=1e-4)
    assert likelihoods[0][-1] > likelihoods[0][0] + 1


def test_a_wrong_scale_is_noticed(tiny_model, weights):
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name]._replace(scale=1.1 * weights[name].scale)
    base = base_on(weights, str(tiny_model), "float32", CPU)
    with pytest.raises(InputError, match=f"{name} in the engine differs"):
        check_weights(base, str(tiny_model))


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["rollout.quantization=fp8", "rollout.share_base=off"],
        ["rollout.quantization=fp8", "rollout.engine=transformers"],
        ["rollout.quantization=fp8", "train.park_trainer=true"],
    ],
)
def test_8_bits_need_a_shared_base(changes):
    with pytest.raises(InputError, match="quantization=fp8 needs .*rollout.quantization=fp8"):
        load_config(MINIMAL, ["quantization=fp8", *changes])
    assert load_config(MINIMAL, ["quantization=fp8", "rollout.quantization=fp8"]).may_share_base
