"""Tools in a chat: functions become schemas, the model's text becomes calls, and results become
messages.

The model's chat template decides how each is written. vLLM's parsers read the calls back.
"""

import inspect
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from transformers.utils import get_json_schema

from stapo_lite.config import Prompting
from stapo_lite.data.messages import apply_template, conversation
from stapo_lite.errors import InputError, Terminated, explained, one_line
from stapo_lite.types import Prompt

Message = dict[str, Any]
Schema = dict[str, Any]
Tool = Callable[..., Any]
Call = dict[str, Any]
"""`name` and `arguments` of a function that the model wants called."""
FAILURES = (Exception, SystemExit, GeneratorExit)
"""What a tool may raise without ending the run: also what code that the model wrote may raise."""
SCHEMAS: WeakKeyDictionary[Tool, Schema] = WeakKeyDictionary()
"""Made once: a schema takes 5 ms, and each episode asks for it."""
CALL_ID = "call00000"  # Mistral's template wants nine letters and digits


def schemas_of(tools: Sequence[Tool]) -> list[Schema]:
    """The JSON schemas of functions (transformers' `get_json_schema`).

    Raises:
        InputError: a docstring, a type hint or the description of an argument is missing; two have
            the same name.
    """
    with explained("tools: a list of functions with type hints, and docstrings for the arguments"):
        schemas = [schema_of(tool) for tool in tools]
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise InputError(f"tools: two of {', '.join(names)} have the same name")
    return schemas


def schema_of(tool: Tool) -> Schema:
    """The JSON schema of one function. Methods of several objects of a class have the same."""
    function = getattr(tool, "__func__", tool)
    if function not in SCHEMAS:
        SCHEMAS[function] = get_json_schema(tool)
    return SCHEMAS[function]


async def run_tool(
    tools: Sequence[Tool], in_main_thread: Callable[..., Awaitable[Any]], call: Call
) -> str:
    """Run a tool and return its result as text: strings as they are, other values as JSON.

    An error becomes the result, so that the model can react to it. Plain functions run in the main
    thread, one at a time. Coroutines run side by side.

    Args:
        in_main_thread: calls a function there.
    """
    functions = {tool.__name__: tool for tool in tools}
    try:
        if call["name"] not in functions:
            raise LookupError(f"there is no tool {call['name']!r}, only {', '.join(functions)}")
        result = await in_main_thread(_run, functions[call["name"]], call["arguments"])
        if inspect.isawaitable(result):  # the tool is a coroutine function
            result = await result
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, str):
            return result
        return json.dumps(result, default=str, ensure_ascii=False)
    except FAILURES as error:
        return f"error: {type(error).__name__}: {one_line(error)}"


def _run(function: Tool, arguments: dict[str, Any]) -> Any:
    """The result of a function, or what it raises."""
    try:
        return function(**arguments)
    except Terminated:
        raise
    except FAILURES as error:
        return error


def answer_of(call: Call, result: str) -> Message:
    """The message that gives a tool's result to the model."""
    return {"role": "tool", "name": call["name"], "tool_call_id": CALL_ID, "content": result}


def assistant(content: str, calls: Sequence[Call]) -> Message:
    """A turn of the model's as a message."""
    turn: Message = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = [{"type": "function", "id": CALL_ID, "function": c} for c in calls]
    return turn


def calling(word: str) -> Message:
    """An assistant message that calls `look_up`."""
    return assistant("", [{"name": "look_up", "arguments": {"word": word}}])


def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: the word
    """
    return word


class Chat:
    """A model's chat template, and the parser for the tool calls in its format.

    Args:
        tokenizer: a transformers tokenizer.
        prompting: system prompt, suffix, and arguments of the template.
    """

    def __init__(self, tokenizer: Any, prompting: Prompting):
        self.tokenizer = tokenizer
        self._prompting = prompting
        # The content of made-up turns, by which they are located in rendered text.
        self._marker = secrets.token_hex(8)
        self._readers: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def messages(self, prompt: Prompt) -> list[Message]:
        """The messages of a row's prompt, with system prompt and suffix."""
        return conversation(prompt.prompt, self._prompting)

    def opening(self, messages: list[Message], tools: Sequence[Schema]) -> str:
        """Render the text before the model's first turn."""
        with explained("chat: the model's chat template refuses the messages"):
            return apply_template(messages, self.tokenizer, self._arguments(tools))

    def reply(self, messages: list[Message], tools: Sequence[Schema]) -> str:
        """Render the text between two turns of the model: tool results, or what a user says.

        The model's own turn is not rendered again, since the template might write it differently.
        Instead, the messages are rendered after a made-up turn, which is then cut off.

        Raises:
            InputError: the template ends a turn in the middle differently than the last one.
        """
        turn = assistant(self._marker, [])
        if messages[0]["role"] == "tool":  # which a template expects after a call
            turn = calling(self._marker)
        text = self._text([turn, *messages], tools, add_generation_prompt=True)
        _, end, reply = text.rpartition(self._marker)[2].partition(self.end)
        if not end:
            raise InputError("chat: the model's chat template does not end each turn alike")
        return reply

    @cached_property
    def end(self) -> str:
        """Text of the special token that ends the model's turns.

        Raises:
            InputError: the chat template has none.
        """
        text = self._text([assistant(self._marker, [])], [])
        after = text.rpartition(self._marker)[2].lstrip()
        ids = self.tokenizer(after, add_special_tokens=False).input_ids
        if not ids or ids[0] not in self.tokenizer.added_tokens_decoder:
            raise InputError("chat: the model's chat template ends no turn with a special token")
        return self.tokenizer.decode(ids[0])

    def calls(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        """Parse a turn, ignoring thoughts: the text before its tool calls, and the calls. A turn
        that cannot be parsed has none.

        Args:
            text: the turn with its special tokens, except the one that ends it.
        """
        parser = self._parser  # outside the `try`: its InputError must reach the user
        try:
            return self._parse(parser, text, tools)
        except Exception:  # such as for arguments that are not JSON
            return "", []

    @cached_property
    def _parser(self) -> Any:
        """The vLLM parser class that reads calls as the chat template writes them.

        Raises:
            InputError: vLLM is not installed, or none of its parsers can read them.
        """
        with explained("tools: calls are read by vLLM's parsers, so install it", ImportError):
            from vllm.tool_parsers import ToolParserManager

        # Otherwise every malformed call is logged with a traceback.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        # Render a call as the template writes it, then try all parsers until one reads it back.
        tools = schemas_of([look_up])
        opening = self._text([], tools, add_generation_prompt=True)
        written = self._text([calling("it")], tools).removeprefix(opening)
        written = written.rpartition(self.end)[0]
        for name in ["hermes", *ToolParserManager.list_registered()]:  # the most common one first
            try:
                parser = ToolParserManager.get_tool_parser(name)
                _, calls = self._parse(parser, written, tools)
            except Exception:  # such as from a parser whose tokens or packages are missing
                continue
            if calls == [{"name": "look_up", "arguments": {"word": "it"}}]:
                return parser
        raise InputError(
            "tools: the model's chat template has none, or vLLM cannot read its calls; take "
            "another model (docs/models.md)"
        )

    def _parse(self, parser: Any, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        key = (parser, json.dumps(tools))
        if key not in self._readers:  # some parsers read the whole vocabulary when made
            request = ChatCompletionRequest(messages=[], tools=tools)
            self._readers[key] = (parser(self.tokenizer, request.tools), request)
        reader, request = self._readers[key]
        turn = reader.extract_tool_calls(text.rpartition("</think>")[2], request)
        calls = []
        for call in turn.tool_calls:
            arguments = json.loads(call.function.arguments)
            calls.append({"name": call.function.name, "arguments": arguments})
        return (turn.content or "").strip(), calls

    def _text(self, turns: list[Message], tools: Sequence[Schema], **options: Any) -> str:
        """Render a conversation that begins with a user message."""
        with explained("chat: the model's chat template refuses the messages"):
            return self.tokenizer.apply_chat_template(
                [{"role": "user", "content": "?"}, *turns],
                tokenize=False,
                **(self._arguments(tools) | options),
            )

    def _arguments(self, tools: Sequence[Schema]) -> dict[str, Any]:
        return self._prompting.chat_template_kwargs | {"tools": list(tools) or None}
