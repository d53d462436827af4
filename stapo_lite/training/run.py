"""The state of a training run, and what happens at the ends of its steps."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from stapo_lite.config import Config, Train
from stapo_lite.errors import RunError, explained, one_line
from stapo_lite.model.policy import Policy
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rollout.engine import RolloutEngine
from stapo_lite.training import checkpoint
from stapo_lite.training.checkpoint import Progress, Snapshot
from stapo_lite.training.folder import flush_logs
from stapo_lite.training.learner import Learner
from stapo_lite.training.lifecycle import full_disk_is_a_run_error
from stapo_lite.training.memory import card_memory
from stapo_lite.training.metrics import gather_means, rollout_means
from stapo_lite.types import Completion, Prompt, Rollouts, Update, derived_seed

logger = logging.getLogger(__name__)


class Clock:
    """Seconds of a step, by phase.

    Attributes:
        seconds: so far in this step.
    """

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Start at zero."""
        self.seconds = dict.fromkeys(("rollout", "reward", "update"), 0.0)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to phase `name`."""
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time spent in the context."""
        last, begin = self._last, time.perf_counter()
        yield
        self._last = last + time.perf_counter() - begin  # also right for nested stops


class PromptShare(NamedTuple):
    """One process's part of the next prompts."""

    places: list[int]
    """Positions among the next prompts of all processes."""
    prompts: list[Prompt]
    seeds: list[int]


@dataclass
class Run:
    """The state of a training run.

    Attributes:
        generate: makes groups of completions, by the engine alone or in several turns; takes and
            returns what `RolloutEngine.generate` does. With `rollout.function` it also takes
            changes of `RolloutSettings`, such as `temperature`.
        callbacks: objects of `training/callbacks.py`, called in this order.
        snapshot: the run after its last whole step, on the main process: what an interruption
            saves.
        history: metrics of every step.
        memory: GiB in use on the card after the step's sampling and after its updates.
        stop_reason: why the run ends before `max_steps`; callbacks set it.
    """

    config: Config
    accelerator: Accelerator
    prompts: Sequence[Prompt]
    tokenizer: Any
    rewards: RewardModel
    learner: Learner
    engine: RolloutEngine
    generate: Callable[..., list[list[Completion]]]
    callbacks: Sequence[Any]
    snapshot: Snapshot
    history: list[dict[str, Any]]
    clock: Clock = field(default_factory=Clock)
    memory: list[float | None] = field(default_factory=list)
    stop_reason: str | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output_dir)

    @property
    def policy(self) -> Policy:
        """The policy that trains."""
        return self.learner.policy

    @property
    def progress(self) -> Progress:
        """The point that the run has come to."""
        return self.learner.progress

    @property
    def ended(self) -> bool:
        """Whether no step is left."""
        return self.progress.step >= self.config.train.max_steps or self.stop_reason is not None

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left."""
        while True:
            # Set in one process, such as the one with an evaluation's results, it counts in all.
            self.stop_reason = next(filter(None, gather_object([self.stop_reason])), None)
            if self.ended:
                break
            self.clock.begin_step()
            self.learner.set_learning_rate(learning_rate(self.config.train, self.progress.step))
            yield self.progress.step + 1
        if self.stop_reason is not None:
            step = self.progress.step
            self.accelerator.print(f"{self.stop_reason}: the run ends after step {step}")

    @contextmanager
    def sampling(self, version: int) -> Iterator[None]:
        """Lend the device to the engine, with the current adapter published as `version`.
        Afterwards the engine sleeps, and the trainer has the device again."""
        with lent_device(self.engine):
            self.engine.publish(self.policy, version)
            yield
            self.memory = [card_memory()]

    def call(self, event: str, *values: Any) -> None:
        """Call every callback's method for an event; the step's seconds leave them out.

        Raises:
            RunError: a callback failed; the message names it.
        """
        with self.clock.stopped():
            for callback in self.callbacks:
                failed = f"callback {type(callback).__name__}: {event} failed"
                with explained(failed, kind=RunError):
                    getattr(callback, event)(self, *values)

    def share(self, count: int) -> PromptShare:
        """This process's share of the next `count` prompts. Order and seeds do not depend on the
        number of processes."""
        start, accelerator = self.progress.prompts_drawn, self.accelerator
        order = prompt_order(len(self.prompts), self.config.seed, start, count)
        places = [
            i
            for i in range(count)
            if (start + i) % accelerator.num_processes == accelerator.process_index
        ]
        seeds = [derived_seed(self.config.seed, start + i) for i in places]
        return PromptShare(places, [self.prompts[order[i]] for i in places], seeds)

    def record(self, step: int, rollouts: Rollouts, updates: Sequence[Update]) -> dict[str, Any]:
        """End a step: compute its metrics, call the callbacks, save a checkpoint if one is due;
        returns the metrics."""
        progress, learner = self.progress, self.learner
        progress.step = step
        progress.memory = learner.agree()
        self.memory.append(card_memory())
        self.clock.lap("update")
        # A metric without a value in this step is None.
        names = self.history[-1] if self.history else {}
        metrics = dict.fromkeys(names) | self._measure(step, rollouts, updates)
        self.history.append(metrics)
        self.call("on_step_end", metrics, rollouts)
        if self.accelerator.is_main_process:
            self.snapshot = checkpoint.take_snapshot(progress, self.policy, learner.optimizer)
        save_steps = self.config.log.save_steps
        if self.ended or (save_steps and step % save_steps == 0):
            self.save_checkpoint()
        return metrics

    def _measure(self, step: int, rollouts: Rollouts, updates: Sequence[Update]) -> dict[str, Any]:
        """The step's metrics, the same in every process but for seconds and memory."""
        seconds = {f"seconds_{name}": value for name, value in self.clock.seconds.items()}
        seconds_step = sum(seconds.values())
        sampled = rollout_means(rollouts, step)
        tokens, _ = sampled["completion_length"]
        speed = {"tokens_per_second": (tokens, seconds_step / self.accelerator.num_processes)}
        return {
            "step": step,
            "sampling_rounds": rollouts.rounds,
            "batch_groups": len(rollouts.batch),
            "peak_memory_gb": max(self.memory, key=lambda gib: gib or 0.0),
            "microbatch_tokens": self.learner.budget.setting.tokens,
            "learning_rate": self.learner.optimizer.param_groups[0]["lr"],
            "updates": sum(update.changed for update in updates),
            "skipped_updates": sum(update.skipped for update in updates),
            **seconds,
            "seconds_step": seconds_step,
            **gather_means([sampled, speed, *(update.means for update in updates)]),
        }

    def save_checkpoint(self) -> None:
        """Write the snapshot of the last whole step, unless it is saved already; only warn if that
        fails."""
        step = self.snapshot.progress.step
        if not self.accelerator.is_main_process or step == 0:
            return
        config, limit = self.config.model_dump(mode="json"), self.config.log.save_total_limit
        try:
            flush_logs(self.folder)
            written = checkpoint.save_checkpoint(
                self.folder, self.snapshot, self.policy, config, limit
            )
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, above all
            logger.warning("checkpoint-%d was not written (%s)", step, one_line(error))
            return
        if written:
            self.call("on_save", self.folder / f"checkpoint-{step}")

    def finish(self) -> None:
        """If any step was taken, write the adapter and call the callbacks.

        Raises:
            RunError: the disk is full, or a callback failed.
        """
        if self.progress.step == 0:
            return
        if self.accelerator.is_main_process:
            with full_disk_is_a_run_error(self.folder):
                flush_logs(self.folder)
                self.policy.save_adapter(self.folder / "adapter")
        self.call("on_train_end")
        self.accelerator.print(f"adapter: {self.folder / 'adapter'}")


@contextmanager
def lent_device(engine: RolloutEngine) -> Iterator[None]:
    """Wake the engine within the context; put it to sleep afterwards."""
    engine.wake()
    yield
    engine.sleep()


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of all updates of a step (steps from 0); it is never 0.

    Warm-up counts steps, as in the paper: veRL's scheduler advances once per batch of rollouts,
    whatever its mini-batches. transformers' schedules begin at 0, which would waste the first
    batch.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    left = (train.max_steps - step) / (train.max_steps - train.warmup_steps)
    factor = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
    return train.learning_rate * factor[train.lr_scheduler_type]


def prompt_order(num_prompts: int, seed: int, position: int, count: int) -> list[int]:
    """Indices of draws `position` to `position + count - 1`: each epoch a fresh permutation.

    Depends only on its arguments, so that a resumed run needs only its position.
    """
    first, last = position // num_prompts, (position + count) // num_prompts
    order: list[int] = []
    for epoch in range(first, last + 1):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order += torch.randperm(num_prompts, generator=generator).tolist()
    start = position - first * num_prompts
    return order[start : start + count]
