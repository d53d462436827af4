"""Evaluation during training, on held-out rows with the run's own rewards and on benchmarks. It
keeps the best adapter."""

import json
import math
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object
from pandas import DataFrame
from tqdm.auto import tqdm

from stapo_lite.config import Config
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.results import results_table
from stapo_lite.extras.evaluation.samples import (
    Task,
    benchmark_tasks,
    draw,
    grade,
    held_out_tasks,
    sample_line,
)
from stapo_lite.extras.evaluation.scores import summarise
from stapo_lite.files import append_lines, read_lines, read_object, write_text
from stapo_lite.rollout.engine import Decoding
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.folder import EVALUATIONS_FILE
from stapo_lite.training.loop import decode_and_score
from stapo_lite.training.run import Run
from stapo_lite.types import Completion

USUAL_BENCHMARKS = ["aime24", "aime25", "amc23"]


class PeriodicEvaluation(Callback):
    """Evaluates before the first step, every `evaluation.steps` and at the end.

    Raises:
        InputError: rows or a benchmark cannot be read, or `evaluation.best` names no metric.
    """

    phase = Phase.RECORD

    def __init__(self, config: Config, tokenizer: Any):
        settings = config.evaluation
        self._settings = settings
        longest = config.rollout.max_completion_length
        self._decoding = Decoding(longest, settings.temperature, settings.top_p)
        self._held_out: list[Task] = []
        benchmarks = USUAL_BENCHMARKS
        if settings.source:
            self._held_out = held_out_tasks(config, tokenizer)
            benchmarks = []
        if settings.benchmarks is not None:
            benchmarks = settings.benchmarks
        self._tasks = benchmark_tasks(
            config, tokenizer, benchmarks, settings.num_samples, settings.limit
        )
        metrics = []
        if self._held_out:
            metrics = ["reward", *(f"reward/{name}" for name in config.reward.functions)]
        if self._tasks:
            metrics += [*dict.fromkeys(task.names["benchmark"] for task in self._tasks), "average"]
        if settings.best not in (None, *metrics):
            raise InputError(f"evaluation.best={settings.best}: choose one of {', '.join(metrics)}")

    def on_step_begin(self, run: Run, step: int) -> None:
        if (step - 1) % self._settings.steps == 0:
            self._evaluate(run)

    def on_train_end(self, run: Run) -> None:
        if run.ended:
            with run.sampling(run.progress.step + 1):
                self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        """Evaluate the engine's current adapter, unless the log has its results."""
        step = run.progress.step
        path = run.folder / EVALUATIONS_FILE
        if any(line["step"] == step for line in read_lines(path)):
            return
        # Every process samples; the main process judges and writes.
        lines = gather_object(self._sample(run))
        if not run.accelerator.is_main_process:
            run.call(Callback.on_evaluate, step, None)
            return
        results = self._settings.model_dump(include={"temperature", "top_p"})
        means = DataFrame(lines).filter(like="reward").astype(float).mean()
        for name, mean in means.items():
            results[name] = None if math.isnan(mean) else mean
            tqdm.write(f"held out after step {step}: {name} {mean:.3f}")
        if self._tasks:
            results |= summarise(grade(self._tasks, {line["seed"]: line for line in lines}))
            tqdm.write(f"benchmarks after step {step}\n{results_table(results)}")
        if self._settings.best:
            # Before the line is written: a run killed in between evaluates again.
            keep_best(run, self._settings.best, results)
        append_lines(path, [{"step": step} | results])
        run.call(Callback.on_evaluate, step, results)

    def _sample(self, run: Run) -> list[dict[str, Any]]:
        """Lines of this process's share of the samples; those of held-out rows have rewards."""
        share = slice(run.accelerator.process_index, None, run.accelerator.num_processes)
        rows = self._held_out[share]
        tasks = self._tasks[share]
        completions = self._answer(run, rows)
        decode_and_score(run, completions, run.config.seed, run.progress.step + 1)
        lines = []
        for row, completion in zip(rows, completions, strict=True):
            scores = {f"reward/{name}": score for name, score in completion.scores.items()}
            lines.append({"seed": row.seed, "reward": completion.reward, **scores})
        for index, completion in draw(run.engine, tasks, self._decoding, run.tokenizer):
            lines.append(sample_line(tasks[index], completion))
        return lines

    def _answer(self, run: Run, rows: Sequence[Task]) -> list[Completion]:
        """A completion of each held-out row, made as in training."""
        if not run.config.rollout.several_turns:
            draws = draw(run.engine, rows, self._decoding, run.tokenizer)
            return [completion for _, completion in sorted(draws)]
        prompts = [row.prompt for row in rows]
        seeds = [row.seed for row in rows]
        groups = run.generate(
            prompts, seeds, num_generations=1, temperature=self._settings.temperature
        )
        return [completion for (completion,) in groups]


def keep_best(run: Run, metric: str, results: dict[str, Any]) -> None:
    """Write adapter and score to `best/` if the score beats the one there, or if an evaluation with
    other settings gave the one there."""
    if metric.partition("/")[0] == "reward":
        score = results.get(metric)
    else:
        scores = {"average": results["average"]} | results["benchmarks"]
        score = scores[metric]["avg"]
    path = run.folder / "best" / "score.json"
    settings = run.config.evaluation.model_dump(mode="json", exclude={"steps"})
    before = read_object(path) if path.exists() else {}
    # A resumed run takes some steps again, and may find its own best of a later step.
    comparable = before.get("evaluation") == settings and before["step"] < run.progress.step
    if score is not None and (not comparable or score > before["score"]):
        run.policy.save_adapter(path.parent)
        best = {"score": score, "step": run.progress.step, "evaluation": settings}
        write_text(path, json.dumps(best))
