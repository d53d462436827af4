"""An oracle for a base that is built on an engine's weights: the files of its checkpoint."""

from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file

ROUNDING_IN_4_BITS = 0.2
"""Largest relative error (Frobenius): twice that of normally distributed weights."""


@torch.no_grad()
def check_weights(base, model):
    """Compare every weight with its values in the file; quantised ones up to rounding."""
    stored = load_file(Path(model) / "model.safetensors")
    for name, parameter in base.named_parameters():
        values = parameter.data
        allowed = 0.0
        if hasattr(parameter, "quant_state"):
            values = dequantize_4bit(values, parameter.quant_state)
            allowed = ROUNDING_IN_4_BITS
        expected = stored[name].to(values)
        assert values.shape == expected.shape, name
        difference = (values - expected).float().norm()
        assert difference <= allowed * expected.float().norm(), f"{name} differs"  # nor is it NaN
