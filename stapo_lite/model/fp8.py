"""A frozen linear layer whose weight is in 8 bits, as vLLM's online fp8 has it.

Not run on a card yet. vLLM also rounds the layer's input to 8 bits, which this layer does not.
"""

from typing import Any

import torch
from torch import Tensor, nn

from stapo_lite.types import FP8Weight


class FP8Linear(nn.Linear):
    """y = (x W^T) scale + bias, in the dtype of x, or in autocast's.

    W enters the product exactly: bfloat16 can represent every float8_e4m3fn.

    Attributes:
        weight: the values' bytes, [out, in] uint8: PEFT would give a new adapter the dtype of a
            floating-point weight.
        scale: [1] or [out, 1] fp32.
    """

    def __init__(self, linear: nn.Linear, weight: FP8Weight):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(weight.values.view(torch.uint8), requires_grad=False)
        self.scale = weight.scale
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x, self.weight.view(torch.float8_e4m3fn), self.scale)
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    """(x W^T) scale. Saves only the 8-bit weight and its scale for the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(values, scale)
        context.dtype = x.dtype
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        product = x.to(dtype) @ values.to(dtype).T
        return product.mul_(scale.flatten())  # in place: no copy in fp32

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        values, scale = context.saved_tensors
        (gradient,) = gradients
        scaled = torch.mul(gradient, scale.flatten(), out=torch.empty_like(gradient))
        return (scaled @ values.to(gradient.dtype)).to(context.dtype), None, None
