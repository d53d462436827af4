"""Checkpoints: everything a run needs to continue exactly, without pickle.

Every random draw of a run follows from the seed and the step, so there is no generator state to keep.

    checkpoint-20/
        adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format
        optimizer.safetensors                            tensors of the optimiser's state
        state.json                                       step, counters, the optimiser's numbers, config, versions
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stapo_lite.config import InputError
from stapo_lite.policy import Policy

FOLDER = re.compile(r"checkpoint-(\d+)")


@dataclass
class Progress:
    """Where a run stands after a step."""

    step: int = 0
    """Steps done."""
    updates: int = 0
    """Optimiser updates done; the learning-rate schedule and the adapter version follow from it."""
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
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    state = optimizer.state_dict()["state"]
    for index, name in enumerate(policy.parameters):
        for key, value in state.get(index, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value.contiguous()
            else:
                numbers.setdefault(name, {})[key] = value
    save_file(tensors, partial / "optimizer.safetensors")
    document = {
        "progress": asdict(progress),
        "optimizer": numbers,
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
    document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    policy.load_adapter(folder)
    tensors = load_file(folder / "optimizer.safetensors")
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(policy.parameters):
        entries = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
        entries |= document["optimizer"].get(name, {})
        if entries:
            state[index] = entries
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return Progress(**document["progress"])


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
        raise InputError(f"--resume: output_dir={run_folder} holds no checkpoint; leave --resume out to start the run")
    return checkpoints[-1]
