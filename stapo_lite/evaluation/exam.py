"""Benchmarks with a given engine: draw samples, grade them, compute scores. `evaluate.py` and the training share it."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from statistics import fmean
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from stapo_lite.config import Config, Data, Prompting
from stapo_lite.data.benchmarks import Problem, load_benchmark
from stapo_lite.data.prompts import Prompts, load_rows
from stapo_lite.errors import InputError
from stapo_lite.evaluation.scores import Sample, average_scores, benchmark_scores
from stapo_lite.evaluation.verifier import Case, Verifier
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rewards.grading import MathGrader, Question
from stapo_lite.rollout import Decoding, RolloutEngine, make_sampling, progress_bar
from stapo_lite.rollout.episodes import RolloutFunction, play
from stapo_lite.types import Completion, Prompt, derived_seed


@dataclass(frozen=True)
class Task:
    """One sample to draw."""

    problem: Problem
    number: int
    """The sample's, from 0."""
    prompt: Prompt

    @cached_property
    def key(self) -> tuple[str, str, int, str]:
        """Its identity, with a digest of the prompt: another text under the same id is another problem."""
        digest = hashlib.sha256(str(self.prompt.token_ids).encode()).hexdigest()[:12]
        return self.problem.benchmark, self.problem.id, self.number, digest


def sample_key(line: dict[str, Any]) -> tuple[str, str, int, str]:
    """`Task.key` of a line of `samples.jsonl`."""
    return line["benchmark"], line["id"], line["sample"], line["prompt"]


def make_tasks(
    benchmarks: Sequence[str], num_samples: int | None, limit: int | None, tokenizer: Any, prompting: Prompting
) -> list[Task]:
    """Every sample of every benchmark, those of a problem together.

    Args:
        num_samples: per problem; None for what each benchmark asks for.
        limit: only the first so many problems of each.

    Raises:
        InputError: a benchmark is unknown, given twice, or cannot be read or rendered.
    """
    tasks: list[Task] = []
    for name in benchmarks:
        short, problems, usual = load_benchmark(name, limit)
        if any(task.problem.benchmark == short for task in tasks):
            raise InputError(f"benchmarks: {short} is given twice: leave one out")
        rows = [{"problem": problem.text} for problem in problems]
        rendered = {key: getattr(prompting, key) for key in Prompting.model_fields}
        data = Data(source=name, prompt_column="problem", **rendered)
        prompts = Prompts(rows, tokenizer, data, graded=False, key="benchmarks")
        for problem, prompt in zip(problems, prompts, strict=True):
            tasks += [Task(problem, number, prompt) for number in range(num_samples or usual)]
    return tasks


def draw(
    engine: RolloutEngine, tasks: Sequence[Task], decoding: Decoding, seed: int, tokenizer: Any
) -> Iterator[dict[str, Any]]:
    """The samples as they finish, each as a line of `samples.jsonl`."""
    prompts, seeds = [task.prompt for task in tasks], [task.problem.seed(seed, task.number) for task in tasks]
    for index, completion in engine.stream(prompts, seeds, [decoding] * len(prompts)):
        completion.text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        yield {
            **dict(zip(("benchmark", "id", "sample", "prompt"), tasks[index].key, strict=True)),
            "seed": seeds[index],
            "tokens": len(completion.token_ids),
            "truncated": completion.truncated,
            "response": completion.whole_text,
        }


def judge(
    tasks: Sequence[Task], lines: Sequence[dict[str, Any]], grader: MathGrader, verifier: Verifier | None = None
) -> list[Sample]:
    """Grade the line of each task, by rules and then, where they reject an answer, by the verifier."""
    questions = [
        Question(p.gold, line["response"], not line["truncated"], p.ordered, p.tolerance)
        for p, line in zip((task.problem for task in tasks), lines, strict=True)
    ]
    verdicts = grader.grade(questions, progress=True)
    accepted: dict[int, bool] = {}
    if verifier is not None:
        asked = [i for i, verdict in enumerate(verdicts) if not verdict.correct and verdict.answer is not None]
        cases = [Case(tasks[i].problem.text, tasks[i].problem.gold, lines[i]["response"]) for i in asked]
        with progress_bar("verify", "answer", len(cases)) as bar:
            accepted = dict(zip(asked, verifier.accepts(cases, on_case=bar.update), strict=True))
    return [
        Sample(verdict.correct, verdict.answer, line["tokens"], line["truncated"], accepted.get(i))
        for i, (verdict, line) in enumerate(zip(verdicts, lines, strict=True))
    ]


def summarise(tasks: Sequence[Task], samples: Sequence[Sample]) -> dict[str, Any]:
    """The scores of each benchmark, their average, and the share of right samples of each problem (`rates`)."""
    grouped: dict[str, dict[str, list[Sample]]] = {}
    for task, sample in zip(tasks, samples, strict=True):
        grouped.setdefault(task.problem.benchmark, {}).setdefault(task.problem.id, []).append(sample)
    benchmarks = {name: benchmark_scores(list(problems.values())) for name, problems in grouped.items()}
    rates = {
        name: {problem: sum(s.correct for s in group) / len(group) for problem, group in problems.items()}
        for name, problems in grouped.items()
    }
    average = average_scores([list(problems.values()) for problems in rates.values()])
    if any("verified" in scores for scores in benchmarks.values()):
        average["verified"] = fmean(scores.get("verified", scores["avg"]) for scores in benchmarks.values())
    return {"benchmarks": benchmarks, "average": average, "rates": rates}


class Exam:
    """The evaluation during training: held-out rows with the run's own rewards, and benchmarks.

    Args:
        function: makes a completion of a held-out row in several turns; None where the engine alone does.

    Raises:
        InputError: rows or a benchmark cannot be read, or there is no metric called `evaluation.best`.
    """

    def __init__(self, config: Config, tokenizer: Any, function: RolloutFunction | None = None):
        e, d = config.evaluation, config.data
        self._settings, self._seed, self._tokenizer, self._function = e, config.seed, tokenizer, function
        self._turns = replace(make_sampling(config, ()), num_generations=1, temperature=e.temperature)
        self._decoding = Decoding(config.rollout.max_completion_length, e.temperature, e.top_p)
        usual = [] if e.source else ["aime24", "aime25", "amc23"]
        names = usual if e.benchmarks is None else e.benchmarks
        self._tasks = make_tasks(names, e.num_samples, e.limit, tokenizer, d)
        self._prompts: list[Prompt] = []
        if e.source:
            subset = d.subset if e.subset is None and e.source == d.source else e.subset
            held_out = d.model_copy(update={"source": e.source, "subset": subset, "split": e.split})
            rows = list(itertools.islice(load_rows(held_out, key="evaluation.source"), e.limit))
            graded = "math" in config.reward.functions
            prompts = Prompts(rows, tokenizer, held_out, graded, key="evaluation.source")
            self._prompts = [prompt for prompt in prompts for _ in range(e.num_samples or 1)]
        known = ["reward"] if self._prompts else []
        known += [*dict.fromkeys(task.problem.benchmark for task in self._tasks), "average"] if self._tasks else []
        if e.best not in (None, *known):
            raise InputError(f"evaluation.best={e.best}: choose one of {', '.join(known)}")

    def take(
        self, engine: RolloutEngine, rewards: RewardModel, accelerator: Accelerator, step: int
    ) -> dict[str, Any] | None:
        """The results of the adapter that the engine has now, on the main process.

        Args:
            step: of the run, which the reward functions are told.
        """
        results = self._reward(engine, rewards, accelerator, step) if self._prompts else {}
        mine = self._tasks[accelerator.process_index :: accelerator.num_processes]
        samples = draw(engine, mine, self._decoding, self._seed, self._tokenizer)
        lines = {
            sample_key(line): line
            for line in gather_object(list(progress_bar("evaluate", "sample", len(mine), samples)))
        }
        if not accelerator.is_main_process:
            return None
        if self._tasks:
            judged = judge(self._tasks, [lines[task.key] for task in self._tasks], rewards.grader)
            results |= summarise(self._tasks, judged)
        return {"temperature": self._settings.temperature, "top_p": self._settings.top_p, **results}

    def _reward(
        self, engine: RolloutEngine, rewards: RewardModel, accelerator: Accelerator, step: int
    ) -> dict[str, Any]:
        """Mean reward of the held-out prompts, and what each function gave."""
        numbers = range(accelerator.process_index, len(self._prompts), accelerator.num_processes)
        prompts = [self._prompts[number] for number in numbers]
        seeds = [derived_seed(self._seed, "held out", number) for number in numbers]  # the same at every step
        if self._function is not None:
            groups = play(engine, self._turns, self._tokenizer, self._function, prompts, seeds)
            completions = [one for (one,) in groups]
        else:
            draws = engine.stream(prompts, seeds, [self._decoding] * len(prompts))
            drawn = sorted(progress_bar("evaluate", "sample", len(prompts), draws), key=itemgetter(0))
            completions = [answer for _, answer in drawn]
        score(completions, self._tokenizer, rewards, self._seed, step)
        given = [{"reward": c.reward} | {f"reward/{name}": v for name, v in c.scores.items()} for c in completions]
        everyones = gather_object(given)
        names = dict.fromkeys(name for scores in everyones for name in scores)
        found = {name: [s[name] for s in everyones if s.get(name) is not None] for name in names}
        return {name: fmean(values) if values else None for name, values in found.items()}


def score(completions: Sequence[Completion], tokenizer: Any, rewards: RewardModel, seed: int, step: int) -> None:
    """Decode completions, and set their scores and rewards."""
    for completion in completions:
        completion.text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    if completions:
        rewards.score(completions, seed, step)


def main_score(results: dict[str, Any], metric: str) -> float | None:
    """The value of `evaluation.best` in an evaluation's results; None where they do not have it."""
    scores = {"average": results.get("average", {})} | results.get("benchmarks", {})
    return results.get("reward") if metric == "reward" else scores.get(metric, {}).get("avg")
