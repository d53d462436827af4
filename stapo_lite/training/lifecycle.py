"""A run's surroundings: processes and hardware, a full disk, signals that end it."""

import importlib.util
import os
import signal
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
from stapo_lite.rewards.sandbox import end_with_parent
from stapo_lite.rollout.vllm_options import vllm_version

PACKAGES = ("torch", "transformers", "peft", "accelerate", "math-verify")
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that come before a process is killed: from schedulers (Slurm: `--signal=USR1@60`), and
from a terminal that is closed."""


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
        **{name: version(name) for name in PACKAGES},
    }


def full_disk_is_a_run_error(folder: Path) -> AbstractContextManager:
    """Raise a RunError if a file cannot be written: for the start and end of a run, when nothing
    retries."""
    fix = "; make room, and continue with --resume"
    return explained(
        f"{folder}: cannot be written", OSError, SafetensorError, fix=fix, kind=RunError
    )


def end_on_sigterm() -> None:
    """Make SIGTERM, and the other signals of ENDINGS, end the run like an error, with status 128 +
    the signal's number."""

    def end(number: int, _: Any) -> None:
        for ending in ENDINGS:  # once is enough
            signal.signal(ending, signal.SIG_IGN)
        raise Terminated(128 + number)

    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        # `accelerate launch` dies of a SIGTERM without passing it on, so the kernel has to.
        end_with_parent(signal.SIGTERM)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore signals that would end the process: `accelerate launch` passes Ctrl-C on twice."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in (signal.SIGINT, *ENDINGS):
            handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
