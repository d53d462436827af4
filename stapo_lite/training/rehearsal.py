"""The largest possible micro-batch, run before the first rollouts: if memory runs out, it does so
here, and all processes go on with the setting that fits everywhere."""

import math

import torch

from stapo_lite.algorithm.microbatches import MiniBatch, pack
from stapo_lite.training.learner import Learner
from stapo_lite.training.statistics import blank_statistics
from stapo_lite.training.update import accumulate_gradient, weigh_tokens
from stapo_lite.types import Completion, Masks, Prompt


def rehearse(learner: Learner) -> None:
    """Find a setting of the learner's memory budget with which the largest micro-batch runs forward
    and backward, without an optimiser step.

    Collective: every rank must call it.

    Raises:
        RunError: a single sequence of full length is too much.
    """
    policy = learner.policy
    states = []  # stand-ins for the optimiser's, which its first step allocates
    if not learner.optimizer.state:
        states = [torch.empty_like(p) for p in policy.parameters.values() for _ in range(2)]
    tried = None
    while tried != learner.budget.setting:
        tried = learner.budget.setting
        batch = largest_batch(learner)
        ones = torch.ones_like(batch.advantages)
        masks = Masks(
            keep=batch.loss_mask,
            silenced=~batch.loss_mask,
            amplification=ones,
            statistics=blank_statistics(batch),
            tau_h=None,
        )
        longest = len(batch.completions[0].token_ids)
        weights = weigh_tokens(masks, batch, learner.config.objective, longest, learner.reduce)
        assert weights is not None
        accumulate_gradient(learner, batch, masks, weights)
        learner.optimizer.zero_grad()
        learner.agree()
    del states


def largest_batch(learner: Learner) -> MiniBatch:
    """A mini-batch that is one micro-batch of the most tokens."""
    config, tokens = learner.config, learner.budget.setting.tokens
    rows = math.ceil(tokens / config.max_sequence_length)
    row = config.max_sequence_length if rows == 1 else tokens // rows
    prompt = Prompt("", [0] * min(config.data.max_prompt_length, row - 1), None)
    length = row - len(prompt.token_ids)
    completion = Completion(prompt, [0] * length, [0.0] * length, True, 0, advantage=1.0)
    return pack([completion] * rows, learner.policy.device)
