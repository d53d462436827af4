"""STAPO training: rollouts, rewards, group advantages, keep-mask, clipped policy-gradient updates.

    accelerate launch -m stapo_lite.train configs/quickstart.yaml [key.sub=value ...]

Read `take_step` from top to bottom, then `update.py`: they are the method. docs/deviations.md lists
what differs from the paper; first of all, a LoRA adapter trains instead of the whole model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object

from stapo_lite.config import Config, Objective
from stapo_lite.data.prompts import set_text
from stapo_lite.errors import RunError
from stapo_lite.method.advantages import group_advantages
from stapo_lite.method.microbatches import cut_evenly, deal, sequence_length
from stapo_lite.method.tokens import (
    Tokens,
    pack,
    that_decide_masks,
    to_remember,
    with_gradient,
)
from stapo_lite.rewards.functions import overlong_share
from stapo_lite.training.learner import Learner
from stapo_lite.training.metrics import has_variance
from stapo_lite.training.run import Run
from stapo_lite.training.update import update
from stapo_lite.types import Completion, Rollouts, Update, derived_seed


def train(run: Run) -> Iterator[dict[str, Any]]:
    """Run the steps that are left; yields the metrics of each one (docs/metrics.md).

    If the caller stops iterating, the run ends there. Several processes must all stop at the same
    step.

    Raises:
        RunError: a fault reached its limit (docs/faults.md), such as servers that are all lost.
    """
    for step in run.steps():
        yield take_step(run, step)


def take_step(run: Run, step: int) -> dict[str, Any]:
    """Sample, reward, update: one step; returns its metrics."""
    with run.sampling(step):
        run.call("on_step_begin", step)
        rollouts = sample_groups(run, step)
    assign_advantages(rollouts.batch, run.config)
    if run.config.objective.mask_truncated_completions:
        rollouts.batch = without_truncated(rollouts.batch)
    batches = make_mini_batches(rollouts.batch, run.learner)
    run.call("on_mini_batches", batches)  # a teacher adds to their advantages
    measure_old(batches[1:], run.learner)  # for the first, the current policy is the old one
    updates = update_on_each(run, batches)
    return run.record(step, rollouts, updates)


def sample_groups(run: Run, step: int) -> Rollouts:
    """Sample groups of completions, and score them. The adapter is the current one, or with
    `rollout.max_lag` one from up to that many steps ago.

    One round draws a whole batch. Dynamic sampling (DAPO) keeps only groups whose rewards differ,
    and fills the batch in further rounds, up to `max_sampling_rounds` in all.
    """
    train, rollout = run.config.train, run.config.rollout
    if rollout.max_lag:  # servers go on with the prompts of later steps while this one trains
        steps = min(1 + rollout.max_lag, train.max_steps - run.progress.step)
        ahead = run.share(steps * train.batch_size)
        run.engine.prefetch(ahead.prompts, ahead.seeds)
    max_rounds = rollout.max_sampling_rounds if rollout.dynamic_sampling else 1
    rollouts = Rollouts()
    while len(rollouts.batch) < train.batch_size and rollouts.rounds < max_rounds:
        wanted = prompts_wanted(len(rollouts.batch), train.batch_size, rollouts.drawn)
        groups = sample_round(run, step, wanted, rollouts)
        if rollout.dynamic_sampling:
            groups = [group for group in groups if has_variance(group)]
        rollouts.batch += groups
        del rollouts.batch[train.batch_size :]
    return rollouts


def sample_round(run: Run, step: int, wanted: int, rollouts: Rollouts) -> list[list[Completion]]:
    """Sample and score our share of the next prompts; return the groups of all processes, in the
    prompts' order."""
    share = run.share(wanted)
    reward_seed = derived_seed(run.config.seed, run.progress.prompts_drawn)
    groups = run.generate(share.prompts, share.seeds) if share.prompts else []
    completions = list(chain(*groups))
    sampled = chain.from_iterable(completion.rollout_logprobs for completion in completions)
    if not all(map(math.isfinite, sampled)):
        raise RunError(
            f"rollout.engine={run.config.rollout.engine}: it gave log-probabilities that are not "
            "finite; leave out rollout.vllm, or use another version of vLLM"
        )
    run.progress.prompts_drawn += wanted
    rollouts.sampled += groups
    rollouts.drawn += wanted
    rollouts.rounds += 1
    run.clock.lap("rollout")
    decode_and_score(run, completions, reward_seed, step)
    numbered = gather_object(list(zip(share.places, groups, strict=True)))
    numbered.sort(key=lambda pair: pair[0])
    run.clock.lap("reward")
    return [group for _, group in numbered]


def prompts_wanted(filled: int, size: int, drawn: int) -> int:
    """Prompts of the next round: a whole batch at first, then enough to fill it if the share of
    usable groups stays the same."""
    return min(size, math.ceil((size - filled) * drawn / filled)) if filled else size


def decode_and_score(run: Run, completions: Sequence[Completion], seed: int, step: int) -> None:
    """Set the text of completions, their scores and their rewards."""
    for completion in completions:
        set_text(completion, run.tokenizer, run.config.rollout.skip_special_tokens)
    if completions:
        run.rewards.score(completions, seed, step)


def assign_advantages(groups: Sequence[Sequence[Completion]], config: Config) -> None:
    """Set each completion's group advantage, from rewards minus the soft overlong punishment."""
    settings, longest = config.reward, config.rollout.max_completion_length
    scores = []
    for completion in chain(*groups):
        share = overlong_share(len(completion.token_ids), longest, settings.overlong_buffer)
        completion.overlong_penalty = settings.overlong_penalty * share
        reward = math.nan if completion.reward is None else completion.reward
        scores.append(reward - completion.overlong_penalty)
    rewards = torch.tensor(scores, dtype=torch.float64)
    rewards = rewards.view(len(groups), config.rollout.num_generations)
    advantages = group_advantages(rewards, config.objective.scale_rewards).flatten().tolist()
    for completion, advantage in zip(chain(*groups), advantages, strict=True):
        completion.advantage = advantage


def without_truncated(groups: Sequence[Sequence[Completion]]) -> list[list[Completion]]:
    """The groups, with truncated completions replaced by copies with an all-False loss mask: they
    are not in the loss, nor in its denominator unless that is constant."""
    return [[leave_out(c) if c.truncated else c for c in group] for group in groups]


def leave_out(completion: Completion) -> Completion:
    """A copy that is not trained on."""
    nothing = [False] * len(completion.token_ids)
    return replace(completion, advantage=0.0, loss_mask=nothing)


def make_mini_batches(groups: Sequence[Sequence[Completion]], learner: Learner) -> list[Tokens]:
    """Cut a step's groups into mini-batches; return this process's share of each. All processes get
    about the same work."""
    config, accelerator, batches = learner.config, learner.accelerator, list[Tokens]()
    for part in cut_evenly(groups, config.train.mini_batch_size):
        completions = list(chain(*part))
        work = count_work(completions, config.objective, later=bool(batches))
        ours = deal(work, accelerator.num_processes)[accelerator.process_index]
        share = [completions[number] for number in ours]
        batches.append(pack(share, learner.policy.device, config.objective))
    return batches


def count_work(completions: Sequence[Completion], objective: Objective, later: bool) -> list[int]:
    """The work of each completion of a mini-batch: its tokens, prompt included, times its passes
    through the decoder. Training takes 4 (forward, recomputation of checkpointed layers, and
    backward, which counts twice), and measuring statistics beforehand 1.

    Args:
        later: whether the mini-batch is not the step's first.
    """
    trained = set(with_gradient(completions, objective))
    to_measure = to_remember if later else that_decide_masks
    measured = set(to_measure(completions, objective))
    work = []
    for number, completion in enumerate(completions):
        passes = 0
        if number in trained:
            passes += 4
        if number in measured:
            passes += 1
        work.append(passes * sequence_length(completion))
    return work


def measure_old(batches: Sequence[Tokens], learner: Learner) -> None:
    """Store the statistics of the policy before the step's first update, for later updates."""
    for batch in batches:
        needed = to_remember(batch.completions, learner.config.objective)
        batch.old = learner.measure(batch, needed)


def update_on_each(run: Run, batches: Sequence[Tokens]) -> list[Update]:
    """Update the policy on one mini-batch after the other."""
    updates = []
    for batch in batches:
        outcome = update(run.learner, batch)
        run.call("on_update", batch, outcome)
        # Without its tensors, which would take the next update's memory.
        updates.append(outcome._replace(masks=None, outputs=None))
    return updates
