"""How many processes a command starts, and what this machine computes in."""

from types import SimpleNamespace

import pytest
import torch

from stapo_lite.errors import InputError
from stapo_lite.model import processes


@pytest.fixture(autouse=True)
def by_hand(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "NVIDIA_DRIVER", tmp_path / "version")


@pytest.mark.parametrize(
    ("driver", "cards", "wanted", "count"),
    [
        (True, 4, None, 4),
        (True, 4, 2, 2),
        (True, 0, None, 1),
        (False, 4, None, 1),
        (False, 0, 3, 3),
    ],
)
def test_one_for_each_card_or_as_many_as_are_wanted(
    monkeypatch, tmp_path, driver, cards, wanted, count
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    if driver:
        (tmp_path / "version").touch()
    assert processes.count_processes(wanted) == count


def test_those_that_were_launched_count(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert processes.count_processes(None) == processes.count_processes(4) == 4
    assert not processes.launch(4, ["train"])
    with pytest.raises(InputError, match="--processes=2: 4 were launched"):
        processes.count_processes(2)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_a_launch_that_would_split_the_base_is_refused(monkeypatch, kind):
    """transformers would leave the second process without weights, and say nothing."""
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(InputError, match=f"accelerate's distributed_type: {kind}: .*set MULTI_GPU"):
        processes.check_launch(SimpleNamespace(num_processes=1, is_main_process=True))


@pytest.mark.parametrize(
    ("card", "features", "dtype"),
    [
        # Ampere; a T4 in a newer host
        (True, {}, "bfloat16"),
        (False, {"avx512_bf16": True}, "float16"),
        (None, {"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        (None, {"neon": True, "bf16": True}, "bfloat16"),
        (None, {"avx2": True, "avx512_f": True, "avx512_bf16": False}, "float32"),
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
