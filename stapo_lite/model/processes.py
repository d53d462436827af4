"""The processes of a launch and the device that each has, before a model is loaded."""

import logging
import os
from pathlib import Path

import torch

from stapo_lite.errors import InputError

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""There where a card's driver is loaded."""


def check_launched(num_processes: int) -> None:
    """Raises InputError where accelerate runs fewer processes than were launched; it would pass over it in silence."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes != launched:
        raise InputError(f"{launched} processes were launched, but accelerate runs {num_processes}")


def warn_of_unused_card() -> None:
    """Say so where the machine has an NVIDIA card that torch cannot use: an 8B model on the CPU is no error."""
    if not torch.accelerator.is_available() and NVIDIA_DRIVER.exists():
        cuda = f"is made for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for the CPU"
        logger.warning(
            "running on the CPU although there is an NVIDIA card: torch %s %s; update the driver, or install a torch "
            "that fits it (nvidia-smi shows the CUDA version that it serves)", torch.__version__, cuda,
        )  # fmt: skip
