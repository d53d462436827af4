"""How often the model calls tools, and how often a call fails, by TRL's names."""

from itertools import chain
from typing import Any

from stapo_lite.method.metrics import Metrics, Ratio
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.metrics import gather_metrics
from stapo_lite.training.run import Run
from stapo_lite.types import Rollouts


class ToolFrequencies(Callback):
    """Adds `tools/call_frequency` and `tools/failure_frequency` to a step's metrics."""

    phase = Phase.MEASURE

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        metrics |= gather_metrics([tool_metrics(rollouts)])


def tool_metrics(rollouts: Rollouts) -> Metrics:
    """Tool calls per completion, and the share of the calls that fail, of this process's
    completions. Each call has one result among the messages."""
    completions = list(chain(*rollouts.sampled))
    messages = chain(*(completion.messages or () for completion in completions))
    results = [message["content"] for message in messages if message["role"] == "tool"]
    failures = [result for result in results if result.startswith("error: ")]
    return {
        "tools/call_frequency": Ratio(len(results), len(completions)),
        "tools/failure_frequency": Ratio(len(failures), len(results)),
    }
