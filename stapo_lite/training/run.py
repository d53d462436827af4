"""The state of a training run, and what happens at the ends of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVarTuple

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from stapo_lite.config import Config
from stapo_lite.errors import RunError, explained, one_line
from stapo_lite.model.policy import Policy
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rollout.engine import RolloutEngine
from stapo_lite.training import checkpoint
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.checkpoint import Progress, Snapshot
from stapo_lite.training.clock import Clock
from stapo_lite.training.folder import flush_logs
from stapo_lite.training.learner import Learner
from stapo_lite.training.lifecycle import full_disk_is_a_run_error
from stapo_lite.training.memory import card_memory, lent_device
from stapo_lite.training.metrics import step_metrics
from stapo_lite.training.schedule import PromptShare, learning_rate, share_of_prompts
from stapo_lite.types import Completion, Prompt, Rollouts, Update

logger = logging.getLogger(__name__)
Values = TypeVarTuple("Values")


@dataclass
class Run:
    """The state of a training run.

    Attributes:
        generate: makes groups of completions, by the engine alone or in several turns; takes and
            returns what `RolloutEngine.generate` does. With `rollout.function` it also takes
            changes of `RolloutSettings`, such as `temperature`.
        callbacks: in the order in which they are called (`callbacks.in_order`).
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
    callbacks: Sequence[Callback]
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
            # A reason that one process sets, such as the one with an evaluation's results, ends the
            # run in all.
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
        with lent_device(self.engine, self.policy, self.learner.optimizer):
            self.engine.publish(self.policy, version)
            yield
            self.memory = [card_memory()]

    def call(self, event: Callable[[Any, Run, *Values], None], *values: *Values) -> None:
        """Call every callback's method for an event; the step's seconds leave them out.

        Args:
            event: the method, such as `Callback.on_save`.
            values: its arguments after the run.

        Raises:
            RunError: a callback failed; the message names it.
        """
        with self.clock.stopped():
            for callback in self.callbacks:
                name = f"callback {type(callback).__name__}: {event.__name__}"
                with explained(f"{name} failed", kind=RunError):
                    getattr(callback, event.__name__)(self, *values)

    def upcoming_share(self, count: int) -> PromptShare:
        """This process's share of the next `count` prompts."""
        return share_of_prompts(
            self.prompts,
            self.config.seed,
            self.progress.prompts_drawn,
            count,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )

    def record(self, step: int, rollouts: Rollouts, updates: Sequence[Update]) -> dict[str, Any]:
        """End a step: compute its metrics, call the callbacks, save a checkpoint if one is due;
        returns the metrics."""
        progress = self.progress
        learner = self.learner
        progress.step = step
        progress.memory = learner.agree()
        self.memory.append(card_memory())
        self.clock.lap("update")
        # A metric without a value in this step is None.
        names = self.history[-1] if self.history else {}
        metrics = dict.fromkeys(names) | {
            "step": step,
            "peak_memory_gb": max(self.memory, key=lambda gib: gib or 0.0),
            "microbatch_tokens": learner.budget.setting.tokens,
            "learning_rate": learner.optimizer.param_groups[0]["lr"],
            **step_metrics(step, rollouts, updates, self.clock.seconds),
        }
        self.history.append(metrics)
        self.call(Callback.on_step_end, metrics, rollouts)
        if self.accelerator.is_main_process:
            self.snapshot = checkpoint.take_snapshot(progress, self.policy, learner.optimizer)
        save_steps = self.config.log.save_steps
        if self.ended or (save_steps and step % save_steps == 0):
            self.save_checkpoint()
        return metrics

    def save_checkpoint(self) -> None:
        """Write the snapshot of the last whole step, unless it is saved already; only warn if that
        fails."""
        step = self.snapshot.progress.step
        if not self.accelerator.is_main_process or step == 0:
            return
        config = self.config.model_dump(mode="json")
        limit = self.config.log.save_total_limit
        try:
            flush_logs(self.folder)
            is_new = checkpoint.save_checkpoint(
                self.folder, self.snapshot, self.policy, config, limit
            )
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, above all
            logger.warning("checkpoint-%d was not written (%s)", step, one_line(error))
            return
        if is_new:
            self.call(Callback.on_save, self.folder / f"checkpoint-{step}")

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
        self.call(Callback.on_train_end)
        self.accelerator.print(f"adapter: {self.folder / 'adapter'}")
