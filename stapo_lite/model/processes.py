"""The processes of a launch, and their devices, before a model is loaded."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lite.errors import InputError
from stapo_lite.machine import cores

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""A file that exists if NVIDIA's driver is loaded."""


def count_processes(wanted: int | None) -> int:
    """The number of processes in this launch; before a launch, the number wanted, or one per card.

    Raises:
        InputError: `wanted` is not the number launched.
    """
    if _is_launched():
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if wanted not in (None, launched):
            raise InputError(
                f"--processes={wanted}: {launched} were launched (WORLD_SIZE): leave it out"
            )
        return launched
    if wanted is None and NVIDIA_DRIVER.exists():
        import torch  # slow, so only with a driver

        wanted = torch.cuda.device_count()
    return wanted or 1


def launch(processes: int, command: Sequence[str]) -> bool:
    """Run a command of `stapo` in several processes of this machine and wait for them.

    It uses torch's launcher, as accelerate does, but without accelerate's configuration.

    Returns:
        False if there is nothing to launch: one process is enough, or this is one of them.

    Raises:
        SystemExit: with the status of the process that failed, or the signal that ended all.
    """
    if processes == 1 or _is_launched():
        return False
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # A process that fails has said why itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
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
    """Check a launch's processes and device; warn if torch cannot use an NVIDIA card.

    Args:
        state: accelerate's `PartialState` or `Accelerator`.

    Raises:
        InputError: accelerate silently runs fewer processes than were launched; or it is configured
            for FSDP or DeepSpeed, so that transformers would not load all weights everywhere.
    """
    import torch

    for kind in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{kind}") == "true":
            raise InputError(
                f"accelerate's distributed_type: {kind}: each process needs the whole base; set "
                "MULTI_GPU"
            )
    launched, runs = int(os.environ.get("WORLD_SIZE", "1")), state.num_processes
    if runs != launched:
        raise InputError(
            f"{launched} processes were launched, but accelerate runs {runs}: use --processes"
        )
    if state.is_main_process and not torch.accelerator.is_available() and NVIDIA_DRIVER.exists():
        logger.warning(
            "running on the CPU although there is an NVIDIA card: torch %s cannot use it; update "
            "the driver, or install a torch that fits it (nvidia-smi shows the CUDA version that "
            "the driver supports)",
            torch.__version__,
        )


def resolve_dtype(dtype: str, quantization: str | None) -> str:
    """The dtype that `auto` stands for on this machine: bfloat16 if the card, or else the CPU, has
    hardware for it; otherwise float16 on a card, and float32 on a CPU, several times faster there
    than bfloat16 (docs/results.md).

    Args:
        quantization: vLLM's. The layers of `bitsandbytes` cannot compute in float32, so they get
            bfloat16 on any CPU.
    """
    if dtype != "auto":
        return dtype
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    features = torch.cpu.get_capabilities()
    for name in ("avx512_bf16", "amx_bf16", "bf16"):
        if features.get(name):
            return "bfloat16"
    return "bfloat16" if quantization == "bitsandbytes" else "float32"
