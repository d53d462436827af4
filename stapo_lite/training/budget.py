"""The token budget of micro-batches, which memory decides."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache

from stapo_lite.algorithm.microbatches import MiniBatch, sequence_length, split_by_tokens
from stapo_lite.errors import RunError, out_of_memory

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TokenBudget:
    """The most tokens in a micro-batch, padding included; halved each time memory runs out.

    Args:
        save_memory: called if a single sequence is the largest micro-batch, which halving would not
            make smaller; returns what it changed to save memory, None if nothing is left to change.

    Attributes:
        halvings: how often the budget was halved; it is never raised again.
    """

    def __init__(
        self, tokens: int, halvings: int = 0, save_memory: Callable[[], str | None] = lambda: None
    ):
        self._tokens, self.halvings, self._save_memory = tokens, halvings, save_memory

    @property
    def tokens(self) -> int:
        return max(1, self._tokens >> self.halvings)

    def fit(self, batch: MiniBatch, rows: Sequence[int], work: Callable[[list[list[int]]], T]) -> T:
        """Run `work` on completions, split into micro-batches. If memory runs out, repeat all of it
        with smaller ones, or after `save_memory`.

        Args:
            rows: the completions' rows in the mini-batch.
            work: called with a list of rows per micro-batch; its result is returned.

        Raises:
            RunError: a single sequence is too much.
        """
        lengths = [sequence_length(completion) for completion in batch.select(rows)]
        while True:
            parts = split_by_tokens(lengths, self.tokens)
            micro_batches = [[rows[i] for i in part] for part in parts]
            try:
                return work(micro_batches)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                largest = max(parts, key=lambda part: len(part) * max(lengths[i] for i in part))
                change = self._save_memory() if len(largest) == 1 else None
                if change is None and len(parts) < len(rows):
                    self.halvings += 1
                    change = f"micro-batches have at most {self.tokens} tokens"
                if change is None:
                    raise RunError(
                        "memory ran out on a single sequence: lower rollout.max_completion_length "
                        "or train.lm_head_memory_gb (see `stapo plan`), and continue with --resume "
                        "--force"
                    ) from error
            # Only after the `except` block are the error and the tensors in its traceback freed.
            clear_device_cache(garbage_collection=True)
            logger.warning("memory ran out: from now on %s", change)
