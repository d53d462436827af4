"""Benchmarks with a given engine: draw samples, grade them, compute scores. `evaluate.py` and
`periodic.py` share it."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from stapo_lite.config import Data, Prompting
from stapo_lite.data.prompts import Prompts
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.benchmarks import Problem, load_benchmark
from stapo_lite.extras.evaluation.scores import Sample, average_scores, benchmark_scores
from stapo_lite.extras.evaluation.verifier import Case, ModelVerifier
from stapo_lite.extras.math.grading import MathGrader, Question
from stapo_lite.rollout import Decoding, RolloutEngine, progress_bar
from stapo_lite.types import Prompt


@dataclass(frozen=True)
class Task:
    """One sample to draw."""

    problem: Problem
    number: int
    """Index of the sample, from 0."""
    prompt: Prompt

    @cached_property
    def key(self) -> tuple[str, str, int, str]:
        """Identity of the sample. It includes a digest of the prompt: another text under the same
        id is another problem."""
        digest = hashlib.sha256(str(self.prompt.token_ids).encode()).hexdigest()[:12]
        return self.problem.benchmark, self.problem.id, self.number, digest


def sample_key(line: dict[str, Any]) -> tuple[str, str, int, str]:
    """`Task.key` of a line of `samples-*.jsonl`."""
    return line["benchmark"], line["id"], line["sample"], line["prompt"]


def make_tasks(
    benchmarks: Sequence[str],
    num_samples: int | None,
    limit: int | None,
    tokenizer: Any,
    prompting: Prompting,
) -> list[Task]:
    """Make a task for every sample of every benchmark; those of a problem are adjacent.

    Args:
        num_samples: samples per problem; None for each benchmark's default.
        limit: take only the first `limit` problems of each.

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
        # An evaluation runs no tools.
        rendered["chat_template_kwargs"] = dict(prompting.chat_template_kwargs)
        rendered["chat_template_kwargs"].pop("tools", None)
        data = Data(source=name, prompt_column="problem", **rendered)
        prompts = Prompts(rows, tokenizer, data, graded=False, key="benchmarks")
        for problem, prompt in zip(problems, prompts, strict=True):
            tasks += [Task(problem, number, prompt) for number in range(num_samples or usual)]
    return tasks


def draw(
    engine: RolloutEngine, tasks: Sequence[Task], decoding: Decoding, seed: int, tokenizer: Any
) -> Iterator[dict[str, Any]]:
    """Yield samples as they finish, each as a line of `samples-*.jsonl`."""
    prompts = [task.prompt for task in tasks]
    seeds = [task.problem.seed(seed, task.number) for task in tasks]
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
    tasks: Sequence[Task],
    lines: Sequence[dict[str, Any]],
    grader: MathGrader,
    verifier: ModelVerifier | None = None,
) -> list[Sample]:
    """Grade each task's line by rules; the verifier, if any, judges the answers they reject."""
    questions = [
        Question(p.gold, line["response"], not line["truncated"], p.ordered, p.tolerance)
        for p, line in zip((task.problem for task in tasks), lines, strict=True)
    ]
    verdicts = grader.grade(questions, progress=True)
    accepted: dict[int, bool] = {}
    if verifier is not None:
        asked = [
            i
            for i, verdict in enumerate(verdicts)
            if not verdict.correct and verdict.answer is not None
        ]
        cases = [
            Case(tasks[i].problem.text, tasks[i].problem.gold, lines[i]["response"]) for i in asked
        ]
        with progress_bar("verify", "answer", len(cases)) as bar:
            accepted = dict(zip(asked, verifier.accepts(cases, on_case=bar.update), strict=True))
    return [
        Sample(verdict.correct, verdict.answer, line["tokens"], line["truncated"], accepted.get(i))
        for i, (verdict, line) in enumerate(zip(verdicts, lines, strict=True))
    ]


def summarise(tasks: Sequence[Task], samples: Sequence[Sample]) -> dict[str, Any]:
    """Scores of each benchmark, their average, and each problem's share of right samples
    (`rates`)."""
    grouped: dict[str, dict[str, list[Sample]]] = {}
    for task, sample in zip(tasks, samples, strict=True):
        grouped.setdefault(task.problem.benchmark, {}).setdefault(task.problem.id, []).append(
            sample
        )
    benchmarks = {
        name: benchmark_scores(list(problems.values())) for name, problems in grouped.items()
    }
    rates = {
        name: {
            problem: sum(s.correct for s in group) / len(group)
            for problem, group in problems.items()
        }
        for name, problems in grouped.items()
    }
    average = average_scores([list(problems.values()) for problems in rates.values()])
    if any("verified" in scores for scores in benchmarks.values()):
        average["verified"] = fmean(
            scores.get("verified", scores["avg"]) for scores in benchmarks.values()
        )
    return {"benchmarks": benchmarks, "average": average, "rates": rates}
