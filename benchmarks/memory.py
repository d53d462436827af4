"""Peak memory of a call, on a CPU as well as on a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from stapo_lite.planning.plan import PeakMemory


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that `run` has allocated at one time, beyond what was there before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with PeakMemory() as memory:
        run()
    return memory.peak
