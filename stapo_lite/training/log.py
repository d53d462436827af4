"""The log that every run writes: metrics and completions to files, a line per step to the
terminal."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from stapo_lite.config import Log
from stapo_lite.data.messages import prompt_text
from stapo_lite.files import append_lines
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.folder import COMPLETIONS_FILE, METRICS_FILE
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Rollouts

logger = logging.getLogger(__name__)


class RunLog(Callback):
    """Writes the metrics and the completions of each step, on the main process."""

    phase = Phase.RECORD

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        if not run.accelerator.is_main_process:
            return
        step = metrics["step"]
        log = run.config.log
        append_lines(run.folder / METRICS_FILE, [metrics])
        tqdm.write(step_line(metrics, run.config.train.max_steps))
        if completions := kept_completions(rollouts, log):
            lines = [completion_line(step, completion) for completion in completions]
            append_lines(run.folder / COMPLETIONS_FILE, lines)
        shows = log.log_completions_steps and (step - 1) % log.log_completions_steps == 0
        if shows and rollouts.groups:  # one process of several may have sampled none
            tqdm.write(show_samples(step, rollouts.groups[0]))


def kept_completions(rollouts: Rollouts, log: Log) -> list[Completion]:
    """The completions of a step that the log keeps."""
    completions = [completion for group in rollouts.groups for completion in group]
    return completions[: log.completions]


def completion_line(step: int, completion: Completion) -> dict[str, Any]:
    """A line of completions.jsonl."""
    return {
        "step": step,
        "prompt": prompt_text(completion.prompt.prompt),
        "text": completion.text,
        "reward": completion.reward,
        "scores": completion.scores,
        "advantage": completion.advantage,
        "tokens": len(completion.token_ids),
        "truncated": completion.truncated,
        "columns": {name: shorten(str(value)) for name, value in completion.prompt.columns.items()},
    }


def show_samples(step: int, group: Sequence[Completion]) -> str:
    """The best and the worst completion of a prompt."""
    group = sorted(group, key=lambda c: -math.inf if c.reward is None else c.reward)
    prompt = shorten(prompt_text(group[0].prompt.prompt))
    lines = [f"  samples of step {step} | prompt: {prompt}"]
    for completion in (group[-1], group[0]):
        lines.append(f"    reward {show(completion.reward)} | {shorten(completion.text)}")
    return "\n".join(lines)


def step_line(m: dict[str, Any], max_steps: int) -> str:
    """One compact line of a step's metrics for a person."""
    gradient = f"grad {show(m.get('grad_norm'))}"
    if not m["updates"]:
        gradient = "no update: " + ("not finite" if m["skipped_updates"] else "no token to train")
    parts = [
        f"step {m['step']:>{len(str(max_steps))}}/{max_steps}",
        f"reward {show(m.get('reward'))}",
        f"entropy {show(m.get('entropy'))}",
        f"silenced {show(m.get('silenced_share'), '.3%').replace('%', ' %')}",
        f"length {show(m['completion_length'], '.1f')}",
        gradient,
        f"{m['tokens_per_second']:.0f} tok/s",
        f"rollout {m['seconds_rollout']:.1f} s, update {m['seconds_update']:.1f} s",
    ]
    if m["sampling_rounds"] > 1:
        parts.insert(1, f"{m['sampling_rounds']} rounds for {m['batch_groups']} groups")
    return " | ".join(parts)


def show(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash if there is none."""
    return "-" if value is None else f"{value:{form}}"


def shorten(text: str) -> str:
    """Beginning and end of a text, on one line."""
    text = text.strip().replace("\n", "\\n")
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
