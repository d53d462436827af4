"""A run's surroundings: processes and hardware, a full disk, signals that end it."""

import ctypes
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors import SafetensorError

from stapo_lite.config import Log
from stapo_lite.errors import InputError, RunError, Terminated, explained
from stapo_lite.model.processes import check_launch
from stapo_lite.rollout.vllm_options import vllm_version


def make_accelerator(log: Log, folder: Path) -> Accelerator:
    """Set up accelerate: the processes, and the trackers.

    Args:
        folder: for the trackers' files.

    Raises:
        InputError: a tracker is not installed, or `check_launch` refuses the launch.
    """
    for name in log.report_to:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"log.report_to: {name} is not installed; pip install {name}")
    # Processes may finish sampling hours apart.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # needed for several processes on a CPU
        log_with=list(log.report_to) or None,
        project_dir=folder,
        kwargs_handlers=[patience],
    )
    check_launch(accelerator)
    return accelerator


def environment(engine: str, processes: int) -> dict[str, str]:
    """Hardware and versions of a run, for its model card and for comparison when it is resumed."""
    hardware = f"CPU with {os.cpu_count()} cores"
    if torch.cuda.is_available():
        hardware = f"{processes} x {torch.cuda.get_device_name()}"
    return {
        "hardware": hardware,
        "processes": str(processes),
        "engine": f"vllm {vllm_version()}" if engine == "vllm" else engine,
        "stapo_lite": version("stapo-lite"),
        **{name: version(name) for name in ("torch", "transformers", "peft", "accelerate")},
    }


def full_disk_is_a_run_error(folder: Path) -> AbstractContextManager:
    """Raise a RunError if a file cannot be written: for the start and end of a run, when nothing
    retries."""
    fix = "; make room, and continue with --resume"
    return explained(
        f"{folder}: cannot be written", OSError, SafetensorError, fix=fix, kind=RunError
    )


def end_on_sigterm() -> None:
    """Make SIGTERM, which schedulers send before they kill a job, end the run like an error, with
    status 143."""

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise Terminated(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    if "ACCELERATE_MIXED_PRECISION" in os.environ and sys.platform == "linux":
        # `accelerate launch` dies of a SIGTERM without passing it on, so the kernel has to.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore signals that would end the process: `accelerate launch` passes Ctrl-C on twice."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
