"""Prompts: read, rendered with the chat template, and checked."""

import hashlib
import logging
import os
import pkgutil
import reprlib
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from stapo_lite.config import Data, Prompting
from stapo_lite.errors import InputError, explained, one_line
from stapo_lite.files import read_jsonl
from stapo_lite.types import Prompt

logger = logging.getLogger(__name__)


def load_rows(data: Data, key: str = "data.source") -> Sequence[dict[str, Any]]:
    """Rows of the data set; one of the Hub stays on the disk, where each row is read when it is asked for.

    Args:
        key: that named the source, for messages.

    Raises:
        InputError: no such file or Hub dataset, no rows, or an id twice.
    """
    source, suffix, where = data.source, Path(data.source).suffix.lower(), f"{key}={data.source}"
    is_file = suffix in (".jsonl", ".parquet")
    if is_file and not Path(source).is_file():
        raise InputError(f"{where}: no such file")
    try:
        rows = read_jsonl(Path(source)) if suffix == ".jsonl" else _read_dataset(data)
        check_rows(rows, where)
    except InputError:
        raise
    except Exception as error:  # the readers and the Hub raise a dozen kinds
        reason = one_line(error.__cause__ or error) or type(error).__name__
        raise InputError(
            f"{where}: neither a readable .jsonl or .parquet file, nor a dataset on the Hub, nor a "
            f"package.module:function that returns rows ({reason})"
        ) from None
    ids = Counter(str(row["id"]) for row in (rows if is_file else ()) if "id" in row)
    twice = [name for name, count in ids.items() if count > 1]
    if twice:
        raise InputError(f"{where}: {len(twice)} ids occur more than once, as {twice[0][:80]}; drop rows")
    return rows


def check_rows(rows: Sequence[Any], where: str) -> Sequence[dict[str, Any]]:
    """The rows themselves.

    Raises:
        InputError: there are none, they have no number (a stream), or one is no dictionary.
    """
    if isinstance(rows, Mapping) or not hasattr(rows, "__len__"):  # a DatasetDict, a stream
        raise InputError(f"{where}: must be a list of rows or a datasets.Dataset, got {type(rows).__name__}")
    if not len(rows):
        raise InputError(f"{where}: no rows")
    if not all(isinstance(row, dict) for row in rows):
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
    """The text of a prompt that is text or messages; empty for anything else."""
    if isinstance(prompt, str):
        return prompt
    return "" if _fault(prompt, templated=True) else "\n".join(message.get("content") or "" for message in prompt)


class Prompts(Sequence[Prompt]):
    """The prompts of a data set, each rendered and tokenized when it is asked for: rows on the disk stay there.

    All are rendered once at the beginning, to be checked.

    Args:
        tokenizer: a transformers tokenizer.
        graded: whether each row must have an answer.
        left_out: numbers of the rows, from 0, to leave out.
        key: that named the source, for messages.

    Attributes:
        digest: SHA-256 of token ids and answers.

    Raises:
        InputError: a prompt is of the wrong type, empty, refused by the chat template, or longer than
            `max_prompt_length` tokens (unless those are filtered); an answer is missing; nothing is left;
            the tokenizer has no chat template.
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
                "data.apply_chat_template: the model's tokenizer has no chat template; set it to false to give the "
                "model the prompt as it is, or choose an instruction-tuned model"
            )
        longest, digest = data.max_prompt_length, hashlib.sha256()
        noticing = data.apply_chat_template and os.environ.get("RANK", "0") == "0"
        markers = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special] if noticing else []
        # More characters than this are too many tokens for certain, and slow to tokenize; 4: NFC may shorten a text so.
        self._enough = 4 * (longest + 1) * max(map(len, tokenizer.get_vocab()))
        self._kept = array("q")
        for number, row in enumerate(rows):
            if number in left_out:
                continue
            prompt = self._prompt(number, row)
            text = prompt.prompt if isinstance(prompt.prompt, str) else ""
            if found := [marker for marker in markers if marker in text]:
                message = "%s: the text holds %s and gets the chat template; if it has been through one, set %s=false"
                logger.warning(message, self._where(number), found[0], "data.apply_chat_template")
                markers = []  # once is enough
            if len(prompt.token_ids) <= longest:
                self._kept.append(number)
                digest.update(repr((prompt.token_ids, prompt.answer)).encode())
            elif not data.filter_overlong_prompts:
                where, count = self._where(number), len(prompt.token_ids)
                more = " or more" if len(_render(prompt.prompt, tokenizer, data, where)) > self._enough else ""
                raise InputError(
                    f"{where}: the prompt has {count} tokens{more}, data.max_prompt_length is {longest}; "
                    "raise it, or drop such rows (data.filter_overlong_prompts=true does, but for benchmarks)"
                )
        if not self._kept:
            raise InputError(f"{self._source}: every prompt is longer than data.max_prompt_length={longest}")
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

    def _prompt(self, number: int, row: dict[str, Any]) -> Prompt:
        """The prompt of a row; of one that is much too long the tokens of its beginning."""
        where, d = self._where(number), self._data
        prompt: Any = row.get(d.prompt_column)
        for name in ("image", "images"):
            value = row.get(name)
            if not isinstance(value, str | int | float | None) and not (isinstance(value, list) and not value):
                raise InputError(
                    f"{where}: images are not supported; without the column {name!r} it trains on the text"
                )
        answer = _read_answer(row, d.answer_column, where) if self._graded else None
        text = _render(prompt, self._tokenizer, d, where)[: self._enough]
        token_ids = self._tokenizer(text, add_special_tokens=not d.apply_chat_template).input_ids
        if not token_ids:
            raise InputError(f"{where}: the prompt is empty")
        columns = {name: value for name, value in row.items() if name != d.prompt_column}
        return Prompt(prompt, token_ids, answer, columns, opens_thinking=text.rstrip().endswith("<think>"))


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
    if fault := _fault(prompt, templated):
        raise InputError(f"{where}: {fault}")
    messages = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        messages = _without_none(prompt)
    if prompting.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": prompting.system_prompt})
    of_user = [message for message in messages if message["role"] == "user"]
    if of_user:
        of_user[-1]["content"] += prompting.prompt_suffix
    text = messages[-1].get("content", "")
    if templated:
        continues = messages[-1]["role"] == "assistant"
        end = {"add_generation_prompt": not continues, "continue_final_message": continues}
        with explained(f"{where}: the model's chat template refuses the prompt"):
            text = tokenizer.apply_chat_template(messages, tokenize=False, **end, **prompting.chat_template_kwargs)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: the prompt is not valid Unicode (half of a surrogate pair): mend the row") from None
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


def _fault(prompt: Any, templated: bool) -> str:
    """The fault that keeps a prompt from being text, or messages for a chat template; empty without one."""
    if isinstance(prompt, str):
        return ""
    if not (templated and isinstance(prompt, list) and prompt and all(isinstance(one, dict) for one in prompt)):
        expected = "text or a list of {role, content} messages" if templated else "text"
        return f"the prompt must be {expected}, got {reprlib.repr(prompt)}"
    for number, message in enumerate(prompt, start=1):
        for name in ("role", "content"):
            calls = name == "content" and message.get(name) is None and message.get("tool_calls")
            if not (isinstance(message.get(name), str) or calls):
                return f"message {number} of the prompt: {name} must be text, got {reprlib.repr(message.get(name))}"
    return ""


def _without_none(value: Any) -> Any:
    """A copy of messages without the fields that are None: a data set has one wherever another row has a value."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
