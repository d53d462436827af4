"""STAPO: reinforcement learning of LoRA adapters that leaves out spurious tokens (arXiv 2602.15620).

    from stapo_lite import Trainer

    trainer = Trainer("configs/quickstart.yaml")
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
    from stapo_lite.evaluation.evaluate import evaluate
    from stapo_lite.tools.audit import audit
    from stapo_lite.tools.export import export
    from stapo_lite.tools.trainer import Trainer

if not os.path.exists("/proc/driver/nvidia/version"):  # read by torch when it is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's CPU backend warns of NUMA nodes that a PC lacks
    # Threads that wait without spinning: a quarter faster on a CPU that something else uses too.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

__version__ = "0.1.0"
_MODULES = {
    "Config": "config",
    "EvalConfig": "config",
    "InputError": "errors",
    "RunError": "errors",
    "Trainer": "tools.trainer",
    "audit": "tools.audit",
    "evaluate": "evaluation.evaluate",
    "export": "tools.export",
    "load_config": "config",
    "load_eval_config": "config",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is asked for (PEP 562): a sandbox, for one, needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
