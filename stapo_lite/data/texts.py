"""The text of a completion, as reward functions and graders see it."""

from functools import lru_cache
from itertools import compress
from typing import Any

from stapo_lite.types import Completion

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that reward functions look for, also where a tokenizer calls them special."""


def set_text(completion: Completion, tokenizer: Any, skip_special_tokens: bool | None) -> None:
    """Set `text`, which reward functions see, and `whole_text`, which graders see: special tokens
    kept except the last, and in a chat only the model's own turns.

    Args:
        skip_special_tokens: `rollout.skip_special_tokens`, whether `text` has no special tokens.
            None drops them if all TAGS stay.
    """
    token_ids = completion.token_ids
    answer_ids = token_ids
    if completion.messages and completion.loss_mask:
        # What a tool returned is not the model's answer.
        answer_ids = list(compress(token_ids, completion.loss_mask))
    completion.whole_text = decode_without_end(answer_ids, tokenizer)
    if completion.prompt.opens_thinking:
        completion.whole_text = f"<think>{completion.whole_text}"
    if skip_special_tokens is None:
        skip_special_tokens = keeps_tags(tokenizer)
    if skip_special_tokens:
        completion.text = tokenizer.decode(token_ids, skip_special_tokens=True)
    else:
        completion.text = decode_without_end(token_ids, tokenizer)


def decode_without_end(token_ids: list[int], tokenizer: Any) -> str:
    """The text of tokens with all special ones but the last, which only ends the turn."""
    last = token_ids[-1:]
    if tokenizer.decode(last) and not tokenizer.decode(last, skip_special_tokens=True):
        token_ids = token_ids[:-1]
    return tokenizer.decode(token_ids)


@lru_cache(maxsize=1)  # asked for every completion
def keeps_tags(tokenizer: Any) -> bool:
    """Whether the TAGS are no special tokens, so that they stay when those are skipped."""
    token_ids = tokenizer("".join(TAGS), add_special_tokens=False).input_ids
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return all(tag in text for tag in TAGS)
