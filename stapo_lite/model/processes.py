"""The processes of a launch and the device that each has, before a model is loaded."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lite.errors import InputError
from stapo_lite.machine import cores

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""A file that exists where NVIDIA's driver is loaded."""


def count_processes(wanted: int | None) -> int:
    """The processes of this launch; where nothing has launched this one, those wanted, or one for each card.

    Raises:
        InputError: others are wanted than were launched.
    """
    if _is_launched():
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if wanted not in (None, launched):
            raise InputError(f"--processes={wanted}: {launched} were launched (WORLD_SIZE): leave --processes out")
        return launched
    if wanted is None and NVIDIA_DRIVER.exists():
        import torch  # slow, and of no use here without a driver

        wanted = torch.cuda.device_count()
    return wanted or 1


def launch(processes: int, command: Sequence[str]) -> bool:
    """Run a command of `stapo` in several processes of this machine and wait for them.

    It takes torch's launcher, the one that accelerate uses, without accelerate's configuration.

    Returns:
        False where there is nothing to launch: one process is enough, or this is one of them.

    Raises:
        SystemExit: a process failed, with its status, or a signal ended all.
    """
    if processes == 1 or _is_launched():
        return False
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what failed has said why
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    try:
        run.main(["--standalone", "--nproc-per-node", str(processes), "-m", "stapo_lite", *command])
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    return True


def _is_launched() -> bool:
    return "WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def check_launch(state: Any) -> None:
    """Look at the processes and the device of a launch. An NVIDIA card that torch cannot use is worth a warning: an 8B
    model on the CPU is no error.

    Args:
        state: accelerate's `PartialState` or `Accelerator`.

    Raises:
        InputError: accelerate runs fewer processes than were launched, which it does without a warning; or it is
            configured for FSDP or DeepSpeed, and transformers would leave processes without the whole weights.
    """
    import torch

    for kind in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{kind}") == "true":
            raise InputError(f"accelerate's distributed_type: {kind}: each process needs the whole base; set MULTI_GPU")
    launched, runs = int(os.environ.get("WORLD_SIZE", "1")), state.num_processes
    if runs != launched:
        raise InputError(f"{launched} processes were launched, but accelerate runs {runs}: use --processes")
    if state.is_main_process and not torch.accelerator.is_available() and NVIDIA_DRIVER.exists():
        cuda = f"is made for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for the CPU"
        logger.warning(
            "running on the CPU although there is an NVIDIA card: torch %s %s; update the driver, or install a torch "
            "that fits it (nvidia-smi shows the CUDA version that the driver supports)", torch.__version__, cuda,
        )  # fmt: skip


def resolve_dtype(dtype: str) -> str:
    """The data type that `auto` stands for here: bfloat16 where the card, or the CPU, computes in it; else float16 on a
    card, and float32 on a CPU, which is several times faster there (docs/results.md)."""
    if dtype != "auto":
        return dtype
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    features = torch.cpu.get_capabilities()
    return "bfloat16" if any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"
