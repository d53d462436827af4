"""What an update changes: the policy, its optimiser, and where the run stands."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from stapo_lite.config import Objective
from stapo_lite.errors import RunError
from stapo_lite.method.masks import Collective
from stapo_lite.method.tokens import Tokens, blank_statistics, scatter_into
from stapo_lite.model.policy import Policy
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.memory import MemoryBudget, MemorySetting
from stapo_lite.training.metrics import gather_values
from stapo_lite.types import TokenStatistics

logger = logging.getLogger(__name__)

MAX_SKIPPED = 5
"""The run ends after this many consecutive updates with a non-finite loss or gradient."""


@dataclass(frozen=True)
class UpdateSettings:
    """What updates need of a run's config."""

    objective: Objective
    max_grad_norm: float
    max_completion_length: int
    max_sequence_length: int
    """Tokens of the longest prompt plus the longest completion."""


@dataclass
class Learner:
    """The policy, its optimiser, and where their updates stand.

    Attributes:
        progress: of the run; skipped updates are counted there.
        budget: runs passes in micro-batches that fit into memory.
    """

    settings: UpdateSettings
    policy: Policy
    optimizer: torch.optim.Optimizer
    budget: MemoryBudget
    accelerator: Accelerator
    progress: Progress

    def __post_init__(self) -> None:
        self.gather: Collective = gather_values
        self.reduce: Collective = partial(self.accelerator.reduce, reduction="sum")

    @torch.no_grad()
    def measure(self, tokens: Tokens, chosen: Sequence[int]) -> TokenStatistics:
        """Statistics of the current policy, [N], by a pass without a gradient; 0 for the tokens of
        completions that are not chosen.

        Args:
            chosen: indices of completions.
        """
        statistics = blank_statistics(tokens)

        def work(micro_batches: Iterable[list[int]]) -> None:
            for numbers in micro_batches:
                completions = [tokens.completions[number] for number in numbers]
                part = self.policy.statistics(completions)
                scatter_into(statistics, tokens.find_places(numbers), part)

        self.budget.fit(tokens, chosen, work)
        return statistics

    def agree(self) -> MemorySetting:
        """Give all processes the memory setting of the one that has to save most; returns it.

        Collective: every rank must call it.
        """
        # The card with the least room decides, so that all processes cut their work alike.
        settings = gather_object([self.budget.setting])
        thriftiest = max(settings, key=MemorySetting.saved)
        if thriftiest != self.budget.setting:  # checkpointing layers twice would add hooks to them
            self.budget.use(thriftiest)
        return self.budget.setting

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the updates to come."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate

    def step(self) -> None:
        """Take the optimiser's step."""
        self.progress.skipped_in_a_row = 0
        # Undo a skipped update's lower scale over the next 256.
        self.progress.backoff = max(0.0, self.progress.backoff - 1 / 64)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self, grad_norm: float) -> None:
        """Drop the gradient, count the skipped update and lower float16's loss scale.

        Raises:
            RunError: too many in a row.
        """
        self.optimizer.zero_grad()
        if self.accelerator.is_main_process:
            logger.warning("update skipped: loss or gradient is not finite (norm %g)", grad_norm)
        self.progress.skipped_in_a_row += 1
        self.progress.backoff += 4  # float16 may have overflowed: try a 16th of the scale
        if self.progress.skipped_in_a_row >= MAX_SKIPPED:
            raise RunError(
                f"{self.progress.skipped_in_a_row} updates in a row had a loss or gradient that is "
                "not finite: lower train.learning_rate or choose another dtype, delete the newest "
                "checkpoints, and use --resume --force"
            )
