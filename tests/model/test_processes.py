"""What a launch may be, and what this machine computes in."""

from types import SimpleNamespace

import pytest
import torch

from stapo_lite.errors import InputError
from stapo_lite.model import processes


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        # transformers would leave the second process without weights, and say nothing.
        ("ACCELERATE_USE_FSDP", "true", "distributed_type: FSDP: .*set MULTI_GPU"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "distributed_type: DEEPSPEED: .*set MULTI_GPU"),
        ("WORLD_SIZE", "4", "4 processes were launched, but accelerate runs 1"),
    ],
)
def test_a_launch_that_would_split_base_or_run_is_refused(monkeypatch, name, value, problem):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=problem):
        processes.check_launch(SimpleNamespace(num_processes=1, is_main_process=True))


@pytest.mark.parametrize(
    ("card", "features", "dtype"),
    [
        # Ampere; a T4 in a newer host
        (True, {}, "bfloat16"),
        (False, {"avx512_bf16": True}, "float16"),
        (None, {"avx512_bf16": True, "amx_bf16": True}, "bfloat16"),
        (None, {"neon": True, "bf16": True}, "bfloat16"),
        (None, {"avx2": True, "avx512_f": True, "avx512_bf16": True}, "float32"),
    ],
)
def test_auto_is_what_card_or_cpu_computes_in(monkeypatch, card, features, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: card)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert processes.resolve_dtype("auto", None) == dtype
    assert processes.resolve_dtype("float16", None) == "float16"
    in_4_bits = {"float32": "bfloat16"}.get(dtype, dtype)  # vLLM cannot compute in float32 then
    assert processes.resolve_dtype("auto", "bitsandbytes") == in_4_bits
