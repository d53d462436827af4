"""Prompts: read, rendered with the chat template, and checked."""

import logging
import math
import pkgutil
import re
import reprlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from glob import glob
from itertools import compress
from pathlib import Path
from typing import Any

from stapo_lite.config import Data, Prompting
from stapo_lite.errors import InputError, explained
from stapo_lite.files import read_jsonl, read_table
from stapo_lite.types import Completion, Prompt

logger = logging.getLogger(__name__)

ROW_FILES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".xz")
"""How the names of files of rows end."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what a text model cannot read."""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ENDS_WITH_ANSWER = (
    "a prompt ends with a message of the assistant, which the model continues; a reference answer "
    "belongs into data.answer_column"
)
RENDERED_ALREADY = (
    "a prompt has tokens of the chat template, which it gets; if it has been rendered already, set "
    "data.apply_chat_template=false"
)


def load_rows(data: Data, key: str = "data.source") -> Sequence[dict[str, Any]]:
    """Load the rows of the data set. A dataset from the Hub stays on disk; each row is read on
    access.

    Args:
        key: the config key of the source, for messages.

    Raises:
        InputError: there is no such file or Hub dataset, or it has no rows.
    """
    where = f"{key}={data.source}"
    kinds = (
        "neither a readable file of rows (docs/data.md), nor a dataset on the Hub, nor a "
        "package.module:function that returns rows"
    )
    with explained(f"{where}: {kinds}"):
        return check_rows(
            _read_files(data, where) if names_file(data.source) else _read_dataset(data), where
        )


def _read_files(data: Data, where: str) -> Sequence[dict[str, Any]]:
    """Rows of a file, or of all files that a pattern (`*.jsonl`) matches; in every format the
    same."""
    paths = [data.source] if Path(data.source).is_file() else sorted(glob(data.source))
    if not paths:
        raise InputError(f"{where}: no such file")
    if data.source.lower().endswith(".parquet"):
        import datasets

        return datasets.load_dataset("parquet", data_files=paths, split="train")
    end = Path(data.source.lower().removesuffix(".gz").removesuffix(".xz")).suffix
    tables = {".csv": partial(read_table, ","), ".tsv": partial(read_table, "\t")}
    read = tables.get(end, read_jsonl)
    return [row for path in paths for row in read(path)]


def names_file(source: str) -> bool:
    """Whether a source ends like a file of rows; names on the Hub may have a dot, too."""
    return Path(source).suffix.lower() in ROW_FILES


def check_rows(rows: Sequence[Any], where: str) -> Sequence[dict[str, Any]]:
    """Check the rows and return them.

    Raises:
        InputError: there are none, or the first is no dictionary.
    """
    with explained(f"{where}: must be a list of rows or a datasets.Dataset"):
        if isinstance(rows[0], dict):
            return rows
    raise InputError(f"{where}: rows must be dictionaries")


def _read_dataset(data: Data) -> Sequence[dict[str, Any]]:
    """Rows from a function, of a folder of `save_to_disk`, or of a dataset on the Hub."""
    if ":" in data.source:
        return list(pkgutil.resolve_name(data.source)())
    import datasets

    with suppress(FileNotFoundError):  # it is no such folder
        saved = datasets.load_from_disk(data.source)
        return saved[data.split] if isinstance(saved, dict) else saved
    return datasets.load_dataset(data.source, data.subset, split=data.split)


def prompt_text(prompt: Any) -> str:
    """A prompt's text, or that of its messages; empty for anything else."""
    if isinstance(prompt, str):
        return prompt
    if _fault(prompt, templated=True):
        return ""
    return "\n".join(message.get("content", "") for message in _messages(prompt))


class Prompts(Sequence[Prompt]):
    """The prompts of a data set. Each one is read, rendered and tokenized when it is asked for, so
    that rows on disk stay there.

    Args:
        make: makes the prompt of a row.
        numbers: of the rows, in order.
    """

    def __init__(self, make: Callable[[int], Prompt], numbers: Sequence[int]):
        self._make, self._numbers = make, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(number) for number in self._numbers[index]]
        return self._make(self._numbers[index])


def make_prompts(
    rows: Sequence[Any],
    tokenizer: Any,
    data: Data,
    graded: bool,
    left_out: Collection[int] = (),
    key: str = "data.source",
) -> Prompts:
    """Check that every prompt of a data set can be rendered and tokenized.

    Args:
        tokenizer: a transformers tokenizer.
        graded: whether each row must have an answer.
        left_out: indices of rows to leave out.
        key: the config key of the source, for messages.

    Raises:
        InputError: a prompt is of the wrong type, empty, refused by the chat template, or longer
            than `max_prompt_length` tokens (unless those are filtered); an answer is missing;
            nothing is left; the tokenizer has no chat template.
    """
    if data.apply_chat_template and not tokenizer.chat_template:
        raise InputError(
            "data.apply_chat_template: the model's tokenizer has no chat template; set it to "
            "false to give the model the prompt as it is, or choose an instruction-tuned model"
        )
    where, kept, warning = f"{key}={data.source}", array("q"), ""
    marks = marks_of_template(tokenizer) if data.apply_chat_template else []

    def make(number: int, row: Any) -> Prompt:
        return _make_prompt(row, tokenizer, data, graded, f"{where}, row {number + 1}")

    for number, row in enumerate(rows):
        if number in left_out:
            continue
        prompt = make(number, row)
        count, longest = len(prompt.token_ids), data.max_prompt_length
        if count <= longest:
            kept.append(number)
            warning = warning or doubt(prompt.prompt, marks)
        elif not data.filter_overlong_prompts:
            drop = ", or set data.filter_overlong_prompts=true" if key == "data.source" else ""
            raise InputError(
                f"{where}, row {number + 1}: the prompt has {count} tokens, data.max_prompt_length "
                f"is {longest}: raise it{drop}"
            )
    if not kept:
        raise InputError(f"{where}: no prompt is left")
    if warning:
        logger.warning("%s: %s", where, warning)
    return Prompts(lambda number: make(number, rows[number]), kept)


def marks_of_template(tokenizer: Any) -> list[str]:
    """Tokens that the chat template adds, and a prompt has only if it went through one."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return [mark for mark in added.difference(TAGS) if mark in str(tokenizer.chat_template)]


def doubt(prompt: str | list[dict[str, Any]], marks: Sequence[str]) -> str:
    """What a user may not have meant by a prompt; empty if nothing.

    Args:
        marks: of the chat template.
    """
    if isinstance(prompt, list):
        return ENDS_WITH_ANSWER if prompt[-1]["role"] == "assistant" else ""
    return RENDERED_ALREADY if any(mark in prompt for mark in marks) else ""


def _make_prompt(
    row: dict[str, Any], tokenizer: Any, data: Data, graded: bool, where: str
) -> Prompt:
    if not isinstance(row, dict):
        raise InputError(f"{where}: must be a dictionary, got {reprlib.repr(row)}")
    prompt: Any = row.get(data.prompt_column)
    for name in MEDIA:
        value = row.get(name)
        empty = value is None or (isinstance(value, str | list) and not value)
        if not empty:
            raise InputError(f"{where}: column {name}: only text can be trained on; drop it")
    answer = _read_answer(row, data.answer_column, where) if graded else None
    text = _render(prompt, tokenizer, data, where)
    with explained(f"{where}: the prompt cannot be tokenized"):  # half a character
        encoded = tokenizer(text, add_special_tokens=not data.apply_chat_template)
    columns = {name: value for name, value in row.items() if name != data.prompt_column}
    thinking = text.rstrip().endswith("<think>")
    return Prompt(prompt, encoded.input_ids, answer, columns, opens_thinking=thinking)


def is_answer(value: Any) -> bool:
    """Whether it is a text that is not empty, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    # Not `isfinite`, for which an int may be too large.
    return isinstance(value, int | float | Decimal) and value == value and abs(value) != math.inf


def _read_answer(row: Any, column: str, where: str) -> Any:
    answer = row
    for name in [column] if column in row else column.split("."):
        answer = answer.get(name) if isinstance(answer, dict) else None
    if hasattr(answer, "item"):  # a number of numpy or torch
        answer = answer.item()
    if not is_answer(answer):
        raise InputError(
            f"{where}: data.answer_column={column} is neither text nor a number, which the reward "
            f"`math` needs: {reprlib.repr(answer)}; drop the row or give its answer"
        )
    return answer


def _render(prompt: Any, tokenizer: Any, prompting: Prompting, where: str) -> str:
    """Render a prompt with system prompt and suffix, by the chat template if it is on."""
    templated = prompting.apply_chat_template
    if fault := _fault(prompt, templated):
        raise InputError(f"{where}: {fault} (data.prompt_column)")
    messages = conversation(prompt, prompting)
    if not templated:
        return messages[-1]["content"]
    with explained(f"{where}: the model's chat template refuses the prompt"):
        return apply_template(messages, tokenizer, prompting.chat_template_kwargs)


def conversation(prompt: str | list[dict[str, Any]], prompting: Prompting) -> list[dict[str, Any]]:
    """The messages of a prompt, with system prompt and suffix."""
    as_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = _messages(as_messages)
    if prompting.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": prompting.system_prompt})
    of_user = [message for message in messages if message["role"] == "user"]
    if of_user:
        of_user[-1]["content"] += prompting.prompt_suffix
    return messages


def apply_template(
    messages: list[dict[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]
) -> str:
    """Render messages for the model to continue. If the last message is the assistant's, it is left
    open; otherwise a new assistant turn is begun.

    Args:
        arguments: of the chat template, such as `enable_thinking` or `tools`.
    """
    continues = messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **arguments,
    )


def stop_token_ids(
    tokenizer: Any, model_eos: int | list[int] | None, apply_chat_template: bool
) -> tuple[int, ...]:
    """Tokens that end a completion: end of text of tokenizer and model, and the chat template's end
    of an assistant turn, which base models with a chat template do not declare."""
    ids = {tokenizer.eos_token_id}
    ids.update([model_eos] if isinstance(model_eos, int) else model_eos or [])
    if apply_chat_template:
        turns = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "answer"},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        after = tokenizer(text.rpartition("answer")[2].lstrip(), add_special_tokens=False).input_ids
        if after and after[0] in tokenizer.added_tokens_decoder:
            ids.add(after[0])
    return tuple(sorted(ids - {None}))


def set_text(completion: Completion, tokenizer: Any, skip_special_tokens: bool | None) -> None:
    """Set the text for rewards and, with special tokens but for the last, that for graders, which
    of a chat has the model's turns only: what a tool returned is not the model's answer.

    Args:
        skip_special_tokens: `rollout.skip_special_tokens`.
    """
    ids = completion.token_ids

    def without_end(ids: list[int]) -> str:
        last = ids[-1:]
        is_special = not tokenizer.decode(last, skip_special_tokens=True) and tokenizer.decode(last)
        return tokenizer.decode(ids[:-1] if is_special else ids)

    whole = graded = without_end(ids)
    if completion.messages and completion.loss_mask:
        graded = without_end(list(compress(ids, completion.loss_mask)))
    skipped = tokenizer.decode(ids, skip_special_tokens=True)
    if skip_special_tokens is None:
        tags = tokenizer("".join(TAGS), add_special_tokens=False).input_ids
        left = tokenizer.decode(tags, skip_special_tokens=True)
        skip_special_tokens = all(tag in left for tag in TAGS)
    completion.text = skipped if skip_special_tokens else whole
    completion.whole_text = f"<think>{graded}" if completion.prompt.opens_thinking else graded


def _fault(prompt: Any, templated: bool) -> str:
    """Why a prompt is neither text nor (with a chat template) messages; empty if it is one."""
    if isinstance(prompt, str):
        if re.match(r'\[\s*{\s*"(role|content)"', prompt.strip()):
            return "the prompt is messages as JSON text: store them as a list"
        return "" if prompt.strip() else "the prompt is empty"
    if templated and isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return ""
    expected = "text or a list of {role, content} messages" if templated else "text"
    return f"the prompt must be {expected}, got {reprlib.repr(prompt)}"


def _is_message(value: Any) -> bool:
    """Whether it is a message of text, or one that calls tools."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if isinstance(content, list):
        return all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content)
    return isinstance(content, str) or bool(value.get("tool_calls"))


def _messages(prompt: Any) -> list[dict[str, Any]]:
    """Copies of messages, with the parts of their contents joined."""
    messages = _without_none(prompt)
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
    return messages


def _without_none(value: Any) -> Any:
    """Copy messages without fields that are None: a data set fills in None for fields that only
    other rows have."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return value
