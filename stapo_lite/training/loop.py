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

from stapo_lite.config import Reward
from stapo_lite.data.texts import set_text
from stapo_lite.errors import RunError
from stapo_lite.method.advantages import (
    group_advantages,
    has_variance,
    overlong_share,
    separate_advantages,
)
from stapo_lite.method.microbatches import count_work, cut_evenly, deal
from stapo_lite.method.tokens import Tokens, pack
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.learner import Learner
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
    config = run.config
    # 1. The engine gets the current adapter, and samples several completions of each prompt. An
    #    engine in this process has the card to itself. Afterwards it sleeps, and the trainer has
    #    the card's memory.
    with run.sampling(step):
        run.call(Callback.on_step_begin, step)
        rollouts = sample_groups(run, step)
    # 2. A completion's advantage says how much better it is than the others of its group.
    #    Therefore no second model has to predict its reward.
    longest = config.rollout.max_completion_length
    assign_advantages(rollouts.batch, config.reward, config.objective.scale_rewards, longest)
    if config.objective.mask_truncated_completions:
        rollouts.batch = without_truncated(rollouts.batch)
    # 3. Each mini-batch is one update. The first update changes the policy, and later ones compare
    #    with the policy before it: measure that policy now.
    batches = make_mini_batches(rollouts.batch, config.train.mini_batch_size, run.learner)
    run.call(Callback.on_mini_batches, batches)  # a teacher adds to their advantages
    for batch in batches[1:]:
        batch.old = run.learner.measure(batch, batch.remembered)
    updates = update_on_each(run, batches)
    return run.record(step, rollouts, updates)


def sample_groups(run: Run, step: int) -> Rollouts:
    """Sample groups of completions, and score them. The adapter is the current one, or with
    `rollout.max_lag` one from up to that many steps ago.

    One round draws a whole batch. Dynamic sampling (DAPO) keeps only groups whose rewards differ,
    and fills the batch in further rounds, up to `max_sampling_rounds` in all.
    """
    train = run.config.train
    rollout = run.config.rollout
    if rollout.max_lag:
        # Servers go on with the prompts of later steps while this one trains.
        steps = min(1 + rollout.max_lag, train.max_steps - run.progress.step)
        ahead = run.upcoming_share(steps * train.batch_size)
        run.engine.prefetch(ahead.prompts, ahead.seeds)
    max_rounds = 1
    if rollout.dynamic_sampling:
        max_rounds = rollout.max_sampling_rounds
    rollouts = Rollouts()
    while len(rollouts.batch) < train.batch_size and rollouts.rounds < max_rounds:
        count = prompts_wanted(len(rollouts.batch), train.batch_size, rollouts.drawn)
        groups = sample_round(run, step, count, rollouts)
        if rollout.dynamic_sampling:
            # Where all rewards are equal, nothing could be learned. As in DAPO, a group that
            # differs only in its overlong penalties is dropped, too.
            groups = [group for group in groups if has_variance(group)]
        rollouts.batch += groups
        del rollouts.batch[train.batch_size :]  # the last round may have found too many
    return rollouts


def sample_round(run: Run, step: int, count: int, rollouts: Rollouts) -> list[list[Completion]]:
    """Sample and score this process's share of the next prompts; return the groups of all
    processes, in the prompts' order.

    Args:
        count: prompts, of all processes.
        rollouts: its counters are increased.
    """
    share = run.upcoming_share(count)
    reward_seed = derived_seed(run.config.seed, run.progress.prompts_drawn)
    groups = []
    if share.prompts:  # fewer prompts than processes leave some without one
        groups = run.generate(share.prompts, share.seeds)
    completions = list(chain(*groups))
    logprobs = chain.from_iterable(completion.rollout_logprobs for completion in completions)
    if not all(map(math.isfinite, logprobs)):
        raise RunError(
            f"rollout.engine={run.config.rollout.engine}: it gave log-probabilities that are not "
            "finite; leave out rollout.vllm, or use another version of vLLM"
        )
    run.progress.prompts_drawn += count  # only this moves on: a share just looks ahead
    rollouts.sampled += groups
    rollouts.drawn += count
    rollouts.rounds += 1
    run.clock.lap("rollout")
    decode_and_score(run, completions, reward_seed, step)
    # Each process gets all groups, since advantages and mini-batches are those of the whole batch.
    numbered = gather_object(list(zip(share.places, groups, strict=True)))
    numbered.sort(key=lambda pair: pair[0])
    run.clock.lap("reward")
    return [group for _, group in numbered]


def prompts_wanted(filled: int, size: int, drawn: int) -> int:
    """Prompts of the next round: a whole batch at first, then enough to fill it if the share of
    usable groups stays the same.

    With 12 of 16 groups from 16 prompts, the next round draws 6, of which 4 should be usable.

    Args:
        filled: usable groups so far.
        size: groups of a batch.
        drawn: prompts drawn so far.
    """
    if filled == 0:
        return size
    return min(size, math.ceil((size - filled) * drawn / filled))


def decode_and_score(run: Run, completions: Sequence[Completion], seed: int, step: int) -> None:
    """Set the text of completions, their scores and their rewards."""
    for completion in completions:
        set_text(completion, run.tokenizer, run.config.rollout.skip_special_tokens)
    if completions:
        run.rewards.score(completions, seed, step)


def assign_advantages(
    groups: Sequence[Sequence[Completion]], reward: Reward, scale: str, longest: int
) -> None:
    """Set each completion's group advantage, from its reward minus the soft overlong punishment.

    Args:
        scale: `objective.scale_rewards`.
        longest: `rollout.max_completion_length`.
    """
    completions = list(chain(*groups))
    for completion in completions:
        share = overlong_share(len(completion.token_ids), longest, reward.overlong_buffer)
        completion.overlong_penalty = reward.overlong_penalty * share
    if not groups:
        return
    penalties = [math.nan if c.reward is None else -c.overlong_penalty for c in completions]
    if scale == "each":
        scores = [[c.scores.get(name, math.nan) for c in completions] for name in reward.functions]
        # The penalty is one more reward, of its own weight.
        weights = [*(reward.weights or [1.0] * len(scores)), reward.overlong_penalty]
        parts = torch.tensor([*scores, penalties], dtype=torch.float64)
        advantages = separate_advantages(parts.view(len(parts), len(groups), -1), weights)
    else:
        rewards = [math.nan if c.reward is None else c.reward for c in completions]
        both = torch.tensor([rewards, penalties], dtype=torch.float64).sum(0)
        advantages = group_advantages(both.view(len(groups), -1), scale)
    for completion, advantage in zip(completions, advantages.flatten().tolist(), strict=True):
        completion.advantage = advantage


def without_truncated(groups: Sequence[Sequence[Completion]]) -> list[list[Completion]]:
    """The groups, in which copies that are not trained on replace truncated completions. They are
    not in the loss, nor in its denominator unless that is constant."""
    return [[leave_out(c) if c.truncated else c for c in group] for group in groups]


def leave_out(completion: Completion) -> Completion:
    """A copy that is not trained on. Without a written token it is not even measured."""
    no_token = [False] * len(completion.token_ids)
    return replace(completion, advantage=0.0, loss_mask=no_token)


def make_mini_batches(
    groups: Sequence[Sequence[Completion]], size: int, learner: Learner
) -> list[Tokens]:
    """Cut a step's groups into mini-batches; return this process's share of each. All processes get
    about the same work.

    Args:
        size: groups of a mini-batch, at most.
    """
    accelerator = learner.accelerator
    objective = learner.settings.objective
    batches: list[Tokens] = []
    for part in cut_evenly(groups, size):
        completions = list(chain(*part))
        work = count_work(completions, objective, first=not batches)
        shares = deal(work, accelerator.num_processes)
        share = [completions[number] for number in shares[accelerator.process_index]]
        batches.append(pack(share, learner.policy.device, objective))
    return batches


def update_on_each(run: Run, batches: Sequence[Tokens]) -> list[Update]:
    """Update the policy on one mini-batch after the other."""
    updates = []
    for batch in batches:
        outcome = update(run.learner, batch)
        run.call(Callback.on_update, batch, outcome)
        # Keep its numbers, and drop its tensors: the next update needs their memory.
        updates.append(outcome._replace(masks=None, outputs=None))
    return updates
