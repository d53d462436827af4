"""Checkpoints: everything a run needs to continue exactly; nothing in them can run code when loaded.

Every random draw of a run follows from the seed and the step, so there is no generator state to keep.

    checkpoint-20/
        adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format
        optimizer.pt                                     the optimiser's state, read with weights_only
        state.json                                       step, counters, config, versions
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stapo_lite.config import InputError
from stapo_lite.policy import Policy

FOLDER = re.compile(r"checkpoint-(\d+)")


@dataclass
class Progress:
    """Where a run stands after a step."""

    tau_p: float
    """S2T's probability threshold, which `adaptive` moves."""
    step: int = 0
    """Steps done."""
    updates: int = 0
    """Optimiser updates done; the learning-rate schedule follows from it."""
    prompts_drawn: int = 0
    """Position in the prompt order."""


def save_checkpoint(
    run_folder: Path, progress: Progress, policy: Policy, optimizer: torch.optim.Optimizer, config: dict, limit: int
) -> Path:
    """Write `checkpoint-<step>` under a temporary name, rename it, then drop all but the newest `limit`."""
    final = run_folder / f"checkpoint-{progress.step}"
    partial = run_folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    policy.save_adapter(partial)
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    document = {
        "progress": asdict(progress),
        "config": config,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }
    (partial / "state.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in list_checkpoints(run_folder)[:-limit]:
        shutil.rmtree(old)
    return final


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore adapter and optimiser; return where the run stood."""
    policy.load_adapter(folder)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
    return Progress(**read_state(folder)["progress"])


def read_state(folder: Path) -> dict[str, Any]:
    """The checkpoint's `state.json`."""
    return json.loads((folder / "state.json").read_text(encoding="utf-8"))


def check_same_config(folder: Path, config: dict[str, Any]) -> None:
    """Whether a run with this config can continue the checkpoint exactly.

    Raises:
        InputError: a key differs that decides what the run computes; the number of steps, the folder,
            benchmarks, audit and logging do not.
    """
    before, now = (flatten(tree) for tree in (read_state(folder)["config"], config))
    free = {"output_dir", "train.max_steps"}
    shown = ("log.", "evaluation.", "audit.")
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in free and not key.startswith(shown):
            raise InputError(
                f"--resume: {key}={now.get(key)}, but {folder} was written with {before.get(key)}: set it back, "
                "or start a new run in another output_dir"
            )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [
        (int(match[1]), path) for path in run_folder.glob("checkpoint-*") if (match := FOLDER.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def latest_checkpoint(run_folder: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        InputError: there is none.
    """
    checkpoints = list_checkpoints(run_folder)
    if not checkpoints:
        raise InputError(f"--resume: output_dir={run_folder} holds no checkpoint; delete it and leave --resume out")
    return checkpoints[-1]
