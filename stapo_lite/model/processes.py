"""The processes of a launch and what their devices compute in, before a model is loaded."""

import logging
import os
import timeit
from pathlib import Path
from typing import Any

from stapo_lite.errors import InputError

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""A file that exists if NVIDIA's driver is loaded."""


def check_launch(state: Any) -> None:
    """Check the processes and the device of a launch; warn if torch cannot use an NVIDIA card.

    Args:
        state: accelerate's `PartialState` or `Accelerator`.

    Raises:
        InputError: accelerate silently runs fewer processes than were launched. Or it is configured
            for FSDP or DeepSpeed, for which transformers would not load all weights everywhere.
    """
    import torch

    for kind in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{kind}") == "true":
            raise InputError(
                f"accelerate's distributed_type: {kind}: each process needs the whole base; set "
                "MULTI_GPU"
            )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != state.num_processes:
        raise InputError(
            f"{launched} processes were launched, but accelerate runs {state.num_processes}: use "
            "accelerate launch"
        )
    if state.is_main_process and not torch.accelerator.is_available() and NVIDIA_DRIVER.exists():
        logger.warning(
            "running on the CPU although there is an NVIDIA card: torch %s cannot use it; update "
            "the driver, or install a torch that fits it (nvidia-smi shows the CUDA version that "
            "the driver supports)",
            torch.__version__,
        )


def resolve_dtype(dtype: str, quantization: str | None) -> str:
    """The dtype that `auto` stands for on this machine.

    On a card it is bfloat16 if the card has matrix units for it, else float16. On a CPU it is
    whichever of bfloat16 and float32 multiplies faster. This is measured, because a CPU's
    instructions do not tell: of two CPUs with `avx512_bf16`, one has half of float32's speed in
    bfloat16, the other five times it (benchmarks/README.md).

    Collective: every rank must call it. All get the same: float16 if any card lacks bfloat16 units;
    on CPUs what the first process measured.

    Args:
        quantization: vLLM's. The layers of `bitsandbytes` cannot compute in float32, so on a CPU
            `auto` is bfloat16 for them.
    """
    if dtype != "auto":
        return dtype
    import torch
    from accelerate.utils import gather_object

    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        # In the alphabet float16 comes last: one card that needs it decides for all.
        return max(gather_object(["bfloat16" if native else "float16"]))
    if quantization == "bitsandbytes":
        return "bfloat16"

    def seconds(name: str) -> float:
        square = torch.ones(256, 256, dtype=getattr(torch, name))
        # The products are short and many, so that some of them find the cores idle.
        return min(timeit.repeat(lambda: square @ square, number=1, repeat=50))

    return gather_object([min("float32", "bfloat16", key=seconds)])[0]
