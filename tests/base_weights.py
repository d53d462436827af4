"""An oracle for a base that is built on an engine's weights: the files of its checkpoint."""

from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file

from stapo_lite.model.fp8 import FP8Linear

ROUNDING_IN_4_BITS = 0.2
"""Largest relative error (Frobenius): twice that of normally distributed weights."""
ROUNDING_IN_8_BITS = 0.06


@torch.no_grad()
def check_weights(base, model):
    """Compare every weight with its values in the file; quantised ones up to rounding."""
    stored = load_file(Path(model) / "model.safetensors")
    for name, parameter in base.named_parameters():
        path, _, kind = name.rpartition(".")
        layer, values, allowed = base.get_submodule(path), parameter.data, 0.0
        if isinstance(layer, FP8Linear) and kind == "weight":
            values = parameter.view(torch.float8_e4m3fn).float() * layer.scale
            allowed = ROUNDING_IN_8_BITS
        elif hasattr(parameter, "quant_state"):
            values, allowed = dequantize_4bit(values, parameter.quant_state), ROUNDING_IN_4_BITS
        expected = stored[name].to(values)
        assert values.shape == expected.shape, name
        difference = (values - expected).float().norm()
        assert difference <= allowed * expected.float().norm(), f"{name} differs"  # nor is it NaN
