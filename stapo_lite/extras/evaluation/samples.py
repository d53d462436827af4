"""The way from data sets to verdicts, for the command and for evaluations during training.

Each sample is a task, then a completion, then a line of `samples-*.jsonl`, then the line with its
verdict.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice, product
from typing import Any, NamedTuple

from stapo_lite.config import Config, Data, EvalConfig, Prompting
from stapo_lite.data.prompts import make_prompts
from stapo_lite.data.rows import load_rows
from stapo_lite.data.texts import set_text
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.benchmarks import load_benchmark
from stapo_lite.extras.math.grading import MathGrader, Question
from stapo_lite.progress import progress_bar
from stapo_lite.rollout.engine import Decoding, RolloutEngine
from stapo_lite.types import Completion, Prompt, derived_seed

Line = dict[str, Any]


class Task(NamedTuple):
    """One sample to draw."""

    prompt: Prompt
    seed: int
    names: dict[str, Any]
    """The beginning of the sample's line: the benchmark, the problem's id, the number of the
    sample; nothing for held-out rows."""


def benchmark_tasks(
    config: Config | EvalConfig,
    tokenizer: Any,
    benchmarks: Sequence[str],
    num_samples: int | None,
    limit: int | None,
) -> list[Task]:
    """A task for each sample of the benchmarks.

    Args:
        num_samples: samples per problem; None for each benchmark's default.
        limit: take only the first `limit` problems of each.

    Raises:
        InputError: a benchmark cannot be read or rendered, or an id occurs twice in it.
    """
    rendered = config.data.model_dump(include=set(Prompting.model_fields))
    rendered["chat_template_kwargs"].pop("tools", None)  # an evaluation runs none
    tasks = []
    for name in benchmarks:
        short, usual, rows = load_benchmark(name, limit)
        data = Data(source=name, prompt_column="problem", **rendered)
        prompts = make_prompts(rows, tokenizer, data, graded=True, key="benchmarks")
        for prompt, number in product(prompts, range(num_samples or usual)):
            names = {"benchmark": short, "id": prompt.columns["id"], "sample": number}
            # The seed names the sample, also after a restart. If a problem's text has changed, its
            # samples are drawn anew.
            seed = derived_seed(config.seed, *names.values(), prompt.token_ids)
            tasks.append(Task(prompt, seed, names))
    names_of_all = {tuple(task.names.values()) for task in tasks}
    if len(names_of_all) < len(tasks):
        raise InputError("benchmarks: an id occurs twice: give each problem one of its own")
    return tasks


def held_out_tasks(config: Config, tokenizer: Any) -> list[Task]:
    """A task for each sample of the rows of `evaluation.source`.

    Raises:
        InputError: the rows cannot be read.
    """
    settings = config.evaluation
    data = config.data
    changes = settings.model_dump(include={"source", "subset", "split"})
    if settings.subset is None and settings.source == data.source:
        changes["subset"] = data.subset
    changes["filter_overlong_prompts"] = False  # a mean over fewer rows would be another metric
    held_out = data.model_copy(update=changes)
    rows = list(islice(load_rows(held_out, "evaluation.source"), settings.limit))
    prompts = make_prompts(
        rows, tokenizer, held_out, graded="math" in config.reward.functions, key="evaluation.source"
    )
    tasks: list[Task] = []
    for prompt, _ in product(prompts, range(settings.num_samples or 1)):
        seed = derived_seed(config.seed, "held out", len(tasks))
        tasks.append(Task(prompt, seed, {}))
    return tasks


def draw(
    engine: RolloutEngine, tasks: Sequence[Task], decoding: Decoding, tokenizer: Any
) -> Iterator[tuple[int, Completion]]:
    """Yield each task's index and its completion, with its text, as they finish."""
    prompts = [task.prompt for task in tasks]
    seeds = [task.seed for task in tasks]
    draws = engine.stream(prompts, seeds, [decoding] * len(tasks))
    for index, completion in progress_bar("evaluate", "sample", len(tasks), draws):
        set_text(completion, tokenizer, True)
        yield index, completion


def sample_line(task: Task, completion: Completion) -> Line:
    """A line of `samples-*.jsonl`."""
    return task.names | {
        "seed": task.seed,
        "tokens": len(completion.token_ids),
        "truncated": completion.truncated,
        "response": completion.whole_text,
    }


def grade(tasks: Sequence[Task], lines: Mapping[int, Line]) -> list[Line]:
    """The samples of the tasks, in their order: their lines with `problem`, `gold`, `answer` and
    `correct`.

    Args:
        lines: by the seeds of the tasks.
    """
    samples = []
    questions = []
    for prompt, seed, _ in tasks:
        line = lines[seed]
        samples.append(line | {"problem": prompt.prompt, "gold": str(prompt.answer)})
        questions.append(
            Question(
                prompt.answer,
                line["response"],
                finished=not line["truncated"],
                ordered=prompt.columns["ordered"],
                tolerance=prompt.columns["tolerance"],
            )
        )
    with closing(MathGrader()) as grader:
        verdicts = grader.grade(questions)
    for sample, (correct, answer) in zip(samples, verdicts, strict=True):
        sample |= {"answer": answer, "correct": correct}
    return samples
