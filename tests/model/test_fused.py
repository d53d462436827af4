"""Fused layers against PEFT's and transformers' own."""

import pytest
import torch
from families import FAMILIES, random_checkpoint
from helpers import fake_completions, rms_norm_of_a_card
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from stapo_lite.config import Lora
from stapo_lite.model.adapter import add_adapter
from stapo_lite.model.fused import LoraProduct, fuse
from stapo_lite.model.loading import load_weights
from stapo_lite.model.policy import Policy, checkpoint_layers

LORA = Lora(r=4, lora_alpha=6)


def adapted(folder, fused, dtype="float32", checkpointing=False):
    """A policy with a random adapter on every linear layer."""
    torch.manual_seed(0)
    model = add_adapter(load_weights(str(folder), dtype), LORA)
    if fused:
        fuse(model)
    policy = Policy(model, getattr(torch, dtype), 1.0, 2**20)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters.values():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.save_memory(checkpointing, offload=False)
    return policy


def passes(policy):
    """Hidden states, their gradient, and the reference's hidden states."""
    completions = fake_completions(0, [1.0, -1.0, 1.0])
    hidden = policy.hidden_states(completions)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden.float() * weights).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters.values()])
    with torch.no_grad(), policy.model.disable_adapter():
        reference = policy.hidden_states(completions)
    return hidden.detach().float(), gradient, reference.float()


def distance(values, others):
    return ((values - others).norm() / others.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_peft_and_transformers_compute(family, tmp_path):
    folder = random_checkpoint(tmp_path, FAMILIES[family])
    expected = passes(adapted(folder, fused=False))
    for checkpointing in (False, True):
        found = passes(adapted(folder, fused=True, checkpointing=checkpointing))
        for values, others in zip(found, expected, strict=True):
            # Qwen3.5: at most 8e-6 on a CPU with AVX-512, 1.1e-5 on one without.
            assert distance(values, others) < (2e-5 if "Qwen3.5" in family else 1e-5)


class Kernels(TorchDispatchMode):
    """Counts what a card would run: kernels, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.kernels = 0
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        schema = function._schema
        name = schema.name.removeprefix("aten::")
        is_view = any(a.alias_info and not a.alias_info.is_write for a in schema.arguments)
        nothing = name in ("_unsafe_view", "empty_like", "detach") or "prim" in name
        if not (is_view or nothing):
            values = tree_leaves((arguments, keywords, result))
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            self.kernels += 1
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def kernels_of_a_layer(fused, checkpointing, monkeypatch):
    """Kernels of a layer of Qwen3 in bfloat16: forward, and forward with backward."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 32}
    config = Qwen3Config(
        **sizes, vocab_size=50, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2
    )
    model = add_adapter(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), LORA)
    if fused:
        fuse(model)
    base = model.get_base_model()
    if checkpointing:
        checkpoint_layers(base)
    x = torch.randn(3, 50, 256, dtype=torch.bfloat16, requires_grad=True)
    rotation = torch.ones(1, 50, 32, dtype=torch.bfloat16)
    kernels = Kernels()
    rms_norm_of_a_card(monkeypatch)
    with kernels, torch.autocast("cpu", torch.bfloat16):
        y = base.get_decoder().layers[0](x, position_embeddings=(rotation, rotation))
        forward = kernels.kernels
        y.backward(x)
    monkeypatch.undo()
    return forward, kernels


@pytest.mark.parametrize(("checkpointing", "most"), [(False, 152), (True, 216)])
def test_a_layer_takes_few_passes_over_memory(checkpointing, most, monkeypatch):
    """PEFT and transformers take 240 kernels, 318 with checkpoints, and nearly twice the bytes."""
    before, slow = kernels_of_a_layer(False, checkpointing, monkeypatch)
    forward, fast = kernels_of_a_layer(True, checkpointing, monkeypatch)
    assert (before, forward) == (96, 65)
    assert fast.kernels <= most < 0.7 * slow.kernels
    assert fast.bytes < 0.56 * slow.bytes


@pytest.mark.parametrize("biased", [False, True])
def test_the_gradient_of_an_adapted_product(biased):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 5), (7, 5), (7,), (4, 5), (7, 4)]
    x, weight, bias, lora_a, lora_b = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    inputs = [tensor.requires_grad_() for tensor in (x, lora_a, lora_b)]

    def product(x, lora_a, lora_b):
        return LoraProduct.apply(x, weight, bias if biased else None, lora_a, lora_b, 0.5)

    expected = x @ (weight + 0.5 * lora_b @ lora_a).T + (bias if biased else 0)
    torch.testing.assert_close(product(*inputs), expected)
    assert torch.autograd.gradcheck(product, inputs)


@pytest.mark.parametrize(
    ("family", "dtype", "replaced"),
    [
        ("Qwen3", "bfloat16", True),
        ("OLMo 2", "float32", True),
        ("OLMo 2", "bfloat16", False),  # rounds after the product with the weight
        ("OLMo 2", "float16", False),
        ("Gemma 3", "bfloat16", False),
        ("Qwen3.5", "bfloat16", False),
    ],
)
def test_norms_are_replaced_if_they_give_the_same(family, dtype, replaced, tmp_path):
    policy = adapted(random_checkpoint(tmp_path, FAMILIES[family]), True, dtype)
    norms = [m for m in policy.model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms
    assert {"forward" in vars(norm) for norm in norms} == {replaced}


def test_half_precision_is_as_exact_as_with_peft(tmp_path):
    folder = random_checkpoint(tmp_path, FAMILIES["Qwen3"])
    exact, peft, fused = (
        passes(adapted(folder, fused, dtype))
        for fused, dtype in [(False, "float32"), (False, "bfloat16"), (True, "bfloat16")]
    )
    for values, others, expected in zip(fused, peft, exact, strict=True):
        assert distance(values, expected) < 1.1 * distance(others, expected)
