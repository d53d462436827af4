"""A run's surroundings: processes and hardware, its folder, a full disk, signals that end it."""

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
from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.files import check_nothing_overwritten, read_object
from stapo_lite.model.processes import check_launch
from stapo_lite.rollout.vllm_options import vllm_version
from stapo_lite.training.checkpoint import list_checkpoints
from stapo_lite.training.folder import ENVIRONMENT_FILE, LOGS, read_metrics

RUN_FILES = (
    "config.yaml",
    ENVIRONMENT_FILE,
    *LOGS,
    "checkpoint-*",
    ".checkpoint-*",
    "adapter",
    "best",
    ".best",
    "reward.png",
)
"""Names that a run writes in its folder; none may exist before it starts."""


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
    # Without expandable segments, micro-batches of many shapes would fragment the allocator's
    # memory. The variable is read once, before CUDA starts; parts of vLLM read only its old name.
    if "PYTORCH_ALLOC_CONF" in os.environ:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"]
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
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


def card_memory() -> float | None:
    """GiB in use on the card, including by CUDA itself and by other processes; None without a card.

    Torch's allocator keeps what an update allocated, so this is the update's peak until the cache
    is emptied. (Torch's own count would include memory that a sleeping vLLM has freed.)
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


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


def check_no_run(folder: Path, resume: bool) -> None:
    """Check that a run that starts at step 0 overwrites nothing.

    A run killed before its first checkpoint may start again with `--resume`; one killed before its
    first step ended may also start again without it.

    Args:
        resume: whether `--resume` was given; the folder has no checkpoint.

    Raises:
        InputError: the folder holds a run, or a file that the run would write.
    """
    if not holds_run(folder):
        check_nothing_overwritten(folder, RUN_FILES)
        return
    ended = (folder / "adapter").exists()
    if resume and ended:
        raise InputError(
            f"output_dir={folder} holds a run without a checkpoint to resume: choose another folder"
        )
    if not resume and (ended or read_metrics(folder) or list_checkpoints(folder)):
        raise InputError(
            f"output_dir={folder} holds a run: continue it with --resume, or choose another folder"
        )


def holds_run(folder: Path) -> bool:
    """Whether the folder has the file that a run writes first."""
    try:
        return "stapo_lite" in read_object(folder / ENVIRONMENT_FILE)
    except InputError:
        return False


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
        sys.exit(128 + signal.SIGTERM)

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
