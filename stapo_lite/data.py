"""Prompts: read, rendered with the chat template, checked, and drawn in a seeded order.

python -m stapo_lite.data contamination train.jsonl --benchmarks all
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stapo_lite.benchmarks import Problem, load_benchmark
from stapo_lite.config import BENCHMARK_NAMES, InputError, Prompting, one_line, one_line_errors
from stapo_lite.files import read_jsonl, write_lines
from stapo_lite.types import Prompt


def load_rows(
    source: str,
    *,
    subset: str | None,
    split: str,
    prompt_column: str | None,
    answer_column: str | None,
    max_operand: int,
) -> list[dict[str, Any]]:
    """Rows of the data set, checked to have the columns.

    Args:
        prompt_column, answer_column: None where it may have any name, or no reward needs it.

    Raises:
        InputError: no such file or Hub dataset, no rows, or a column is missing.
    """
    if source == "arithmetic":
        return arithmetic(max_operand, prompt_column or "prompt", answer_column or "answer")
    path = Path(source)
    if path.suffix.lower() in (".jsonl", ".parquet") and not path.is_file():
        raise InputError(f"data.source={source}: no such file")
    try:
        rows = read_jsonl(path) if path.suffix.lower() == ".jsonl" else read_dataset(source, path, subset, split)
    except InputError:
        raise
    except Exception as error:  # the readers and the Hub raise a dozen kinds
        reason = one_line(error.__cause__ or error) or type(error).__name__
        raise InputError(
            f"data.source={source}: neither `arithmetic` nor a readable .jsonl or .parquet file or dataset on the Hub "
            f"({reason})"
        ) from None
    if not rows:
        raise InputError(f"data.source={source}: no rows")
    ids = [str(row["id"]) for row in rows if "id" in row] if path.is_file() else []
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise InputError(f"data.source={source}: {len(twice)} ids occur more than once, as {twice[0][:80]}; drop rows")
    for key, column in (("prompt_column", prompt_column), ("answer_column", answer_column)):
        if column is not None and column not in rows[0]:
            raise InputError(f"data.{key}={column}: {source} has only the columns {', '.join(rows[0])}")
    return rows


def read_dataset(source: str, path: Path, subset: str | None, split: str) -> list[dict[str, Any]]:
    """Rows of a Parquet file, or of a dataset on the Hub."""
    import datasets
    from pyarrow import parquet

    if path.suffix.lower() == ".parquet":
        return parquet.read_table(path).to_pylist()
    return list(datasets.load_dataset(source, subset, split=split))


def arithmetic(max_operand: int, prompt_column: str, answer_column: str) -> list[dict[str, Any]]:
    """Every sum a + b with operands from 1 to `max_operand`, its answer begun for the model to finish."""
    operands = range(1, max_operand + 1)
    return [
        {
            prompt_column: [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"{a} + {b} ="},
            ],
            answer_column: str(a + b),
        }
        for a in operands
        for b in operands
    ]


class Overlap(NamedTuple):
    """A row that holds a problem, or most of it."""

    row: int
    problem: Problem
    share: float
    """Of the problem's n-grams."""


def find_overlaps(texts: Sequence[str], problems: Sequence[Problem], n: int = 8, share: float = 0.6) -> list[Overlap]:
    """The pairs of a text and a problem of whose `n`-grams of words it holds `share` or more.

    Words are runs of letters and digits, in small letters. A problem of fewer than `n` words counts as one gram.
    """
    sizes: list[int] = []
    index: dict[tuple[str, ...], list[int]] = {}
    for number, problem in enumerate(problems):
        grams = _grams(problem.text, n)
        sizes.append(len(grams))
        for gram in grams:
            index.setdefault(gram, []).append(number)
    lengths = sorted({len(gram) for gram in index})
    overlaps = []
    for row, text in enumerate(texts):
        held = {gram for length in lengths for gram in _grams(text, length)}
        hits = Counter(number for gram in held for number in index.get(gram, ()))
        pairs = [Overlap(row, problems[number], count / sizes[number]) for number, count in hits.items()]
        overlaps += [overlap for overlap in pairs if overlap.share >= share]
    return overlaps


def _grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", text.lower())
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def prompt_text(prompt: Any) -> str:
    """The text of a prompt that is text or messages; empty for anything else."""
    if _is_messages(prompt):
        return "\n".join(message["content"] for message in prompt)
    return prompt if isinstance(prompt, str) else ""


def render_prompts(
    rows: Sequence[dict[str, Any]],
    tokenizer: Any,
    prompting: Prompting,
    source: str,
    prompt_column: str,
    answer_column: str | None,
    filter_overlong: bool,
) -> list[Prompt]:
    """Render each row's prompt and cut it into tokens.

    Args:
        tokenizer: a transformers tokenizer.
        source: named in errors.
        filter_overlong: leave out prompts that are too long.

    Raises:
        InputError: a prompt is of the wrong type, empty, refused by the chat template, or longer than
            `max_prompt_length` tokens (unless those are filtered); an answer is missing; nothing is left;
            the tokenizer has no chat template.
    """
    templated, longest = prompting.apply_chat_template, prompting.max_prompt_length
    if templated and not tokenizer.chat_template:
        raise InputError(
            "data.apply_chat_template: the model's tokenizer has no chat template; set it to false to give the model "
            "the prompt as it is, or choose an instruction-tuned model"
        )
    # Longer texts have too many tokens for sure, and would take long to cut into them; 4: what NFC may shorten.
    longest_text = 4 * longest * max(map(len, tokenizer.get_vocab()))
    prompts = []
    for number, row in enumerate(rows, start=1):
        where = f"data.source={source}, row {number}"
        prompt: Any = row.get(prompt_column)
        answer = _read_answer(row, answer_column, where) if answer_column else None
        text = _render(prompt, tokenizer, prompting, where)
        token_ids = []
        if len(text) <= longest_text:
            token_ids = tokenizer(text, add_special_tokens=not templated).input_ids
            if not token_ids:
                raise InputError(f"{where}: the prompt is empty")
        if len(text) > longest_text or len(token_ids) > longest:
            if filter_overlong:
                continue
            size = f"{len(token_ids)} tokens" if token_ids else f"{len(text)} characters"
            raise InputError(
                f"{where}: the prompt has {size}, data.max_prompt_length is {longest}; "
                "raise it, or drop such rows (in training: data.filter_overlong_prompts=true)"
            )
        columns = {name: value for name, value in row.items() if name != prompt_column}
        prompts.append(Prompt(prompt, token_ids, answer, columns))
    if not prompts:
        raise InputError(f"data.source={source}: every prompt is longer than data.max_prompt_length={longest}")
    return prompts


def _read_answer(row: dict[str, Any], column: str, where: str) -> Any:
    answer = row.get(column)
    if answer is None or not str(answer).strip():
        raise InputError(f"{where}: data.answer_column={column} is empty; drop the row or give its answer")
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise InputError(f"{where}: data.answer_column={column} must be text or a number, got {type(answer).__name__}")
    return answer


def _render(prompt: Any, tokenizer: Any, prompting: Prompting, where: str) -> str:
    """The text that the model reads: by the chat template, with system prompt and suffix."""
    templated = prompting.apply_chat_template
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif _is_messages(prompt) and templated:
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
    else:
        expected = "text or a list of {role, content} messages" if templated else "text"
        raise InputError(f"{where}: the prompt must be {expected}, got {type(prompt).__name__}")
    if prompting.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": prompting.system_prompt})
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if last_user is not None:
        messages[last_user]["content"] += prompting.prompt_suffix
    text = messages[-1]["content"]
    if templated:
        continues = messages[-1]["role"] == "assistant"
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **prompting.chat_template_kwargs,
            )
        except Exception as error:  # templates raise what they like
            raise InputError(f"{where}: the model's chat template refuses the prompt ({one_line(error)})") from None
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: the prompt is not valid Unicode (half of a surrogate pair)") from None
    return text


def stop_token_ids(tokenizer: Any, model_eos: int | list[int] | None, apply_chat_template: bool) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's and the model's end of text, and the chat template's
    end of an assistant turn, which base models with a chat template do not declare."""
    ids = {tokenizer.eos_token_id}
    ids.update([model_eos] if isinstance(model_eos, int) else model_eos or [])
    if apply_chat_template:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        after = tokenizer(text.rpartition("answer")[2].lstrip(), add_special_tokens=False).input_ids
        if after and after[0] in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder):
            ids.add(after[0])
    return tuple(sorted(ids - {None}))


def prompt_order(num_prompts: int, seed: int, position: int, count: int) -> list[int]:
    """Indices of draws `position` to `position + count - 1`: each epoch a fresh permutation.

    A function of its arguments alone, so a resumed run continues the order by knowing its position.
    """
    order: list[int] = []
    for draw in range(position, position + count):
        epoch, index = divmod(draw, num_prompts)
        if not order or index == 0:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            permutation = torch.randperm(num_prompts, generator=generator)
        order.append(int(permutation[index]))
    return order


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
    )


def contamination_report(overlaps: Sequence[Overlap], texts: Sequence[str], problems: Sequence[Problem]) -> str:
    """The share of each benchmark's problems that some row holds, and every pair."""
    lines = []
    for name in dict.fromkeys(problem.benchmark for problem in problems):
        total = sum(problem.benchmark == name for problem in problems)
        found = len({o.problem.id for o in overlaps if o.problem.benchmark == name})
        lines.append(f"{name:<14} {found:>4} of {total:>4} problems ({100 * found / total:.1f} %)")
    for row, problem, share in overlaps:
        start = " ".join(texts[row].split())[:80]
        lines.append(f"  {problem.benchmark} {problem.id}: {100 * share:.0f} % in row {row + 1}: {start}")
    lines.append(f"{len({o.row for o in overlaps})} of {len(texts)} rows overlap a benchmark")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.data", description=__doc__)
    check = parser.add_subparsers(required=True, metavar="contamination").add_parser(
        "contamination", help="which benchmark problems a training set holds"
    )
    check.add_argument("source", help="a .jsonl or .parquet file, or a dataset on the Hub")
    check.add_argument("--subset", help="configuration name of a Hub dataset")
    check.add_argument("--split", default="train", help="split of a Hub dataset")
    check.add_argument("--prompt-column", help="by default `prompt`, `problem` or `question`")
    check.add_argument("--benchmarks", nargs="+", default=["all"], help="`all`, their names, or .jsonl files")
    check.add_argument("--out", type=Path, help="write the rows that overlap none (.jsonl)")
    arguments = parser.parse_args()
    with one_line_errors():
        names = BENCHMARK_NAMES if arguments.benchmarks == ["all"] else arguments.benchmarks
        problems = [problem for name in names for problem in load_benchmark(name)[1]]
        rows = load_rows(
            arguments.source,
            subset=arguments.subset,
            split=arguments.split,
            prompt_column=arguments.prompt_column,
            answer_column=None,
            max_operand=1,
        )
        usual = [name for name in ("prompt", "problem", "question") if name in rows[0]]
        if not arguments.prompt_column and not usual:
            raise InputError(f"--prompt-column: {arguments.source} has the columns {', '.join(rows[0])}; name one")
        column = arguments.prompt_column or usual[0]
        texts = [prompt_text(row.get(column)) for row in rows]
        overlaps = find_overlaps(texts, problems)
        print(contamination_report(overlaps, texts, problems))
        if arguments.out:
            dropped = {overlap.row for overlap in overlaps}
            try:
                write_lines(arguments.out, (row for number, row in enumerate(rows) if number not in dropped))
            except OSError as error:
                raise InputError(f"--out={arguments.out}: cannot be written ({error.strerror})") from None
            print(f"{len(rows) - len(dropped)} rows: {arguments.out}")


if __name__ == "__main__":
    main()
