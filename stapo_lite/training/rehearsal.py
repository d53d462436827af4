"""The largest possible micro-batch, run before the first rollouts: if memory runs out, it does so
here, and all processes go on with the setting that fits everywhere."""

import math

import torch

from stapo_lite.method.loss import find_factors
from stapo_lite.method.masks import find_masks
from stapo_lite.method.tokens import Tokens, blank_statistics, pack
from stapo_lite.training.learner import Learner
from stapo_lite.training.update import accumulate_gradient
from stapo_lite.types import Completion, Prompt


def rehearse(learner: Learner) -> None:
    """Find a setting of the learner's memory budget with which the largest micro-batch runs forward
    and backward, without an optimiser step.

    Collective: every rank must call it.

    Raises:
        RunError: a single sequence of full length is too much.
    """
    policy = learner.policy
    objective = learner.settings.objective
    states = []  # stand-ins for the optimiser's, which its first step allocates
    if not learner.optimizer.state:
        states = [torch.empty_like(p) for p in policy.parameters.values() for _ in range(2)]
    # When memory runs out, the budget goes on to its next setting by itself; try that one, too,
    # until a setting has run in every process.
    setting = None
    while setting != learner.budget.setting:
        setting = learner.budget.setting
        tokens = largest_batch(learner)
        masks = find_masks(blank_statistics(tokens), tokens, objective, learner.gather)
        longest = len(tokens.completions[0].token_ids)
        factor = find_factors(tokens, masks.keep, objective, longest, learner.reduce)
        accumulate_gradient(learner, tokens.with_masks(masks, factor))
        learner.optimizer.zero_grad()
        learner.agree()
    del states


def largest_batch(learner: Learner) -> Tokens:
    """A mini-batch that is one micro-batch of the most tokens."""
    settings = learner.settings
    tokens = learner.budget.setting.tokens
    rows = math.ceil(tokens / settings.max_sequence_length)
    row = settings.max_sequence_length if rows == 1 else tokens // rows
    # Mostly completions, since the LM head reads only those.
    length = min(settings.max_completion_length, row - 1)
    prompt = Prompt("", [0] * (row - length), None)
    completion = Completion(prompt, [0] * length, [0.0] * length, True, 0, advantage=1.0)
    return pack([completion] * rows, learner.policy.device, settings.objective)
