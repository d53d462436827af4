"""The metrics of a step (docs/metrics.md), over all processes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from stapo_lite.method.advantages import has_variance
from stapo_lite.method.metrics import Deviation, Mean, Metric, Metrics, Ratio
from stapo_lite.types import Rollouts, Update


def step_metrics(
    step: int, rollouts: Rollouts, updates: Sequence[Update], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """What a step did, the same in every process but for its seconds.

    Collective: every rank must call it.

    Args:
        seconds: of the step's phases.
    """
    seconds_step = sum(seconds.values())
    sampled = rollout_metrics(rollouts, step, seconds_step)
    return {
        "sampling_rounds": rollouts.rounds,
        "batch_groups": len(rollouts.batch),
        "updates": sum(update.changed for update in updates),
        "skipped_updates": sum(update.skipped for update in updates),
        **{f"seconds_{phase}": value for phase, value in seconds.items()},
        "seconds_step": seconds_step,
        **gather_metrics([sampled, *(update.metrics for update in updates)]),
    }


def rollout_metrics(rollouts: Rollouts, step: int, seconds: float) -> dict[str, Metric]:
    """What this process sampled for a step of so many seconds."""
    completions = list(chain(*rollouts.sampled))
    batch = list(chain(*rollouts.batch))
    # Also without a value, so that each line of the metrics has the reward.
    rewards = defaultdict[str, list[float]](list, {"": []})
    for completion in completions:
        if completion.reward is not None:
            rewards[""].append(completion.reward)
        for name, score in completion.scores.items():
            rewards[f"/{name}"].append(score)
    metrics: dict[str, Metric] = {}
    for name, values in rewards.items():
        metrics[f"reward{name}"] = Mean.of(values)
        metrics[f"reward_std{name}"] = Deviation.of(values)
    rewarded = [group for group in rollouts.sampled if any(c.reward is not None for c in group)]
    count = len(completions)
    written = sum(completion.written for completion in completions)
    nll = -sum(sum(completion.rollout_logprobs) for completion in completions)
    return metrics | {
        "zero_variance_groups": Mean.of([not has_variance(group) for group in rewarded]),
        "overlong_penalty": Mean.of([completion.overlong_penalty for completion in batch]),
        "completion_length": Mean(written, count),
        "truncated_share": Mean.of([completion.truncated for completion in completions]),
        "lag_mean": Mean.of([step - completion.adapter_version for completion in completions]),
        "sampled_nll": Mean(nll, written),
        # The processes' tokens add up, but each of them takes the same step's seconds.
        "tokens_per_second": Ratio(written, seconds / PartialState().num_processes),
    }


def gather_metrics(parts: Iterable[Metrics]) -> dict[str, float | None]:
    """The values of a step's metrics, from all parts on all processes; None if nothing was counted.

    Collective: every rank must call it.
    """
    # The host waits for the device here, once a step.
    share = [(name, metric.on_host()) for part in parts for name, metric in part.items()]
    sums: dict[str, Metric] = {}
    for name, metric in gather_object(share):
        sums[name] = sums[name] + metric if name in sums else metric
    return {name: metric.value for name, metric in sums.items()}


def gather_values(values: Tensor) -> Tensor:
    """Concatenate 1-D tensors of different lengths over the processes, in host memory.

    Collective: every rank must call it.
    """
    return torch.cat(gather_object([values.cpu()]))
