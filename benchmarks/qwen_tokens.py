"""Measure the paper's claims about spurious tokens on a real Qwen: how many there are, their share
of the gradient, and what one of them does to the rest of an answer.

    python benchmarks/qwen_tokens.py MODEL --data gsm8k_train.jsonl math_train.jsonl
    [--problems 32] [--short 48] [--folder runs/qwen_tokens]
    [--results benchmarks/results/qwen_tokens]

Two hours on two CPU cores; the same command continues where it was stopped. No training:
everything is measured on the model as it is, as in a run's first step. Each file has the columns
`problem` and `answer`. The same number of problems is drawn from each file: some from all, some
from its shortest tenth, which a small model solves more often.

1. The model samples 8 completions of each problem at temperature 1, the reward `math` grades them,
   and the trainer measures each token's log-probability, entropy and collision probability.
2. For some rare tokens of right answers, spurious ones (low entropy) and others (high entropy), the
   model answers 8 times from just before the token, and 8 times from just after it.
3. `qwen_tokens_report.py` makes tables and figures of both.
"""

import argparse
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from qwen_tokens_report import RARE, load, report, spurious_and_others

from stapo_lite.assemble import open_data
from stapo_lite.config import Config
from stapo_lite.extras.math.grading import MathGrader, Question
from stapo_lite.files import append_lines, read_jsonl, read_lines, write_lines
from stapo_lite.method.microbatches import sequence_length, split_by_tokens
from stapo_lite.model.loading import load_weights
from stapo_lite.model.policy import Policy, make_policy
from stapo_lite.model.processes import resolve_dtype
from stapo_lite.rollout.engine import Decoding, RolloutEngine
from stapo_lite.rollout.make import rollout_settings, start_vllm
from stapo_lite.types import Completion, Prompt, derived_seed

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CHUNK = 16
"""Problems that are sampled, scored and written together."""
GROUP = 8
TOP = 5
"""Alternatives that are written for each rare token."""


class Setup(NamedTuple):
    """What both parts need."""

    config: Config
    prompts: list[Prompt]
    tokenizer: Any
    engine: RolloutEngine
    policy: Policy
    grader: MathGrader


def make_config(given: argparse.Namespace) -> Config:
    """The config of a run that would take the same first step."""
    return Config.model_validate(
        {
            "model": given.model,
            "output_dir": str(given.folder),
            "dtype": resolve_dtype(given.dtype, None),
            "lora": {"r": 1},  # a new adapter changes nothing
            "data": {
                "source": given.data[0],
                "prompt_column": "problem",
                "prompt_suffix": SUFFIX,
                "max_prompt_length": 400,
                "filter_overlong_prompts": True,
            },
            "rollout": {
                "num_generations": GROUP,
                "max_completion_length": given.longest,
                "max_num_seqs": 128,
                "vllm": {"kv_cache_memory_bytes": given.cache << 20},
            },
        }
    )


def load_problems(sources: Sequence[str], number: int, short: int) -> list[dict[str, Any]]:
    """Problems of each source in turn, then short ones."""
    drawn: list[dict[str, Any]] = []
    files = [read_jsonl(Path(source)) for source in sources]
    shortest = [sorted(rows, key=lambda row: len(row["problem"])) for rows in files]
    tenths = [rows[: max(short, len(rows) // 10)] for rows in shortest]
    for parts, wanted in (files, number), (tenths, short):
        chosen = [random.Random(0).sample(rows, wanted // len(sources)) for rows in parts]
        drawn += chain.from_iterable(zip(*chosen, strict=True))
    return drawn


def open_setup(given: argparse.Namespace) -> Setup:
    """Load the model twice: for vLLM and for the trainer."""
    config = make_config(given)
    prompts, tokenizer, stops = open_data(
        config, load_problems(given.data, given.problems, given.short), print
    )
    engine = start_vllm(config, rollout_settings(config, stops), None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = make_policy(load_weights(config.model, config.dtype, device), config)
    return Setup(config, prompts, tokenizer, engine, policy, MathGrader())


def grade(setup: Setup, completions: Sequence[Completion]) -> list[bool]:
    """Whether each completion is right, by the reward `math`."""
    questions = []
    for c in completions:
        c.text = setup.tokenizer.decode(c.token_ids, skip_special_tokens=True)
        questions.append(Question(c.prompt.answer, c.text, finished=not c.truncated))
    return [right for right, _ in setup.grader.grade(questions)]


def sample(setup: Setup) -> None:
    """Sample all problems, and measure each token; what is there already is skipped."""
    folder = Path(setup.config.output_dir)
    for start in range(0, len(setup.prompts), CHUNK):
        path = folder / f"completions-{start:04d}.jsonl"
        if path.exists():
            continue
        prompts = setup.prompts[start : start + CHUNK]
        seeds = [derived_seed(0, start + i) for i in range(len(prompts))]
        completions = list(chain(*setup.engine.generate(prompts, seeds)))
        right = grade(setup, completions)
        lines = measure(setup, completions)
        for index, (line, correct) in enumerate(zip(lines, right, strict=True)):
            line |= {"problem": start + index // GROUP, "right": correct}
        write_lines(path, lines)
        tokens = sum(len(c.token_ids) for c in completions)
        cut = sum(c.truncated for c in completions) / len(completions)
        print(
            f"problems {start} to {start + len(prompts) - 1}: {tokens} tokens, "
            f"{100 * sum(right) / len(right):.0f} % right, {100 * cut:.0f} % cut off",
            flush=True,
        )


@torch.no_grad()
def measure(setup: Setup, completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """A line for each completion, with the statistics of its tokens and the alternatives of rare
    ones."""
    lines: list[dict[str, Any]] = [{} for _ in completions]
    for rows in split_by_tokens([sequence_length(c) for c in completions], 4096):
        part = [completions[row] for row in rows]
        statistics = setup.policy.statistics(part)
        rare = (statistics.logprobs.exp() < RARE).nonzero()[:, 0]
        ids, probabilities = setup.policy.top_tokens(setup.policy.hidden_states(part)[rare], TOP)
        alternatives = zip(ids.tolist(), probabilities.tolist(), strict=True)
        best = dict(zip(rare.tolist(), alternatives, strict=True))
        start = 0
        for row, c in zip(rows, part, strict=True):
            here = range(start, start + len(c.token_ids))
            start = here.stop
            numbers = [values[here.start : here.stop].tolist() for values in statistics]
            lines[row] = {
                "truncated": c.truncated,
                "prompt_ids": c.prompt.token_ids,
                "answer": c.prompt.answer,
                "token_ids": c.token_ids,
                "rollout_logprobs": [round(x, 5) for x in c.rollout_logprobs],
                **{
                    name: [float(f"{x:.6g}") for x in values]
                    for name, values in zip(statistics._fields, numbers, strict=True)
                },
                "best": {str(i - here.start): best[i] for i in here if i in best},
            }
    return lines


def continue_from(setup: Setup, places: int) -> None:
    """Answer 8 times from just before and just after some rare tokens of right answers, and write
    how often the answer is right; places that are done are skipped."""
    folder = Path(setup.config.output_dir)
    path = folder / "effects.jsonl"
    done = {(line["completion"], line["position"]) for line in read_lines(path)}
    lines = load(folder)
    for kind, found in spurious_and_others(lines).items():
        chosen = random.Random(0).sample(found, min(places, len(found)))
        wanted = [place for place in chosen if place not in done]
        for start in range(0, len(wanted), CHUNK // 2):
            part = wanted[start : start + CHUNK // 2]
            effects = answer_from(setup, lines, part)
            append_lines(path, [{"kind": kind} | effect for effect in effects])
            print(f"{kind}: continued from {start + len(part)} of {len(wanted)}", flush=True)


def answer_from(
    setup: Setup, lines: Sequence[dict[str, Any]], places: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """How many of 8 answers are right from just before and from just after each place.

    Args:
        places: index of a line, and of a token in its completion.
    """
    prompts, decodings = [], []
    for row, position in places:
        line = lines[row]
        for end in (position, position + 1):
            beginning = line["token_ids"][:end]
            prompt = Prompt("", line["prompt_ids"] + beginning, line["answer"])
            room = setup.config.rollout.max_completion_length - end
            prompts += [prompt] * GROUP
            decodings += [Decoding(room, 1.0, 1.0)] * GROUP
    seeds = [derived_seed(1, *place, i) for place in places for i in range(2 * GROUP)]
    finished = sorted(setup.engine.stream(prompts, seeds, decodings))
    completions = []
    for index, c in finished:
        row, position = places[index // (2 * GROUP)]
        beginning = lines[row]["token_ids"][: position + index // GROUP % 2]
        completions.append(Completion(c.prompt, beginning + c.token_ids, [], c.truncated, 0))
    right = grade(setup, completions)
    effects = []
    for number, (row, position) in enumerate(places):
        first = 2 * GROUP * number
        before, after = right[first : first + GROUP], right[first + GROUP : first + 2 * GROUP]
        effects.append(
            {
                "completion": row,
                "position": position,
                "right_before": sum(before),
                "right_after": sum(after),
            }
        )
    return effects


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder, or name on the Hub")
    parser.add_argument("--data", nargs="+", required=True, help=".jsonl files")
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--short", type=int, default=48, help="short problems")
    parser.add_argument("--places", type=int, default=40, help="of each kind, to continue from")
    parser.add_argument("--longest", type=int, default=768, help="tokens of the longest completion")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--cache", type=int, default=4096, help="MiB for vLLM's keys and values")
    parser.add_argument("--folder", type=Path, default=Path("runs/qwen_tokens"))
    parser.add_argument("--results", type=Path, help="folder for the tables")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    setup = open_setup(given)
    sample(setup)
    continue_from(setup, given.places)
    setup.grader.close()
    report(given.folder, given.results or given.folder, setup.tokenizer)


if __name__ == "__main__":
    main()
