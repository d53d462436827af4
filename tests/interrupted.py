"""A training in a child process, which a signal hits at an exact call within a run of a phase."""

import importlib
import itertools
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch

from stapo_lite.config import load_config
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.training import checkpoint
from stapo_lite.training.log import RunLog

PHASES = {  # those with the most to lose first
    "checkpoint write": (checkpoint, "save_checkpoint"),
    "log": (RunLog, "on_step_end"),
    "optimiser step": (torch.optim.AdamW, "step"),
    "snapshot": (checkpoint, "take_snapshot"),
    "update": (importlib.import_module("stapo_lite.training.loop"), "update"),
    "reward": (importlib.import_module("stapo_lite.rewards.functions").RewardModel, "score"),
    "rollout": (TransformersEngine, "generate"),
}


def watch(phase: str, on_call) -> None:
    """Have `on_call(phase, run, call)` told of each call within a phase."""
    owner, name = PHASES[phase]
    function, runs = getattr(owner, name), itertools.count()

    def watched(*arguments, **options):
        run, calls = next(runs), itertools.count()
        sys.setprofile(
            lambda frame, event, argument: (
                event in ("call", "c_call") and on_call(phase, run, next(calls))
            )
        )
        try:
            return function(*arguments, **options)
        finally:
            sys.setprofile(None)

    setattr(owner, name, watched)


def train(arguments: list[str], phase: str, moment: tuple[int, int], by: signal.Signals) -> None:
    """The command, with a signal sent to itself at the moment."""

    def on_call(_: str, run: int, call: int) -> None:
        if (run, call) == moment:
            sys.setprofile(None)
            os.kill(os.getpid(), by)

    watch(phase, on_call)
    command(arguments)


def train_with_nohup(arguments: list[str], phase: str, moment: tuple[int, int]) -> None:
    """The command as nohup starts it, with a SIGHUP at the moment."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    train(arguments, phase, moment, signal.SIGHUP)


def count(arguments: list[str], out: Path) -> None:
    """The command; writes how many calls the first and the second run of each phase made."""
    calls: dict[str, list[int]] = {phase: [0, 0] for phase in PHASES}

    def on_call(phase: str, run: int, call: int) -> None:
        if run < 2:
            calls[phase][run] = call + 1

    for phase in PHASES:
        watch(phase, on_call)
    with suppress(SystemExit):  # of status 0
        command(arguments)
    out.write_text(json.dumps(calls), encoding="utf-8")


def train_on_a_full_disk(arguments: list[str], steps: set[int]) -> None:
    """A run whose files the kernel does not let grow in some steps, as on a full disk."""
    for descriptor in (1, 2):  # they may be files, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    config = load_config(arguments[0], arguments[1:])
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with importlib.import_module("stapo_lite.assemble").open_run(config) as run:
        for metrics in importlib.import_module("stapo_lite.training.loop").train(run):
            full = min(metrics["step"] + 1, config.train.max_steps) in steps
            size = (Path(config.output_dir) / "metrics.jsonl").stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]) if full else unlimited)


def command(arguments: list[str]) -> None:
    sys.argv = ["train", *arguments]
    importlib.import_module("stapo_lite.cli").main("train")
