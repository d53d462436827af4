"""Prompts: read, rendered with the chat template, and checked."""

import hashlib
import logging
import math
import os
import pkgutil
import reprlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from stapo_lite.config import Data, Prompting
from stapo_lite.errors import InputError, explained
from stapo_lite.files import read_jsonl
from stapo_lite.types import Prompt

logger = logging.getLogger(__name__)


def load_rows(data: Data, key: str = "data.source") -> Sequence[dict[str, Any]]:
    """Load the rows of the data set. A dataset from the Hub stays on disk; each row is read on
    access.

    Args:
        key: the config key of the source, for messages.

    Raises:
        InputError: there is no such file or Hub dataset, or it has no rows.
    """
    where = f"{key}={data.source}"
    suffix = Path(data.source).suffix.lower()
    if suffix in (".jsonl", ".parquet") and not Path(data.source).is_file():
        raise InputError(f"{where}: no such file")
    kinds = (
        "neither a readable .jsonl or .parquet file, nor a dataset on the Hub, nor a "
        "package.module:function that returns rows"
    )
    with explained(f"{where}: {kinds}"):
        rows = read_jsonl(Path(data.source)) if suffix == ".jsonl" else _read_dataset(data)
    return check_rows(rows, where)


def check_rows(rows: Sequence[Any], where: str) -> Sequence[dict[str, Any]]:
    """Check the rows and return them.

    Raises:
        InputError: there are none, they have no length (a stream), or they are not dictionaries.
    """
    if isinstance(rows, Mapping) or not hasattr(rows, "__len__"):  # a DatasetDict; a stream
        kind = type(rows).__name__
        raise InputError(f"{where}: must be a list of rows or a datasets.Dataset, got {kind}")
    if not len(rows):
        raise InputError(f"{where}: no rows")
    with explained(
        f"{where}: must be a list of rows or a datasets.Dataset", LookupError, TypeError
    ):
        checked = rows if isinstance(rows, list) else [rows[0]]  # others may be on disk
    if not all(isinstance(row, dict) for row in checked):
        raise InputError(f"{where}: rows must be dictionaries")
    return rows


def _read_dataset(data: Data) -> Sequence[dict[str, Any]]:
    """Rows of a Parquet file, from a function, or of a dataset on the Hub."""
    if data.source.lower().endswith(".parquet"):
        from pyarrow import parquet

        return parquet.read_table(data.source).to_pylist()
    if ":" in data.source:
        return list(pkgutil.resolve_name(data.source)())
    import datasets

    return datasets.load_dataset(data.source, data.subset, split=data.split)


def prompt_text(prompt: Any) -> str:
    """A prompt's text, or that of its messages; empty for anything else."""
    if isinstance(prompt, str):
        return prompt
    if _fault(prompt, templated=True):
        return ""
    return "\n".join(message.get("content") or "" for message in prompt)


class Prompts(Sequence[Prompt]):
    """The prompts of a data set, rendered and tokenized on access, so that rows on disk stay there.

    The constructor renders every prompt once, to check it.

    Args:
        tokenizer: a transformers tokenizer.
        graded: whether each row must have an answer.
        left_out: indices of rows to leave out.
        key: the config key of the source, for messages.

    Attributes:
        digest: SHA-256 of token ids and answers.

    Raises:
        InputError: a prompt is of the wrong type, empty, refused by the chat template, or longer
            than `max_prompt_length` tokens (unless those are filtered); an answer is missing;
            nothing is left; the tokenizer has no chat template.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        tokenizer: Any,
        data: Data,
        graded: bool,
        left_out: Collection[int] = (),
        key: str = "data.source",
    ):
        self._source = f"{key}={data.source}"
        self._rows, self._tokenizer, self._data, self._graded = rows, tokenizer, data, graded
        if data.apply_chat_template and not tokenizer.chat_template:
            raise InputError(
                "data.apply_chat_template: the model's tokenizer has no chat template; set it to "
                "false to give the model the prompt as it is, or choose an instruction-tuned model"
            )
        added = tokenizer.added_tokens_decoder.values()
        self._markers = [str(token) for token in added if token.special]
        if not data.apply_chat_template or os.environ.get("RANK", "0") != "0":
            self._markers = []
        digest = hashlib.sha256()
        self._kept = array("q")
        for number, row in enumerate(rows):
            if number in left_out:
                continue
            prompt = self._prompt(number, row)
            self._warn_of_markers(number, prompt.prompt)
            if self._fits(number, prompt):
                self._kept.append(number)
                digest.update(repr((prompt.token_ids, prompt.answer)).encode())
        if not self._kept:
            longest = data.max_prompt_length
            raise InputError(
                f"{self._source}: every prompt is longer than data.max_prompt_length={longest}"
            )
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = self._kept[index]
        return self._prompt(number, self._rows[number])

    def _where(self, number: int) -> str:
        return f"{self._source}, row {number + 1}"

    def _warn_of_markers(self, number: int, prompt: Any) -> None:
        """Warn once if a prompt seems to have been rendered with a chat template already."""
        for marker in self._markers:
            if isinstance(prompt, str) and marker in prompt:
                message = (
                    "%s: the text holds %s and gets the chat template; if it has been through one, "
                    "set data.apply_chat_template=false"
                )
                logger.warning(message, self._where(number), marker)
                self._markers = []
                break

    def _fits(self, number: int, prompt: Prompt) -> bool:
        count, longest = len(prompt.token_ids), self._data.max_prompt_length
        if count > longest and not self._data.filter_overlong_prompts:
            raise InputError(
                f"{self._where(number)}: the prompt has {count} tokens, data.max_prompt_length is "
                f"{longest}; raise it, or drop such rows (data.filter_overlong_prompts=true does, "
                "but for benchmarks)"
            )
        return count <= longest

    def _prompt(self, number: int, row: dict[str, Any]) -> Prompt:
        where, data = self._where(number), self._data
        for name in ("image", "images"):
            value = row.get(name)
            empty = isinstance(value, list) and not value
            if not empty and not isinstance(value, str | int | float | None):
                raise InputError(
                    f"{where}: images are not supported; without the column {name!r} it trains on "
                    "the text"
                )
        prompt: Any = row.get(data.prompt_column)
        answer = _read_answer(row, data.answer_column, where) if self._graded else None
        text = _render(prompt, self._tokenizer, data, where)
        with explained(f"{where}: the prompt is not valid Unicode", UnicodeError, TypeError):
            encoded = self._tokenizer(text, add_special_tokens=not data.apply_chat_template)
        if not encoded.input_ids:
            raise InputError(f"{where}: the prompt is empty")
        columns = {name: value for name, value in row.items() if name != data.prompt_column}
        thinking = text.rstrip().endswith("<think>")
        return Prompt(prompt, encoded.input_ids, answer, columns, opens_thinking=thinking)


def is_answer(value: Any) -> bool:
    """Whether it is a text that is not empty, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int | float) and math.isfinite(value)


def _read_answer(row: dict[str, Any], column: str, where: str) -> Any:
    answer = row.get(column)
    if not is_answer(answer):
        raise InputError(
            f"{where}: data.answer_column={column} is empty, or neither text nor a number: "
            f"{reprlib.repr(answer)}; drop the row or give its answer"
        )
    return answer


def _render(prompt: Any, tokenizer: Any, prompting: Prompting, where: str) -> str:
    """Render a prompt with system prompt and suffix, by the chat template if it is on."""
    templated = prompting.apply_chat_template
    if fault := _fault(prompt, templated):
        raise InputError(f"{where}: {fault}")
    messages = conversation(prompt, prompting)
    if not templated:
        return messages[-1]["content"]
    with explained(f"{where}: the model's chat template refuses the prompt"):
        return apply_template(messages, tokenizer, prompting.chat_template_kwargs)


def conversation(prompt: str | list[dict[str, Any]], prompting: Prompting) -> list[dict[str, Any]]:
    """The messages of a prompt, with system prompt and suffix."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = _without_none(prompt)
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


def _fault(prompt: Any, templated: bool) -> str:
    """Why a prompt is neither text nor (with a chat template) messages; empty if it is one."""
    if isinstance(prompt, str):
        return "" if prompt.strip() or not templated else "the prompt is empty"
    expected = "text or a list of {role, content} messages" if templated else "text"
    listed = templated and isinstance(prompt, list) and prompt
    if not listed or not all(isinstance(message, dict) for message in prompt):
        return f"the prompt must be {expected}, got {reprlib.repr(prompt)}"
    for number, message in enumerate(prompt, start=1):
        for name in ("role", "content"):
            value = message.get(name)
            calls_tools = name == "content" and value is None and message.get("tool_calls")
            if not isinstance(value, str) and not calls_tools:
                got = reprlib.repr(value)
                return f"message {number} of the prompt: {name} must be text, got {got}"
    return ""


def _without_none(value: Any) -> Any:
    """Copy messages without fields that are None: a data set fills in None for fields that only
    other rows have."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return value
