"""STAPO training: rollouts, rewards, group advantages, keep-mask, clipped policy-gradient updates.

    accelerate launch -m stapo_lite.train configs/quickstart.yaml [key.sub=value ...] [--dry-run] [--resume [--force]]

Read `train` from top to bottom, then `update.py`: they are the method. docs/deviations.md lists where it
departs from the paper; first of all, a LoRA adapter trains instead of the whole model.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

from stapo_lite.algorithm.advantages import group_advantages
from stapo_lite.algorithm.microbatches import MiniBatch, cut_evenly, pack, sequence_length, split_evenly
from stapo_lite.config import Config
from stapo_lite.evaluation.exam import score
from stapo_lite.rewards.functions import overlong_share
from stapo_lite.rollout import progress_bar
from stapo_lite.training.lifecycle import card_memory
from stapo_lite.training.metrics import has_variance
from stapo_lite.training.opening import Given, open_run
from stapo_lite.training.run import Rollouts, Run
from stapo_lite.training.update import mask_inputs, measure, old_inputs, update, with_gradient
from stapo_lite.types import Completion, derived_seed

logger = logging.getLogger(__name__)


def train(
    config: Config, resume: bool = False, force: bool = False, given: Given | None = None
) -> Iterator[dict[str, Any]]:
    """Run the training; yields the metrics of each step (docs/metrics.md).

    If the caller stops iterating, the run ends there: adapter and checkpoint are written as at the last step. Several
    processes must all stop at the same step. Where a step is interrupted (an error, SIGTERM, Ctrl-C), a checkpoint of
    the step before is written.

    Args:
        resume: continue from the newest intact checkpoint in `config.output_dir`; begin where there is none.
        force: continue even though keys have changed that decide what the run computes.
        given: functions and rows of this process, in place of those that the config names.

    Raises:
        InputError: something in the config, the data or the model cannot be used; found before any
            weights are loaded, where it can be.
        RunError: a fault reached its limit (docs/faults.md), such as servers that are all lost.
    """
    with open_run(config, resume, force, given) as run:
        for step in run.steps():
            rollouts = sample_groups(run, step)
            assign_advantages(run, rollouts.batch)
            updates = [update(run.learner, batch) for batch in mini_batches(run, rollouts.batch)]
            yield run.record(step, rollouts, updates)
        evaluate(run)


def sample_groups(run: Run, step: int) -> Rollouts:
    """Sample groups of completions from the adapter as it is now, and score them.

    One round draws the batch. With dynamic sampling further rounds fill it with groups that have variance (DAPO).
    """
    train, rollout = run.config.train, run.config.rollout
    run.engine.wake()
    run.engine.publish(run.policy, version=step)
    evaluate(run)
    if rollout.max_lag:  # servers go on with the prompts of later steps while this one trains
        steps = min(1 + rollout.max_lag, train.max_steps - run.progress.step)
        ahead = run.share(steps * train.batch_size)
        run.engine.prefetch(ahead.prompts, ahead.seeds)
    rollouts, most = Rollouts(), rollout.max_sampling_rounds if rollout.dynamic_sampling else 1
    while len(rollouts.batch) < train.batch_size and rollouts.rounds < most:
        wanted = prompts_wanted(len(rollouts.batch), train.batch_size, rollouts.drawn)
        groups = sample_round(run, step, wanted, rollouts)
        rollouts.batch += [group for group in groups if not rollout.dynamic_sampling or has_variance(group)]
        del rollouts.batch[train.batch_size :]
    run.memory = [card_memory()]
    run.engine.sleep()
    run.policy.unpark()
    return rollouts


def sample_round(run: Run, step: int, wanted: int, rollouts: Rollouts) -> list[list[Completion]]:
    """Sample and score our share of the next prompts; return the groups of all processes, in the prompts' order."""
    share, seed = run.share(wanted), derived_seed(run.config.seed, run.progress.prompts_drawn)
    groups = run.sample(share.prompts, share.seeds) if share.prompts else []
    completions = list(itertools.chain(*groups))
    lags = [step - completion.adapter_version for completion in completions]
    assert all(0 <= lag <= run.config.rollout.max_lag for lag in lags), "the engine lost the adapter"
    run.progress.prompts_drawn += wanted
    rollouts.sampled += groups
    rollouts.drawn += wanted
    rollouts.rounds += 1
    run.clock.lap("rollout")
    score(completions, run.tokenizer, run.rewards, seed, step)
    everyones = sorted(gather_object(list(zip(share.places, groups, strict=True))), key=lambda pair: pair[0])
    run.clock.lap("reward")
    return [group for _, group in everyones]


def prompts_wanted(filled: int, size: int, drawn: int) -> int:
    """Prompts of the next round: a whole batch at first, then what fills it if the share of usable groups stays."""
    return min(size, math.ceil((size - filled) * drawn / filled)) if filled else size


def assign_advantages(run: Run, groups: Sequence[Sequence[Completion]]) -> None:
    """Give each completion its group advantage, of the rewards less the soft overlong punishment."""
    reward, longest = run.config.reward, run.config.rollout.max_completion_length
    for group in groups:
        shares = [overlong_share(len(c.token_ids), longest, reward.overlong_buffer) for c in group]
        penalties = [reward.overlong_penalty * share for share in shares]
        scores = [math.nan if c.reward is None else c.reward - p for c, p in zip(group, penalties, strict=True)]
        advantages = group_advantages(
            torch.tensor(scores, dtype=torch.float64), run.config.objective.scale_rewards == "group"
        )
        for completion, advantage in zip(group, advantages.tolist(), strict=True):
            completion.advantage = advantage
        if run.accelerator.is_main_process:
            run.learner.tally.add(batch_completions=len(group), overlong_penalty=sum(penalties))
    if run.accelerator.is_main_process and groups and all(c.reward is None for group in groups for c in group):
        logger.warning("no reward function judged a completion of step %d", run.progress.step + 1)


def mini_batches(run: Run, groups: Sequence[Sequence[Completion]]) -> Iterator[MiniBatch]:
    """Cut a step's groups into mini-batches; yield our share of each, as much work as that of any other process.

    All are measured here, before the step's first update: later ones need the policy as it was then.
    """
    objective, accelerator, device = run.learner.objective, run.accelerator, run.policy.device
    batches: list[MiniBatch] = []
    for part in cut_evenly(groups, run.config.train.mini_batch_size):
        inputs = old_inputs if batches else mask_inputs
        whole = list(itertools.chain(*part))
        learned, read = set(with_gradient(whole, objective)), set(inputs(whole, objective))
        # In passes: forward, again for checkpointed layers, and a backward one that counts twice; forward to be read.
        passes = [4 * (row in learned) + (row in read) for row in range(len(whole))]
        work = [count * sequence_length(completion) for count, completion in zip(passes, whole, strict=True)]
        ours = split_evenly(work, accelerator.num_processes)[accelerator.process_index]
        batches.append(pack([whole[row] for row in ours], device))
    for batch in batches[1:]:
        batch.old = measure(run.policy, batch, old_inputs(batch.completions, objective), run.learner.budget)
    trained = (batch.select(with_gradient(batch.completions, objective)) for batch in batches)
    tokens = sum(len(completion.token_ids) for completion in itertools.chain(*trained))
    with progress_bar("update", "tok", tokens) as bar:
        run.learner.on_tokens = bar.update
        yield from batches


def evaluate(run: Run) -> None:
    """Evaluate the adapter as it is now, where that is due and not yet done; the step's seconds leave it out."""
    step = run.progress.step
    if run.exam is None or step in run.log.evaluated:
        return
    if run.ended:
        run.engine.wake()
        run.engine.publish(run.policy, version=step + 1)
    elif step % run.config.evaluation.steps:
        return
    run.clock.lap("rollout")
    results = run.exam.take(run.engine, run.rewards, run.accelerator, step + 1)
    run.keep_best(results)  # before its line: who is killed between the two evaluates again
    run.log.evaluation(step, results)
    run.clock.start()
