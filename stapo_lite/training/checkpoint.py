"""Checkpoints: everything a run needs to continue bit for bit. Loading one runs no code from it.

    checkpoint-20/
        adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format
        optimizer.pt                                     the optimiser's state
        state.json                                       progress, config

There is no generator state to keep: every draw follows from the config's seed and `Progress`, which
gives the position in the prompt order, the seed of the next rollout, the adapter's version, the
learning rate, and the place in the metrics. A checkpoint is a `Snapshot` from the end of a step: a
run interrupted within a step (SIGTERM, an error, a failing device) saves the step before.
"""

import json
import logging
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from stapo_lite.config import Config, flatten
from stapo_lite.errors import InputError, explained
from stapo_lite.files import read_object, sync
from stapo_lite.model.adapter import load_adapter
from stapo_lite.model.policy import Policy
from stapo_lite.training.memory import MemorySetting

logger = logging.getLogger(__name__)

FOLDER = re.compile(r"checkpoint-\d{1,9}")
FREE = (
    "output_dir",
    "train.max_steps",
    "reward.function_timeout",
    "reward.probe",
    "rollout.servers",
    "rollout.self_check",
    "stop_on",
    "log.",
    "evaluation.",
)
"""Keys and sections that may change when a run is resumed, since they do not change what it
computes."""
MEMORY = {
    "train.max_tokens_per_microbatch",
    "train.gradient_checkpointing",
    "train.offload_activations",
}
"""Keys that a memory setting follows from."""
FIXED = ("lora.r", "lora.lora_alpha", "lora.use_rslora", "lora.target_modules")
"""Keys that may not change even with --force: adapter or optimiser would not fit."""


@dataclass(config=ConfigDict(extra="forbid"))
class Progress:
    """How far a run has come after a step."""

    step: NonNegativeInt = 0
    """Steps done. This is also the number of lines in the metrics file and the adapter's last
    version in the engine, and gives the learning rate."""
    prompts_drawn: NonNegativeInt = 0
    """Position in the prompt order. It gives the rollouts' seeds."""
    memory: MemorySetting | None = None
    """How updates use memory, after what has run out."""
    skipped_in_a_row: NonNegativeInt = 0
    """Consecutive updates skipped up to now."""
    backoff: NonNegativeFloat = 0.0
    """Powers of two by which float16's loss scale is lowered: plus 4 for each skipped update, minus
    1/64 for any other."""


class Snapshot(NamedTuple):
    """A run after a step, in host memory."""

    progress: Progress
    adapter: dict[str, Tensor]
    """By the names in `Policy.parameters`."""
    optimizer: dict[str, Any]
    """The optimiser's state; tensors are copies."""


def take_snapshot(progress: Progress, policy: Policy, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Copy what a checkpoint holds to host memory."""
    adapter = {name: parameter.detach() for name, parameter in policy.parameters.items()}
    state = [adapter, optimizer.state_dict()]
    copies = recursively_apply(lambda tensor: tensor.to("cpu", copy=True), state)
    return Snapshot(replace(progress), *copies)


def save_checkpoint(
    run_folder: Path, snapshot: Snapshot, policy: Policy, config: dict, limit: int
) -> bool:
    """Write `checkpoint-<step>` under a temporary name, sync it and rename it; then delete all but
    the newest `limit`.

    Returns:
        False if it was there already.

    Raises:
        Exception: it could not be written (OSError, or an error of torch or safetensors). The other
            checkpoints are as they were.
    """
    for unfinished in run_folder.glob(".checkpoint-*"):  # its process was killed
        shutil.rmtree(unfinished)
    final = run_folder / f"checkpoint-{snapshot.progress.step}"
    if final.exists():
        return False
    partial = run_folder / f".{final.name}"
    state = {"progress": asdict(snapshot.progress), "config": config}
    try:
        policy.save_adapter(partial, snapshot.adapter)
        torch.save(snapshot.optimizer, partial / "optimizer.pt")
        (partial / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        # On the disk before the folder gets its name: a checkpoint is whole or not there.
        for path in (*partial.iterdir(), partial):
            sync(path)
    except BaseException:  # on a full disk the logs need the room
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(final)
    sync(run_folder)
    for old in list_checkpoints(run_folder)[:-limit]:
        shutil.rmtree(old)
    return True


def load_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, config: Config
) -> Progress:
    """Restore adapter and optimiser; returns how far the run had come.

    Args:
        config: if a key of MEMORY has changed, no memory setting is left.

    Raises:
        InputError: they do not fit the model or the optimiser.
    """
    with explained(f"{folder}: does not fit this run"):
        state = read_object(folder / "state.json")
        load_adapter(policy.model, folder)
        moments = torch.load(folder / "optimizer.pt", "cpu", weights_only=True)  # runs no code
        # Learning rate and weight decay are those of the config.
        moments["param_groups"] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(moments)
        progress = Progress(**state["progress"])
    changed = differences(state["config"], config)
    if changed.keys() & MEMORY:
        progress.memory = None
    return progress


def check_resume(folder: Path, config: Config, force: bool) -> str:
    """Check that a checkpoint may continue with this config.

    Returns:
        A line for the user: which checkpoint continues, and what has changed.

    Raises:
        InputError: a key of FIXED has changed; or, without `force`, any other key that affects what
            the run computes.
    """
    changes = differences(read_object(folder / "state.json")["config"], config)
    changed = ", ".join(changes.values())
    for key in changes:
        if key.startswith(FIXED):
            raise InputError(f"--resume: {key} cannot change in a run ({changed}): set it back")
        # A falling learning rate depends on max_steps at every step.
        falls = key == "train.max_steps" and config.train.lr_scheduler_type != "constant"
        if (falls or not key.startswith(FREE)) and not force:
            raise InputError(
                f"--resume: the run would not be the one that {folder} began ({changed}): set the "
                "keys back, start a new run in another output_dir, or go on all the same with "
                "--force"
            )
    return f"resuming {folder}" + (f", with another config: {changed}" if changes else "")


def differences(saved: dict[str, Any], config: Config) -> dict[str, str]:
    """The keys whose values differ from a saved config's, with a description of each change."""
    before = flatten(saved)
    after = flatten(config.model_dump(mode="json"))
    return {
        key: f"{key} {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def list_checkpoints(run_folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    folders = [path for path in run_folder.glob("checkpoint-*") if FOLDER.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")))
