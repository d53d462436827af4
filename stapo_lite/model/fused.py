"""Adapted linear layers and norms in fewer passes over memory.

A pass reads or writes a layer's whole output, and on a card passes take a third of an update. PEFT
computes `base(x) + B(A(x)) * scale` in three steps that each make a tensor of that size; here the
product with B is added into the base's output. transformers' RMSNorm casts, squares, takes the
mean, scales and casts back one after the other; torch's `rms_norm` does so in one kernel.
"""

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


def fuse(model: Any) -> None:
    """Replace the forward pass of a PeftModel's plain LoRA layers and of norms like Llama's.

    Layers in 4 bits stay PEFT's. A norm is replaced if both give the same for a random input, which
    leaves out those that multiply by `1 + weight` (Gemma, Qwen3.5).
    """
    from peft.tuners.lora.layer import Linear

    norms_by_class: dict[type, bool] = {}
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.forward = partial(_lora_forward, module)  # type: ignore[method-assign]
        elif hasattr(module, "variance_epsilon"):
            kind = type(module)
            if kind not in norms_by_class:
                norms_by_class[kind] = _agrees(module)
            if norms_by_class[kind]:
                module.forward = partial(_norm_forward, module)


class LoraProduct(torch.autograd.Function):
    """y = x W^T + bias + scale * x A^T B^T, where W and bias are frozen.

    The products run in W's dtype, the gradients of A and B get the dtype of A and B.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scale: float,
    ) -> Tensor:
        """Compute y, [..., out].

        Args:
            x: [..., in].
            weight: [out, in].
            lora_a: [r, in].
            lora_b: [out, r].
        """
        dtype = weight.dtype
        rows = x.flatten(0, -2).to(dtype)
        lora_a = lora_a.to(dtype)
        lora_b = lora_b.to(dtype)
        with torch.autocast(x.device.type, enabled=False):  # all have one dtype
            low = (rows @ lora_a.T).mul_(scale)
            y = nn.functional.linear(rows, weight, bias)
            y.addmm_(low, lora_b.T)  # into the base's output: no tensor of its size is made
        ctx.save_for_backward(rows, low, weight, lora_a, lora_b)
        ctx.scale = scale
        ctx.shape = x.shape
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, A and B from the one of y."""
        rows, low, weight, lora_a, lora_b = ctx.saved_tensors
        d_y = gradients[0].flatten(0, -2)
        d_low = (d_y @ lora_b).mul_(ctx.scale)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (d_y @ weight).addmm_(d_low, lora_a).view(ctx.shape)
        return d_x, None, None, d_low.T @ rows, d_y.T @ low, None


def _lora_forward(layer: Any, x: Tensor) -> Tensor:
    """In place of the `forward` of PEFT's `lora.Linear`."""
    base = layer.base_layer
    if layer.disable_adapters or layer.merged:
        return base(x)
    lora_a = layer.lora_A["default"].weight
    lora_b = layer.lora_B["default"].weight
    scale = layer.scaling["default"]
    return LoraProduct.apply(x, base.weight, base.bias, lora_a, lora_b, scale)


def _norm_forward(norm: Any, hidden_states: Tensor) -> Tensor:
    """In place of the `forward` of transformers' `LlamaRMSNorm` and its equals."""
    # Autocast would make an fp32 copy of the input. The kernel computes in fp32 anyway.
    with torch.autocast(hidden_states.device.type, enabled=False):
        shape = norm.weight.shape
        normed = nn.functional.rms_norm(hidden_states, shape, None, norm.variance_epsilon)
        return norm.weight * normed


def _agrees(norm: Any) -> bool:
    """Whether `_norm_forward` gives what the norm does, rounding included (OLMo rounds later)."""
    if len(signature(norm.forward).parameters) > 1:  # a gated norm
        return False
    weight = norm.weight
    x = torch.randn(2, *weight.shape, dtype=weight.dtype, device=weight.device)
    expected = norm(x).float()
    deviation = (_norm_forward(norm, x).float() - expected).norm() / expected.norm()
    # Sums in another order round one value in a hundred the other way: 0.04 of the dtype's epsilon.
    # A norm that rounds in another place is 0.2 of it away. (In fp32 only the sums differ.)
    return bool(deviation < max(0.1 * torch.finfo(weight.dtype).eps, 1e-6))
