"""A run's surroundings: its processes and hardware, the lock of its folder, errors of a full disk, signals that end
it."""

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

from stapo_lite import __version__
from stapo_lite.config import Log
from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.files import read_object, refuse_strangers
from stapo_lite.machine import cores
from stapo_lite.model.processes import check_launch
from stapo_lite.rollout.vllm_options import vllm_version
from stapo_lite.training.checkpoint import list_checkpoints
from stapo_lite.training.tracking import ENVIRONMENT_FILE, LOGS, read_metrics

RUN_FILES = (
    "config.yaml", ENVIRONMENT_FILE, *LOGS, "checkpoint-*", ".checkpoint-*", "adapter", "best", ".best",
    "reward.png",
)  # fmt: skip
"""Names that a run writes in its folder, and nobody else may."""


def make_accelerator(log: Log, folder: Path) -> Accelerator:
    """Accelerate's view of the processes, and its trackers.

    Args:
        folder: for the trackers' files.

    Raises:
        InputError: a tracker is not installed, or `check_launch` refuses the launch.
    """
    for name in log.report_to:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"log.report_to: {name} is not installed; pip install {name}")
    # Micro-batches of many shapes would fragment the allocator's memory. The variable is read once, before CUDA starts.
    # vLLM up to 0.30 reads the old name only, and must know the setting.
    if "PYTORCH_ALLOC_CONF" in os.environ:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"]
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    on_cpu = not torch.accelerator.is_available()  # several processes on a CPU need to be told so
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))  # processes may finish sampling hours apart
    accelerator = Accelerator(
        cpu=on_cpu, log_with=list(log.report_to) or None, project_dir=folder, kwargs_handlers=[patience]
    )
    count = cores()
    if on_cpu and accelerator.num_processes == 1 and torch.get_num_threads() == 1 < count:
        print(f"running on 1 of {count} cores: accelerate launch --num_cpu_threads_per_process {count} uses all")
    check_launch(accelerator)
    return accelerator


def card_memory() -> float | None:
    """GiB of the card in use, CUDA's own and other processes' included; None without one.

    Torch's allocator keeps what an update has taken, so that this is the update's peak until the cache is emptied.
    (Torch's own count would include memory that a sleeping vLLM has freed.)
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def environment(engine: str, processes: int) -> dict[str, str]:
    """Hardware and versions of a run, for its model card and to compare when it is resumed."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU with {os.cpu_count()} cores"
    return {
        "hardware": f"{processes} x {device}" if torch.cuda.is_available() else device,
        "processes": str(processes),
        "engine": f"vllm {vllm_version()}" if engine == "vllm" else engine,
        "stapo_lite": __version__,
        **{name: version(name) for name in ("torch", "transformers", "peft", "accelerate")},
    }


def check_no_run(folder: Path, resume: bool) -> None:
    """Check that a run which starts at step 0 overwrites neither another run nor anything else.

    A run that was killed before its first step ended may begin again: all that it left is its own.

    Args:
        resume: the run there is wanted, and has no checkpoint: one that was killed before its first begins again.

    Raises:
        InputError: the folder holds a run, or a file of a name that the run would write.
    """
    if not holds_run(folder):
        refuse_strangers(folder, RUN_FILES)
        return
    ended = (folder / "adapter").exists()
    if resume and ended:
        raise InputError(f"output_dir={folder} holds a run without a checkpoint to resume: choose another folder")
    if not resume and (ended or read_metrics(folder) or list_checkpoints(folder)):
        raise InputError(f"output_dir={folder} holds a run: continue it with --resume, or choose another folder")


def holds_run(folder: Path) -> bool:
    """Whether the folder has the file that a run writes first."""
    try:
        return "stapo_lite" in read_object(folder / ENVIRONMENT_FILE)
    except InputError:
        return False


def full_disk_is_a_run_error(folder: Path) -> AbstractContextManager:
    """Raise a RunError where a file cannot be written; for start and end of a run, where nothing tries again."""
    fix = "; make room, and continue with --resume"
    return explained(f"{folder}: cannot be written", OSError, SafetensorError, fix=fix, kind=RunError)


def end_on_sigterm() -> None:
    """Make SIGTERM, which schedulers send before they kill, end the run like an error, with status 143."""

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
