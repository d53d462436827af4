"""Evaluation during training, on held-out rows with the run's own rewards and on benchmarks; keeps
the best adapter."""

import itertools
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate.utils import gather_object
from safetensors import SafetensorError
from tqdm.auto import tqdm

from stapo_lite.config import Config
from stapo_lite.data.prompts import Prompts, load_rows
from stapo_lite.errors import InputError, one_line
from stapo_lite.extras.evaluation.results import results_table
from stapo_lite.extras.evaluation.tasks import draw, judge, make_tasks, sample_key, summarise
from stapo_lite.extras.math.grading import MathGrader
from stapo_lite.extras.turns.episodes import RolloutFunction, play
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.files import append_lines, read_lines, read_object, write_text
from stapo_lite.rollout import Decoding, progress_bar, rollout_settings
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.folder import EVALUATIONS_FILE
from stapo_lite.training.loop import decode_and_score
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Prompt, derived_seed

logger = logging.getLogger(__name__)

USUAL_BENCHMARKS = ["aime24", "aime25", "amc23"]
BEST, NEXT_BEST = "best", ".best"
"""Folders of the best adapter, and of one that is about to replace it."""
SCORE_FILE = "score.json"
"""In these folders: metric, score and step of the adapter, and the settings behind the score."""
SCORED_BY: Any = {
    "evaluation": True,
    "reward": True,
    "data": True,
    "rollout": {"function", "max_completion_length"},
}
UNSCORED: Any = {"evaluation": {"steps"}, "reward": {"function_timeout"}}
"""Sections and keys that belong to these settings, and exceptions."""


class PeriodicEvaluation(Callback):
    """Evaluates before the first step, every `evaluation.steps` and at the end.

    Args:
        function: makes completions of held-out rows in several turns; None for plain sampling.
        stop_tokens: as in training.

    Raises:
        InputError: rows or a benchmark cannot be read, or `evaluation.best` names no metric.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        grader: MathGrader,
        function: RolloutFunction | None,
        stop_tokens: tuple[int, ...],
    ):
        settings, rollout = config.evaluation, config.rollout
        self._settings, self._grader, self._function = settings, grader, function
        self._chat = Chat(tokenizer, config.data)
        self._turns = replace(
            rollout_settings(config, stop_tokens),
            num_generations=1,
            temperature=settings.temperature,
        )
        self._decoding = Decoding(
            rollout.max_completion_length, settings.temperature, settings.top_p
        )
        names = settings.benchmarks
        if names is None:
            names = [] if settings.source else USUAL_BENCHMARKS
        self._tasks = make_tasks(
            names, settings.num_samples, settings.limit, tokenizer, config.data
        )
        self._prompts = load_held_out(config, tokenizer) if settings.source else []
        self._check_best()

    def _check_best(self) -> None:
        known = ["reward"] if self._prompts else []
        if self._tasks:
            known += [*dict.fromkeys(task.problem.benchmark for task in self._tasks), "average"]
        best = self._settings.best
        if best not in (None, *known):
            raise InputError(f"evaluation.best={best}: choose one of {', '.join(known)}")

    def on_train_begin(self, run: Run) -> None:
        lines = read_lines(run.folder / EVALUATIONS_FILE)
        self._done = {line["step"] for line in lines}  # steps after which the adapter was evaluated
        if run.accelerator.is_main_process:
            take_next_best(run.folder)
            drop_best(run.folder / BEST, run.progress.step)

    def on_step_begin(self, run: Run, step: int) -> None:
        if (step - 1) % self._settings.steps == 0:
            self._evaluate(run)

    def on_train_end(self, run: Run) -> None:
        if run.ended and run.progress.step not in self._done:
            with run.sampling(run.progress.step + 1):
                self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        """Evaluate the engine's current adapter, unless that is done."""
        step = run.progress.step
        if step in self._done:
            return
        results = self._take(run, step + 1)
        self._done.add(step)
        if results is not None:
            # Before the line is written: a run killed between the two evaluates again.
            keep_best(run, results)
            append_lines(run.folder / EVALUATIONS_FILE, [{"step": step} | results])
            tqdm.write(describe(step, results))
        run.call("on_evaluate", step, results)

    def _take(self, run: Run, step: int) -> dict[str, Any] | None:
        """Sample and score; return the results on the main process, None elsewhere.

        Args:
            step: passed to the reward functions.
        """
        accelerator = run.accelerator
        rewards = self._held_out_reward(run, step) if self._prompts else {}
        mine = self._tasks[accelerator.process_index :: accelerator.num_processes]
        samples = draw(run.engine, mine, self._decoding, run.config.seed, run.tokenizer)
        ours = list(progress_bar("evaluate", "sample", len(mine), samples))
        everyones = gather_object(ours)
        if not accelerator.is_main_process:
            return None
        lines = {sample_key(line): line for line in everyones}
        results: dict[str, Any] = {}
        results |= self._settings.model_dump(include={"temperature", "top_p"})
        results |= rewards
        if self._tasks:
            answers = [lines[task.key] for task in self._tasks]
            results |= summarise(self._tasks, judge(self._tasks, answers, self._grader))
        return results

    def _held_out_reward(self, run: Run, step: int) -> dict[str, Any]:
        """Mean reward of the held-out prompts, and mean score of each function."""
        count, accelerator = len(self._prompts), run.accelerator
        numbers = range(accelerator.process_index, count, accelerator.num_processes)
        prompts = [self._prompts[number] for number in numbers]
        # The same seeds at every step.
        seeds = [derived_seed(run.config.seed, "held out", number) for number in numbers]
        completions = self._answer(run, prompts, seeds)
        decode_and_score(completions, run.tokenizer, run.rewards, run.config.seed, step)
        given = []
        for completion in completions:
            scores = {f"reward/{name}": score for name, score in completion.scores.items()}
            given.append({"reward": completion.reward, **scores})
        everyones = gather_object(given)
        names = dict.fromkeys(name for scores in everyones for name in scores)
        means: dict[str, Any] = {}
        for name in names:
            values = [scores[name] for scores in everyones if scores.get(name) is not None]
            means[name] = fmean(values) if values else None
        return means

    def _answer(
        self, run: Run, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[Completion]:
        """A completion of each prompt."""
        if self._function is not None:
            groups = play(run.engine, self._turns, self._chat, self._function, prompts, seeds)
            return [completion for (completion,) in groups]
        draws = run.engine.stream(prompts, seeds, [self._decoding] * len(prompts))
        bar = progress_bar("evaluate", "sample", len(prompts), draws)
        return [completion for _, completion in sorted(bar, key=itemgetter(0))]


def load_held_out(config: Config, tokenizer: Any) -> list[Prompt]:
    """Load the prompts of `evaluation.source`, each repeated once per sample.

    Raises:
        InputError: they cannot be read.
    """
    e, d, key = config.evaluation, config.data, "evaluation.source"
    subset = d.subset if e.subset is None and e.source == d.source else e.subset
    held_out = d.model_copy(update={"source": e.source, "subset": subset, "split": e.split})
    rows = list(itertools.islice(load_rows(held_out, key=key), e.limit))
    graded = "math" in config.reward.functions
    prompts = Prompts(rows, tokenizer, held_out, graded, key=key)
    return [prompt for prompt in prompts for _ in range(e.num_samples or 1)]


def describe(step: int, results: dict[str, Any]) -> str:
    """An evaluation's results as text."""
    lines = [
        f"held out after step {step}: {name} {value:.3f}"
        for name, value in results.items()
        if name.startswith("reward") and value is not None
    ]
    if "benchmarks" in results:
        lines.append(f"benchmarks after step {step}\n{results_table(results)}")
    return "\n".join(lines)


def main_score(results: dict[str, Any], metric: str) -> float | None:
    """The value of `evaluation.best` in an evaluation's results; None if they do not have it."""
    if metric == "reward":
        return results.get("reward")
    scores = {"average": results.get("average", {})} | results.get("benchmarks", {})
    return scores.get(metric, {}).get("avg")


def keep_best(run: Run, results: dict[str, Any]) -> None:
    """Write adapter and score to `best/` if it beats the one there, or if that one was evaluated
    with other settings. Only warn if it cannot be written."""
    config, best, partial = run.config, run.folder / BEST, run.folder / NEXT_BEST
    metric = config.evaluation.best
    now = main_score(results, metric) if metric else None
    if now is None:
        return
    step = run.progress.step
    settings = config.model_dump(mode="json", include=SCORED_BY, exclude=UNSCORED)
    score = {"metric": metric, "score": now, "step": step, "settings": settings}
    try:
        before = read_object(best / SCORE_FILE) if best.exists() else {}
        if before.get("settings") == settings and before["score"] >= now:
            return
        run.policy.save_adapter(partial)
        write_text(partial / SCORE_FILE, json.dumps(score))
        take_next_best(run.folder)
    except (OSError, InputError, SafetensorError) as error:
        logger.warning("%s was not written (%s)", best, one_line(error))
    else:
        print(f"best so far: {metric} {now:.3f} after step {step}, kept in {best}")


def take_next_best(folder: Path) -> None:
    """Replace `best` with `.best` if that is complete; also finishes a replacement that a kill
    interrupted. The score file is written last and deleted first, so a folder without it is
    incomplete."""
    best, new = folder / BEST, folder / NEXT_BEST
    if (new / SCORE_FILE).exists():
        (best / SCORE_FILE).unlink(missing_ok=True)
        shutil.rmtree(best, ignore_errors=True)
        new.rename(best)


def drop_best(best: Path, step: int) -> None:
    """Delete the best adapter if the run starts over or resumes from an earlier step. A folder
    without a score file is not a run's and stays."""
    try:
        of_step = read_object(best / SCORE_FILE)["step"]
    except (InputError, KeyError):
        return
    if step == 0 or of_step > step:
        shutil.rmtree(best, ignore_errors=True)
