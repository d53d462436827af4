"""Checkpoints: everything a run needs to continue to the same bytes; nothing in them can run code when loaded.

    checkpoint-20/
        adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format
        optimizer.pt                                     the optimiser's state
        state.json                                       progress, config, environment

There is no generator state to keep: every draw follows from the config's seed and `Progress`, which gives the position
in the prompt order, the seed of the next rollout, the adapter's version, the learning rate, and where the metrics
continue. What is saved is a `Snapshot`, taken at the end of each step, so that a run that is interrupted within a step
(SIGTERM, an error, a device that fails) still has the step before to save.
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
from safetensors.torch import load_file
from torch import Tensor

from stapo_lite.config import S2T, flatten
from stapo_lite.errors import InputError, explained, one_line
from stapo_lite.files import read_object, sync
from stapo_lite.model.loading import load_adapter
from stapo_lite.model.policy import Policy

logger = logging.getLogger(__name__)

FOLDER = re.compile(r"checkpoint-\d{1,9}")
FREE = (
    "output_dir", "train.max_steps", "reward.function_timeout", "rollout.servers", "rollout.self_check", "stop_on",
    "log.", "evaluation.",
)  # fmt: skip
"""Keys, and sections, that may change when a run is resumed: they do not change what a run without faults computes."""
FIXED = ("lora.r", "lora.lora_alpha", "lora.use_rslora", "lora.target_modules", "train.optim")
"""Keys that may not change even with --force: adapter and optimiser would not fit."""
WEIGHTS = ("model", "rollout.model", "lora.adapter")
"""Keys whose files have a digest in the environment."""


@dataclass(config=ConfigDict(extra="forbid"))
class Progress:
    """The point that a run has come to after a step."""

    tau_p: float
    """S2T's probability threshold, which `target_share` moves."""
    step: NonNegativeInt = 0
    """Steps done, which is the number of lines in the metrics file and the adapter's last version in the engine; the
    learning rate follows from it."""
    prompts_drawn: NonNegativeInt = 0
    """Position in the prompt order; the rollouts' seeds follow from it."""
    halvings: NonNegativeInt = 0
    """How often the token budget of a micro-batch was halved because memory ran out."""
    skipped_in_a_row: NonNegativeInt = 0
    """Updates skipped since the last one that was made."""
    backoff: NonNegativeFloat = 0.0
    """Powers of two taken off float16's loss scale: four for each update skipped, less 1/64 for each one made."""


class Snapshot(NamedTuple):
    """A run after a step, in host memory."""

    progress: Progress
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any]
    """Its state; tensors are copies."""


def take_snapshot(progress: Progress, policy: Policy, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Copy what a checkpoint holds to host memory."""
    adapter = {name: p.detach() for name, p in policy.parameters.items()}
    copies = recursively_apply(lambda tensor: tensor.to("cpu", copy=True), [adapter, optimizer.state_dict()])
    return Snapshot(replace(progress), *copies)


def save_checkpoint(
    run_folder: Path, snapshot: Snapshot, policy: Policy, config: dict, environment: dict[str, str], limit: int
) -> None:
    """Write `checkpoint-<step>` under a temporary name, sync it, rename it; then drop all but the newest `limit`.

    Raises:
        Exception: it could not be written (OSError, or one of torch's or safetensors'); what was there is as it was.
    """
    for left in run_folder.glob(".checkpoint-*"):
        shutil.rmtree(left)
    final = run_folder / f"checkpoint-{snapshot.progress.step}"
    if final.exists():
        if find_damage(final) is None:
            return
        shutil.rmtree(final)
    partial = run_folder / f".{final.name}"
    try:
        policy.save_adapter(partial, snapshot.adapter)
        torch.save(snapshot.optimizer, partial / "optimizer.pt")
        document = {"progress": asdict(snapshot.progress), "config": config, "environment": environment}
        (partial / "state.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(final)
    sync(run_folder)
    written = list_checkpoints(run_folder)
    for old in written[: written.index(final) + 1][:-limit]:  # a newer one is damaged, or it would have been resumed
        shutil.rmtree(old)


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, s2t: S2T) -> Progress:
    """Restore adapter and optimiser; return where the run stood.

    Args:
        s2t: of the config, whose tau_p counts where it is another than before, or no longer moves.

    Raises:
        InputError: they do not fit the model or the optimiser.
    """
    with explained(f"{folder}: does not fit this run"):
        state = read_state(folder)
        load_adapter(policy.model, folder)
        decays = [group["weight_decay"] for group in optimizer.param_groups]  # those of the config count, too
        optimizer.load_state_dict(load_optimizer_state(folder))
        for parameter, moments in optimizer.state.items():
            for name in {"exp_avg", "exp_avg_sq", "state1", "state2"} & moments.keys():
                if moments[name].shape != parameter.shape:
                    raise ValueError(f"{name} is {tuple(moments[name].shape)}, not {tuple(parameter.shape)}")
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        progress = Progress(**state["progress"])
        if s2t.target_share is None or flatten(state["config"]).get("objective.s2t.tau_p") != s2t.tau_p:
            progress.tau_p = s2t.tau_p
        return progress


def read_state(folder: Path) -> dict[str, Any]:
    """The checkpoint's `state.json`.

    Raises:
        InputError: it lacks a part.
    """
    state = read_object(folder / "state.json")
    with explained(f"{folder}: state.json is not that of a checkpoint", TypeError, ValueError):
        if not all(isinstance(state.get(part), dict) for part in ("progress", "config", "environment")):
            raise TypeError("a part is missing")
        Progress(**state["progress"])
    return state


def check_resume(folder: Path, config: dict[str, Any], environment: dict[str, str], force: bool) -> list[str]:
    """The changes since the checkpoint was written, as lines for a person.

    Raises:
        InputError: a key differs that decides what the run computes, or the weights behind one, and `force` does not
            let it pass.
    """
    state = read_state(folder)
    before, now = flatten(state["config"]), flatten(config)
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    changes = ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in keys)
    fixed = [key for key in keys if key.startswith(FIXED)]
    if fixed:
        raise InputError(f"--resume: {fixed[0]} cannot change in a run ({changes}): set it back")
    falling = now["train.lr_scheduler_type"] != "constant"  # towards max_steps, which then decides every rate
    if not force and not all(key.startswith(FREE) and not (falling and key == "train.max_steps") for key in keys):
        raise InputError(
            f"--resume: the run would not be the one that {folder} began ({changes}): set the keys back, start a new "
            "run in another output_dir, or go on all the same with --force"
        )
    was = state["environment"]
    moved = {key: value for key, value in environment.items() if was.get(key) != value}
    weights = [f"{key}={now[key]}" for key in WEIGHTS if key in was.keys() & moved.keys() and key not in keys]
    if weights and not force:
        raise InputError(
            f"--resume: the weights of {weights[0]} are not those that {folder} was trained with: bring them back, "
            "start a new run in another output_dir, or go on all the same with --force"
        )
    moves = ", ".join(f"{key} {was.get(key)} -> {value}" for key, value in moved.items())
    notes = [f"resuming {folder}"]
    notes += [f"with another config: {changes}"] if changes else []
    notes += [f"in another environment, so that rounding and draws may differ: {moves}"] if moves else []
    return notes


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folders = [path for path in run_folder.glob("checkpoint-*") if FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The newest intact checkpoint of a run, None where it has none yet; a warning for each one that is damaged.

    Raises:
        InputError: all are.
    """
    damaged = []
    for folder in reversed(list_checkpoints(run_folder)):
        damage = find_damage(folder)
        if damage is None:
            return folder
        damaged.append(f"{folder.name}: {damage}")
        logger.warning("%s is damaged (%s): taking the one before", folder, damage)
    if damaged:
        raise InputError(f"{run_folder} holds only damaged checkpoints ({'; '.join(damaged)}): start a new run")
    return None


def find_damage(folder: Path) -> str | None:
    """Why a checkpoint cannot be read; None if it can."""
    try:
        read_state(folder)
        load_file(folder / "adapter_model.safetensors")
        load_optimizer_state(folder)
    except Exception as error:  # torch and safetensors raise errors of many kinds
        return one_line(error) or repr(error)
    return None


def load_optimizer_state(folder: Path) -> dict[str, Any]:
    """The optimiser's state in a checkpoint; reading it runs no code."""
    return torch.load(folder / "optimizer.pt", "cpu", weights_only=True)
