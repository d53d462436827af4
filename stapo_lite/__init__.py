"""STAPO: reinforcement learning of LoRA adapters that leaves out spurious tokens (arXiv
2602.15620).

    from stapo_lite import Trainer

    trainer = Trainer(config="config.yaml")
    for metrics in trainer:
        print(metrics["reward"])

What a notebook needs is here.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stapo_lite.config import Config, EvalConfig, load_config, load_eval_config
    from stapo_lite.errors import InputError, RunError
    from stapo_lite.extras.audit.page import audit
    from stapo_lite.extras.evaluation.evaluate import evaluate
    from stapo_lite.extras.publish.export import export
    from stapo_lite.trainer import Trainer
    from stapo_lite.training.callbacks import Callback

if not os.path.exists("/proc/driver/nvidia/version"):  # no card; torch's import reads both
    # vLLM's CPU backend warns of NUMA nodes that a PC lacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Threads that wait without spinning: a quarter faster on a CPU that something else uses too.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Both are read when CUDA starts. Micro-batches have many shapes, which would fragment the memory of
# torch's allocator without expandable segments; parts of vLLM read only the variable's old name.
if "PYTORCH_ALLOC_CONF" in os.environ:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"]
# WSL2's drivers refuse these segments before version 615 (pytorch#192330).
on_wsl = os.path.exists("/dev/dxg")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{not on_wsl}")
# On Hopper and later torch prefers cuDNN's attention, which is a third faster than flash, but takes
# 0.15 seconds for each new shape (benchmarks/results/gpu/attention.json).
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")

__version__ = "0.1.0"
_MODULES = {
    "Callback": "training.callbacks",
    "Config": "config",
    "EvalConfig": "config",
    "InputError": "errors",
    "Phase": "training.callbacks",
    "RunError": "errors",
    "Trainer": "trainer",
    "audit": "extras.audit.page",
    "evaluate": "extras.evaluation.evaluate",
    "export": "extras.publish.export",
    "load_config": "config",
    "load_eval_config": "config",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is asked for (PEP 562): a sandbox, for one, needs no
    torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
