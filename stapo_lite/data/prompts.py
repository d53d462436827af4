"""The prompts of a data set: checked before a run, rendered and tokenized when they are used."""

import logging
import math
import reprlib
from array import array
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from stapo_lite.config import Data
from stapo_lite.data.messages import render
from stapo_lite.data.texts import TAGS
from stapo_lite.errors import InputError, explained
from stapo_lite.types import Prompt

logger = logging.getLogger(__name__)

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what a text model cannot read."""
ENDS_WITH_ANSWER = (
    "a prompt ends with a message of the assistant, which the model continues; a reference answer "
    "belongs into data.answer_column"
)
RENDERED_ALREADY = (
    "a prompt has tokens of the chat template, which it gets; if it has been rendered already, set "
    "data.apply_chat_template=false"
)


class Prompts(Sequence[Prompt]):
    """The prompts of a data set. Each one is read, rendered and tokenized when it is asked for, so
    that rows on disk stay there.

    Args:
        make: makes the prompt of a row.
        numbers: of the rows, in order.
    """

    def __init__(self, make: Callable[[int], Prompt], numbers: Sequence[int]):
        self._make = make
        self._numbers = numbers

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
    key: str = "data.source",
) -> Prompts:
    """Check that every prompt of a data set can be rendered and tokenized.

    Args:
        tokenizer: a transformers tokenizer.
        graded: whether each row must have an answer.
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
    where = f"{key}={data.source}"
    numbers = array("q")
    warning = ""
    marks = marks_of_template(tokenizer) if data.apply_chat_template else []

    def make(number: int, row: Any) -> Prompt:
        return _make_prompt(row, tokenizer, data, graded, f"{where}, row {number + 1}")

    for number, row in enumerate(rows):
        prompt = make(number, row)
        count = len(prompt.token_ids)
        longest = data.max_prompt_length
        if count <= longest:
            numbers.append(number)
            warning = warning or doubt(prompt.prompt, marks)
        elif not data.filter_overlong_prompts:
            drop = ", or set data.filter_overlong_prompts=true" if key == "data.source" else ""
            raise InputError(
                f"{where}, row {number + 1}: the prompt has {count} tokens, data.max_prompt_length "
                f"is {longest}: raise it{drop}"
            )
    if not numbers:
        raise InputError(f"{where}: no prompt is left")
    if warning:
        logger.warning("%s: %s", where, warning)
    return Prompts(lambda number: make(number, rows[number]), numbers)


def marks_of_template(tokenizer: Any) -> list[str]:
    """Tokens that the chat template adds, and a prompt has only if it went through one."""
    # In Gemma, runs of line breaks are added tokens, too.
    added = {t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()}
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
    text = render(prompt, tokenizer, data, where)
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


def find_answer(row: Any, column: str) -> Any:
    """The answer in a row, whatever it is; None if there is none.

    Args:
        column: `a.b` is key `b` of column `a`.
    """
    answer = row
    for name in [column] if column in row else column.split("."):
        answer = answer.get(name) if isinstance(answer, dict) else None
    if hasattr(answer, "item"):  # a number of numpy or torch
        answer = answer.item()
    return answer


def _read_answer(row: Any, column: str, where: str) -> Any:
    answer = find_answer(row, column)
    if not is_answer(answer):
        raise InputError(
            f"{where}: data.answer_column={column} is neither text nor a number, which the reward "
            f"`math` needs: {reprlib.repr(answer)}; drop the row or give its answer"
        )
    return answer
