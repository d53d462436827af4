"""Peak memory of a call, on a CPU or a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that `run` holds at one time, beyond what was allocated before."""
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


class PeakMemory(TorchDispatchMode):
    """Counts the storages that operators make inside the block, without their internal workspace.

    Attributes:
        peak: the most bytes at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes = WeakIdKeyDictionary()  # storage -> bytes; 0 if made outside

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for storage in _storages((args, kwargs)):
            self._sizes.setdefault(storage, 0)
        result = function(*args, **(kwargs or {}))
        new = [storage for storage in _storages(result) if storage not in self._sizes]
        for storage in new:
            self._sizes[storage] = storage.nbytes()
        if new:
            self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
