"""Prompts as messages, and messages as the text that the model reads."""

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from stapo_lite.config import Prompting
from stapo_lite.errors import InputError, explained
from stapo_lite.types import copied


def render(prompt: Any, tokenizer: Any, prompting: Prompting, where: str) -> str:
    """Render a prompt with system prompt and suffix, by the chat template if it is on.

    Args:
        where: file and row, for messages.

    Raises:
        InputError: the prompt is of the wrong type or empty, or the template refuses it.
    """
    templated = prompting.apply_chat_template
    if fault := find_fault(prompt, templated):
        raise InputError(f"{where}: {fault} (data.prompt_column)")
    messages = conversation(prompt, prompting)
    if not templated:
        return messages[-1]["content"]
    with explained(f"{where}: the model's chat template refuses the prompt"):
        return apply_template(messages, tokenizer, prompting.chat_template_kwargs)


def prompt_text(prompt: Any) -> str:
    """A prompt's text, or that of its messages; empty for anything else."""
    if isinstance(prompt, str):
        return prompt
    if find_fault(prompt, templated=True):
        return ""
    return "\n".join(message.get("content", "") for message in _messages(prompt))


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


def find_fault(prompt: Any, templated: bool) -> str:
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
    messages = copied(prompt, keep_none=False)  # None: a field that only other rows have
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
    return messages
