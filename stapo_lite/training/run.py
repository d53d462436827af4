"""The state of a training run, and the record of its steps: metrics, symptoms, checkpoints."""

import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from stapo_lite.algorithm.s2t import next_tau_p
from stapo_lite.config import Config, Train
from stapo_lite.errors import InputError, one_line
from stapo_lite.evaluation.exam import Exam, main_score
from stapo_lite.files import read_object, sync, write_text
from stapo_lite.model.policy import Policy
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rollout import RolloutEngine
from stapo_lite.training import checkpoint
from stapo_lite.training.checkpoint import Progress, Snapshot
from stapo_lite.training.guard import RULES, ending_symptom, new_symptoms
from stapo_lite.training.lifecycle import card_memory, full_disk_is_a_run_error
from stapo_lite.training.metrics import count_rollouts, step_metrics
from stapo_lite.training.push import HubMirror
from stapo_lite.training.report import write_report
from stapo_lite.training.tracking import LOGS, RunLog
from stapo_lite.training.update import Learner, Update
from stapo_lite.types import Completion, Prompt, derived_seed

logger = logging.getLogger(__name__)

BEST, NEXT_BEST = "best", ".best"
"""Folders of the best adapter, and of one that is taking its place."""
SCORE_FILE = "score.json"
"""Metric, score and step of the adapter in them, and the settings that the score depends on."""
SCORED_BY: Any = {
    "evaluation": True, "reward": True, "data": True, "rollout": {"function", "max_completion_length"},
}  # fmt: skip
UNSCORED: Any = {"evaluation": {"steps"}, "reward": {"function_timeout"}}
"""Sections and keys of these settings, and those that are none."""


Sampler = Callable[..., list[list[Completion]]]
"""As `RolloutEngine.generate`."""


class Clock:
    """Seconds of a step by what they went to.

    Attributes:
        seconds: so far in this step.
    """

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Start at zero."""
        self.seconds = dict.fromkeys(("rollout", "reward", "update"), 0.0)
        self.start()

    def start(self) -> None:
        """Start a lap now: the time since the last one is not counted."""
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap."""
        self.seconds[name] += time.perf_counter() - self._last
        self.start()


class Share(NamedTuple):
    """One process's part of the next prompts."""

    places: list[int]
    """Among the next prompts of all."""
    prompts: list[Prompt]
    seeds: list[int]


@dataclass
class Rollouts:
    """A step's groups of completions."""

    batch: list[list[Completion]] = field(default_factory=list)
    """Those to train on, of all processes."""
    sampled: list[list[Completion]] = field(default_factory=list)
    """All that this process sampled."""
    rounds: int = 0
    """Rounds of sampling."""
    drawn: int = 0
    """Prompts, on all processes."""


@dataclass
class Run:
    """The state of a training run, which the loop, the update and the record share.

    Attributes:
        environment: hardware, versions and data, as in environment.json.
        sample: groups of completions, by the engine alone or in several turns.
        exam: the evaluation during training; None where there is none.
        hub: uploads what is saved; None where no repository was named, and on other processes than the main one.
        snapshot: the run after its last whole step, on the main process: what an interruption saves.
        history: metrics of every step.
        memory: GiB of the card at the ends of the step's two phases.
        symptom: one of `stop_on` that has appeared and ends the run; None so far.
    """

    config: Config
    accelerator: Accelerator
    prompts: Sequence[Prompt]
    tokenizer: Any
    environment: dict[str, str]
    rewards: RewardModel
    learner: Learner
    engine: RolloutEngine
    sample: Sampler
    log: RunLog
    exam: Exam | None
    hub: HubMirror | None
    snapshot: Snapshot
    history: list[dict[str, Any]]
    clock: Clock = field(default_factory=Clock)
    memory: list[float | None] = field(default_factory=list)
    symptom: str | None = None

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
        return self.progress.step >= self.config.train.max_steps or self.symptom is not None

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left, until a symptom ends the run."""
        while not self.ended:
            self.clock.begin_step()
            self.learner.begin_step(learning_rate(self.config.train, self.progress.step))
            yield self.progress.step + 1
        if self.symptom is not None:
            self.accelerator.print(f"stop_on={self.symptom}: the run ends after step {self.progress.step}")

    def share(self, count: int) -> Share:
        """Our share of the next prompts: the draws do not depend on who draws."""
        start, accelerator = self.progress.prompts_drawn, self.accelerator
        order = prompt_order(len(self.prompts), self.config.seed, start, count)
        places = [i for i in range(count) if (start + i) % accelerator.num_processes == accelerator.process_index]
        seeds = [derived_seed(self.config.seed, start + i) for i in places]
        return Share(places, [self.prompts[order[i]] for i in places], seeds)

    def record(self, step: int, rollouts: Rollouts, updates: Sequence[Update | None]) -> dict[str, Any]:
        """End a step: count, log, look for symptoms, save where it is time; returns the metrics."""
        config, progress, learner = self.config, self.progress, self.learner
        progress.step = step
        progress.halvings = learner.budget.halvings = max(gather_object([learner.budget.halvings]))
        self.memory.append(card_memory())
        if config.train.park_trainer:
            self.policy.park()
        self.clock.lap("update")
        count_rollouts(learner.tally, rollouts.sampled, step)
        metrics = step_metrics(
            step,
            learner.tally.reduce(self.accelerator),
            [update for update in updates if update is not None and not update.skipped],
            self.clock.seconds,
            sampling_rounds=rollouts.rounds,
            batch_groups=len(rollouts.batch),
            skipped_updates=sum(update is not None and update.skipped for update in updates),
            peak_memory_gb=max(self.memory, key=lambda gib: gib or 0.0),
            microbatch_tokens=learner.budget.tokens,
            tau_p=progress.tau_p,
            learning_rate=learner.optimizer.param_groups[0]["lr"],
        )
        self._log(step, metrics, rollouts)
        s2t = learner.objective.s2t
        if s2t.target_share is not None and metrics["silenced_share"] is not None:
            given = config.objective.s2t.tau_p
            progress.tau_p = next_tau_p(s2t.tau_p, metrics["silenced_share"], s2t.target_share, given)
        if self.accelerator.is_main_process:
            self.snapshot = checkpoint.take_snapshot(progress, self.policy, learner.optimizer)
        if self.ended or (config.log.save_steps and step % config.log.save_steps == 0):
            self.save_checkpoint()
        return metrics

    def _log(self, step: int, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        config, is_main = self.config, self.accelerator.is_main_process
        groups = rollouts.batch or rollouts.sampled  # dynamic sampling may have dropped all
        if is_main:
            self.log.step(metrics)
            self.log.completions(step, list(itertools.chain(*groups))[: config.log.completions])
            if config.log.log_completions_steps and (step - 1) % config.log.log_completions_steps == 0:
                self.log.samples(step, groups[0])
        if self.learner.token_log is not None:
            self.learner.token_log.write(step, self.learner.objective.s2t.tau_p)
        self.history.append(metrics)
        symptoms = new_symptoms(self.history)
        for symptom in symptoms if is_main else []:
            logger.warning("step %d, %s: %s", step, symptom, RULES[symptom].cause)
        self.symptom = ending_symptom(symptoms, config.stop_on)

    def flush_logs(self) -> None:
        """Write all lines of the logs to the disk.

        Raises:
            OSError: they cannot be written.
        """
        for path in (self.folder / name for name in LOGS):
            if path.exists():
                sync(path)

    def save_checkpoint(self) -> None:
        """Write the last whole step's snapshot; a warning where it cannot be written."""
        if not self.accelerator.is_main_process or self.snapshot.progress.step == 0:
            return
        try:
            self.flush_logs()
            limit, config = self.config.log.save_total_limit, self.config.model_dump(mode="json")
            checkpoint.save_checkpoint(self.folder, self.snapshot, self.policy, config, self.environment, limit)
            if self.hub is not None:
                self.hub.push()
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, above all
            logger.warning("checkpoint-%d was not written (%s)", self.snapshot.progress.step, one_line(error))

    def keep_best(self, results: dict[str, Any] | None) -> None:
        """Write the adapter to `best/`, with its score, if it beats the one there, or if that comes from an evaluation
        with other settings; a warning if it cannot be written.

        Args:
            results: of its evaluation, on the main process.
        """
        metric, best, partial = self.config.evaluation.best, self.folder / BEST, self.folder / NEXT_BEST
        now = main_score(results, metric) if results and metric else None
        if now is None:
            return
        settings = self.config.model_dump(mode="json", include=SCORED_BY, exclude=UNSCORED)
        score = {"metric": metric, "score": now, "step": self.progress.step, "settings": settings}
        try:
            before = read_object(best / SCORE_FILE) if best.exists() else {}
            if before.get("settings") == settings and before["score"] >= now:
                return
            self.policy.save_adapter(partial)
            write_text(partial / SCORE_FILE, json.dumps(score))
            take_next_best(self.folder)
            self.accelerator.print(f"best so far: {metric} {now:.3f} after step {self.progress.step}, kept in {best}")
        except (OSError, InputError, SafetensorError) as error:
            logger.warning("%s was not written (%s)", best, one_line(error))

    def finish(self) -> None:
        """Write adapter and report, if a step was taken.

        Raises:
            RunError: the disk is full.
        """
        if not self.accelerator.is_main_process or self.progress.step == 0:
            return
        with full_disk_is_a_run_error(self.folder):
            self.flush_logs()
            self.policy.save_adapter(self.folder / "adapter")
            report = write_report(self.folder)
        print(f"{report}\nadapter: {self.folder / 'adapter'}")
        if self.hub is not None:
            self.hub.push(last=True)


def take_next_best(folder: Path) -> None:
    """Put a complete `.best` in the place of `best`, or finish doing so after a kill: either has its score file, which
    comes last and goes first, or counts as none."""
    best, new = folder / BEST, folder / NEXT_BEST
    if (new / SCORE_FILE).exists():
        (best / SCORE_FILE).unlink(missing_ok=True)
        shutil.rmtree(best, ignore_errors=True)
        new.rename(best)


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of all updates of a step (steps from 0); it is never 0.

    Warm-up counts steps, as in the paper: veRL's scheduler advances once per batch of rollouts, whatever its
    mini-batches. transformers' schedules begin at 0, which would waste the first batch.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    left = (train.max_steps - step) / (train.max_steps - train.warmup_steps)
    factor = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[train.lr_scheduler_type]
    return train.learning_rate * factor


def prompt_order(num_prompts: int, seed: int, position: int, count: int) -> list[int]:
    """Indices of draws `position` to `position + count - 1`: each epoch a fresh permutation.

    A function of its arguments alone, so a resumed run continues the order by knowing its position.
    """
    order: list[int] = []
    for draw in range(position, position + count):
        epoch, index = divmod(draw, num_prompts)
        if not order or index == 0:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            permutation = torch.randperm(num_prompts, generator=generator)
        order.append(int(permutation[index]))
    return order
