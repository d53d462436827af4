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
    ("card", "seconds_in_bfloat16", "other", "dtype"),
    [
        (True, 1, "bfloat16", "bfloat16"),  # Ampere
        (True, 1, "float16", "float16"),  # beside a T4
        (False, 1, "bfloat16", "float16"),
        (None, 1, "float32", "bfloat16"),
        (None, 3, "bfloat16", "float32"),
    ],
)
def test_auto_is_what_cards_or_cpu_are_fast_in(
    monkeypatch, card, seconds_in_bfloat16, other, dtype
):
    """The first of two processes, with another's answer."""

    def repeat(product, **how):
        return [4, {torch.float32: 2, torch.bfloat16: seconds_in_bfloat16}[product().dtype]]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: card)
    monkeypatch.setattr(processes.timeit, "repeat", repeat)
    monkeypatch.setattr("accelerate.utils.gather_object", lambda answers: [*answers, other])
    assert processes.resolve_dtype("auto", None) == dtype
    assert processes.resolve_dtype("float16", None) == "float16"
    in_4_bits = {"float32": "bfloat16"}.get(dtype, dtype)  # vLLM cannot compute in float32 then
    assert processes.resolve_dtype("auto", "bitsandbytes") == in_4_bits
