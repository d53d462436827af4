"""The edges of a run: who may write to its folder, what of it must be written, what ends it from outside."""

import ctypes
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from stapo_lite.checkpoint import list_checkpoints
from stapo_lite.config import InputError, RunError, one_line
from stapo_lite.tracking import read_metrics

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""There where a card's driver is loaded."""


def warn_of_unused_card() -> None:
    """Say so where the machine has an NVIDIA card that torch cannot use: an 8B model on the CPU is no error."""
    if not torch.accelerator.is_available() and NVIDIA_DRIVER.exists():
        cuda = f"is made for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for the CPU"
        logger.warning(
            "running on the CPU although there is an NVIDIA card: torch %s %s; update the driver, or install a torch "
            "that fits it (nvidia-smi shows the CUDA version that it serves)", torch.__version__, cuda,
        )  # fmt: skip


def check_no_run(folder: Path) -> None:
    """Raises InputError where the folder holds a run, which a new one would overwrite."""
    if read_metrics(folder) or list_checkpoints(folder) or (folder / "adapter").exists():
        raise InputError(f"output_dir={folder} holds a run: continue it with --resume, or choose another folder")


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Make the run folder and keep other runs out of it; a lock ends with its process, whatever ends that.

    Raises:
        InputError: another run is there, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"output_dir={folder}: cannot be written ({error.strerror})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"output_dir={folder}: another run writes to it at this moment") from None
        except OSError as error:  # a file system without locks
            logger.warning("output_dir=%s: not locked against other runs (%s)", folder, error.strerror)
        yield


@contextmanager
def full_disk_is_a_run_error(folder: Path) -> Iterator[None]:
    """For the beginning and the end of a run, where what is not written would be missing."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{folder}: cannot be written ({one_line(error)}); make room, and continue with --resume"
        ) from None


def end_on_sigterm() -> None:
    """Have SIGTERM, by which schedulers announce that they will kill, end the run like an error, with status 143."""

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    if "ACCELERATE_MIXED_PRECISION" in os.environ and sys.platform == "linux":
        # `accelerate launch` dies of a SIGTERM without passing it on; the kernel does it for us then.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore signals that would end the process, in the main thread: `accelerate launch` passes Ctrl-C on twice."""
    in_charge = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_charge else ()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that Python did not set
