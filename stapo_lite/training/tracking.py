"""The side of a run that a person sees: the metrics file, one line per step, samples, accelerate's trackers."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from stapo_lite.errors import InputError, one_line
from stapo_lite.evaluation.results import results_table
from stapo_lite.files import Journal, read_lines, write_lines
from stapo_lite.types import Completion

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
ENVIRONMENT_FILE = "environment.json"
TOKENS_FILE = "tokens.jsonl"
QUADRANTS_FILE = "quadrants.jsonl"


TRL_METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward": "reward",
    "reward_std": "reward_std",
    "zero_variance_groups": "frac_reward_zero_std",
    "completion_length": "completions/mean_length",
    "truncated_share": "completions/clipped_ratio",
    "entropy": "entropy",
    "kl": "kl",
    "clip_low_share": "clip_ratio/low_mean",
    "clip_high_share": "clip_ratio/high_mean",
    "sampler_gap_mean": "sampling/sampling_logp_difference/mean",
    "sampler_gap_max": "sampling/sampling_logp_difference/max",
    "seconds_step": "step_time",
}
"""Our metric -> the one that TRL's GRPOTrainer logs."""


def trl_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """A step's metrics under the names by which trackers have those of TRL's GRPOTrainer, so that runs overlay."""
    named = {f"train/{TRL_METRICS[name]}": value for name, value in metrics.items() if name in TRL_METRICS}
    for name, value in metrics.items():
        kind, _, function = name.partition("/")
        if function:
            part = {"reward": "mean", "reward_std": "std"}[kind]
            named[f"train/rewards/{function.rpartition(':')[2]}/{part}"] = value
    return named


class RunLog:
    """Writes a run's metrics, on the main process only.

    Args:
        start_step: of a resumed run; later lines of its metrics file are dropped. 0 for a new one.
    """

    def __init__(self, folder: Path, max_steps: int, start_step: int, accelerator: Accelerator):
        self._accelerator = accelerator
        self._max_steps = max_steps
        if accelerator.is_main_process:
            # Not what a new run, or the steps to come, will write again; also where the token log is off by now.
            names = (METRICS_FILE, EVALUATIONS_FILE, TOKENS_FILE, QUADRANTS_FILE)
            before = {folder / name: read_lines(folder / name) for name in names if (folder / name).exists()}
            for path, lines in before.items():
                write_lines(path, [line for line in lines if line["step"] <= start_step and start_step])
        accelerator.wait_for_everyone()
        self._steps, self._evaluations = Journal(folder / METRICS_FILE), Journal(folder / EVALUATIONS_FILE)
        self._evaluated = {line["step"] for line in read_lines(folder / EVALUATIONS_FILE)}

    def start_trackers(self, project: str, config: dict[str, str]) -> None:
        """Start accelerate's trackers."""
        with self._untracked():
            self._accelerator.init_trackers(project, config)

    def _track(self, values: dict[str, Any], step: int) -> None:
        with self._untracked():
            self._accelerator.log(values, step=step)

    def close(self) -> None:
        """Finish the trackers."""
        with self._untracked():
            for tracker in self._accelerator.trackers:
                tracker.finish()

    @contextmanager
    def _untracked(self) -> Iterator[None]:
        """Go on without trackers, with a warning, where they fail: a service out of reach, a folder that cannot be
        written."""
        try:
            yield
        except Exception as error:
            logger.warning("log.report_to: training goes on without trackers (%s)", one_line(error))
            self._accelerator.trackers = []

    def step(self, metrics: dict[str, float | int | None]) -> None:
        """Append one line to the file, print the compact one, and tell the trackers."""
        if not self._accelerator.is_main_process:
            return
        self._steps.add([metrics])
        tqdm.write(step_line(metrics, self._max_steps))
        known = {name: value for name, value in metrics.items() if value is not None and name != "step"}
        self._track(known | trl_metrics(known), int(metrics["step"] or 0))

    def flush(self) -> None:
        """Have all lines on the disk.

        Raises:
            OSError: they still cannot.
        """
        self._steps.sync()
        if self._evaluated:
            self._evaluations.sync()

    def has_evaluation(self, step: int) -> bool:
        """Whether the benchmarks were run after this step."""
        return step in self._evaluated

    def evaluation(self, step: int, results: dict[str, Any] | None) -> None:
        """Note the benchmarks after a step: in a file of their own, as a table, and for the trackers."""
        self._evaluated.add(step)
        if results is None:  # not the main process
            return
        self._evaluations.add([{"step": step} | results])
        tqdm.write(f"benchmarks after step {step}\n{results_table(results)}")
        scores = results["benchmarks"] | {"average": results["average"]}
        self._track({f"evaluation/{name}": score["avg"] for name, score in scores.items()}, step)

    def samples(self, step: int, groups: Sequence[Sequence[Completion]]) -> None:
        """Print the best and the worst completion of the first prompt."""
        if not self._accelerator.is_main_process:
            return
        group = sorted(groups[0], key=lambda c: -math.inf if c.reward is None else c.reward)
        prompt = group[0].prompt.prompt
        text = prompt if isinstance(prompt, str) else " / ".join(message["content"] for message in prompt)
        lines = [f"  samples of step {step} | prompt: {_shorten(text)}"]
        for completion in (group[-1], group[0]):
            lines.append(f"    reward {show(completion.reward)} | {_shorten(completion.text)}")
        tqdm.write("\n".join(lines))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run; none where it has no metrics file."""
    return read_lines(folder / METRICS_FILE)


def run_metrics(folder: Path) -> list[dict[str, Any]]:
    """The same of a folder that must hold a run.

    Raises:
        InputError: there are none.
    """
    metrics = read_metrics(folder)
    if not metrics:
        raise InputError(f"{folder}: no metrics.jsonl with steps in it; is it a run folder?")
    return metrics


def step_line(m: dict[str, Any], max_steps: int) -> str:
    """One compact line of a step's metrics for a person."""
    parts = [
        f"step {m['step']:>{len(str(max_steps))}}/{max_steps}",
        f"reward {show(m['reward'])}",
        f"entropy {show(m['entropy'])}",
        f"silenced {show(m['silenced_share'], '.3%').replace('%', ' %')}",
        f"length {show(m['completion_length'], '.1f')}",
        f"grad {show(m['grad_norm'])}" if m["updates"] else "no update: no token to train",
        f"{m['tokens_per_second']:.0f} tok/s",
        f"rollout {m['seconds_rollout']:.1f} s, update {m['seconds_update']:.1f} s",
    ]
    if m["sampling_rounds"] > 1:
        parts.insert(1, f"{m['sampling_rounds']} rounds for {m['batch_groups']} groups")
    return " | ".join(parts)


def show(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}"


def _shorten(text: str, limit: int = 300) -> str:
    text = text.strip().replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
