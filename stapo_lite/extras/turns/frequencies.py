"""How often tools are called, and how often that fails, by TRL's names."""

from itertools import chain
from typing import Any

from stapo_lite.training.callbacks import Callback
from stapo_lite.training.metrics import Means, gather_means
from stapo_lite.training.run import Run
from stapo_lite.types import Rollouts


class ToolFrequencies(Callback):
    """Adds `tools/call_frequency` and `tools/failure_frequency` to a step's metrics."""

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        metrics |= gather_means([tool_means(rollouts)])


def tool_means(rollouts: Rollouts) -> Means:
    """Tool calls per completion, and the share of the calls that fail, in this process's part."""
    completions = list(chain(*rollouts.sampled))
    turns = chain(*(completion.messages or () for completion in completions))
    results = [turn["content"] for turn in turns if turn["role"] == "tool"]
    failed = sum(result.startswith("error: ") for result in results)
    return {
        "tools/call_frequency": (len(results), len(completions)),
        "tools/failure_frequency": (failed, len(results)),
    }
