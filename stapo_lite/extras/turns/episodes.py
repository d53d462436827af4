"""Completions of several turns: a coroutine lets the model write, adds a tool's output, and lets
the model continue.

The coroutines run in an event loop in their own thread, so that a tool may wait for the network.
The turns that they ask for join the batch that the engine is running before its next step. A
coroutine goes on as soon as its turn has ended. Plain tools run between two steps, in the thread of
the engine.
"""

import asyncio
import inspect
import pkgutil
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.extras.turns.tools import (
    Call,
    Chat,
    Message,
    Schema,
    Tool,
    answer_of,
    assistant,
    run_tool,
    schemas_of,
)
from stapo_lite.loop_thread import submit
from stapo_lite.progress import progress_bar
from stapo_lite.rollout.engine import (
    Decoding,
    RolloutEngine,
    RolloutSettings,
    each_sample,
    in_groups,
)
from stapo_lite.types import Completion, Prompt, copied, derived_seed


@dataclass(eq=False)
class Episode:
    """A completion in progress. The loss counts what the model wrote; added text is only context.

    Attributes:
        prompt: the prompt, with the columns of its row.
        token_ids: the tokens so far.
        finished: whether the model ended its last turn with a stop token or stop string, and tokens
            are left after the text that was added since.
        busy: whether a turn is in progress.
    """

    prompt: Prompt
    _seed: int
    _sampling: RolloutSettings
    _chat: Chat
    _running: "Conversations"
    token_ids: list[int] = field(default_factory=list)
    finished: bool = True
    busy: bool = False
    _logprobs: list[float] = field(default_factory=list)
    """One for each token; 0 for added text."""
    _mask: list[bool] = field(default_factory=list)
    """Whether the model wrote a token."""
    _said: list[Message] = field(default_factory=list)
    """The messages after the prompt, of `chat` only."""
    _turns: int = 0
    _version: int = 0

    @property
    def room(self) -> int:
        """Tokens left of `rollout.max_completion_length`."""
        return self._sampling.max_completion_length - len(self.token_ids)

    async def generate(self, max_tokens: int | None = None, **options: Any) -> str:
        """Let the model continue; return what it wrote, or "" if no token is left.

        Args:
            max_tokens: limit of this turn; by default all that is left.
            options: of vLLM's SamplingParams. With `stop=["</tool>"]`, the text includes the stop
                string that ended it.

        Raises:
            RunError: a turn is in progress.
        """
        if self.busy:
            raise RunError(
                "rollout.function: an episode asked for two turns at once: await generate()"
            )
        limit = self.room
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        self.finished = False  # until the model ends this turn
        if limit <= 0:
            return ""
        # Complete the options of this turn.
        stop = options.get("stop")
        if stop:
            options["include_stop_str_in_output"] = True
        if "stop_token_ids" in options:  # they end a turn in addition to the usual ones
            options["stop_token_ids"] = [*self._sampling.stop_token_ids, *options["stop_token_ids"]]
        # Let the engine continue the text so far. Each turn has its own seed.
        context = Prompt("", self.prompt.token_ids + self.token_ids, None)
        decoding = Decoding(limit, self._sampling.temperature, 1.0, logprobs=True, options=options)
        self.busy = True
        try:
            turn = await self._running.ask(context, derived_seed(self._seed, self._turns), decoding)
        finally:  # also if the coroutine withdraws the turn (asyncio.timeout)
            self.busy = False
        # Add the turn to the episode.
        self._turns += 1
        self._version = turn.adapter_version
        self.finished = not turn.truncated
        self._extend(turn.token_ids, turn.rollout_logprobs, by_model=True)
        text = self._chat.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        return until_stop(text, stop) if stop else text

    async def call(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Call a function in the main thread, where plain functions run one at a time; a coroutine
        runs in the event loop, beside those of other episodes."""
        result = await self._running.call(partial(function, **arguments))
        return await result if inspect.isawaitable(result) else result

    @property
    def batch(self) -> object:
        """One object for all episodes that run together."""
        return self._running

    @property
    def messages(self) -> list[Message]:
        """The prompt as messages, with `data.system_prompt` and `data.prompt_suffix`."""
        return self._chat.messages(self.prompt)

    async def chat(
        self,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        max_turns: int = 8,
        **options: Any,
    ) -> str:
        """Send messages to the model and let it answer. The tools that it calls run concurrently.
        The model continues with their results until it calls none.

        Args:
            messages: messages for the chat template. In the first call they replace the prompt
                (`episode.messages` are the row's); in later ones they are what the user says next.
            tools: functions or coroutine functions with type hints and a docstring that describes
                the arguments. If one raises, the error is its result.
            max_turns: largest number of turns of the model; tools called in the last one do not
                run.
            options: options of each turn, as in `generate`.

        Returns:
            The text of the last turn.

        Raises:
            InputError: the chat template or vLLM's parsers do not support this.
            RunError: the messages are longer than `data.max_prompt_length`; also as in `generate`.
        """
        schemas = schemas_of(tools)
        text = ""
        if self.token_ids:  # the user says something after the model's last turn
            self._reply(messages, schemas)
        else:
            self._open(messages, schemas)
        for turn in range(1, max_turns + 1):
            start = len(self.token_ids)
            text = await self.generate(**options)
            content, calls = self._read_turn(start, text, schemas)
            self._said.append(assistant(content, calls))
            if not calls or turn == max_turns:
                break
            runs = [run_tool(tools, self._running.call, call) for call in calls]
            results = await asyncio.gather(*runs)
            self._reply(list(map(answer_of, calls, results)), schemas)
        return text

    def _read_turn(self, start: int, text: str, schemas: list[Schema]) -> tuple[str, list[Call]]:
        """The text before the tool calls of a turn, and the calls.

        Args:
            start: index of the turn's first token.
            text: the turn as `generate` returned it, which is its content if it has no calls.
        """
        # The parsers find a call by special tokens, which `text` lacks.
        written = self._chat.tokenizer.decode(self.token_ids[start:])
        written = written.removesuffix(self._chat.end)
        if schemas and self.finished:
            content, calls = self._chat.calls(written, schemas)
            if calls:
                return content, calls
        return text, []

    def _open(self, messages: list[Message], schemas: list[Schema]) -> None:
        """Replace the row's prompt with these messages."""
        token_ids = self._encode(self._chat.opening(messages, schemas))
        longest = self._sampling.max_model_len - self._sampling.max_completion_length
        if len(token_ids) > longest:
            raise RunError(
                f"rollout.function: the messages have {len(token_ids)} tokens, "
                f"data.max_prompt_length is {longest}: raise it"
            )
        self.prompt = replace(self.prompt, token_ids=token_ids)

    def _reply(self, messages: list[Message], schemas: list[Schema]) -> None:
        """Add messages after the model's last turn. After a stop string, that turn still lacks its
        end token, which is added before them."""
        text = self._chat.reply(messages, schemas)
        end = self._chat.end
        last = self.token_ids[-1]
        if last not in self._sampling.stop_token_ids and self._chat.tokenizer.decode(last) != end:
            text = end + text
        self.add(text)
        self._said += messages

    def add(self, text: str) -> None:
        """Add text that the model did not write, such as a tool's result, cut to `room` tokens."""
        # A lone surrogate that the model wrote cannot be tokenized.
        token_ids = self._encode(text.encode("utf-8", "replace").decode())
        if len(token_ids) >= max(1, self.room):
            self.finished = False
        token_ids = token_ids[: self.room]
        self._extend(token_ids, [0.0] * len(token_ids), by_model=False)

    def _encode(self, text: str) -> list[int]:
        return self._chat.tokenizer(text, add_special_tokens=False).input_ids

    def _extend(self, token_ids: list[int], logprobs: list[float], by_model: bool) -> None:
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._mask += [by_model] * len(token_ids)

    def completion(self) -> Completion:
        """The episode as a completion to train on.

        Raises:
            RunError: the model wrote nothing in it.
        """
        if not any(self._mask):
            raise RunError(
                "rollout.function: an episode ended without a turn of the model's: call generate() "
                "in it"
            )
        # If `generate` was called beside `chat`, the messages lack a turn, so rewards get none.
        answers = [message for message in self._said if message["role"] == "assistant"]
        return Completion(
            self.prompt,
            self.token_ids,
            self._logprobs,
            not self.finished,
            self._version,
            loss_mask=None if all(self._mask) else self._mask,
            messages=self._said if len(answers) >= self._turns else None,
        )


def until_stop(text: str, stop: str | Sequence[str]) -> str:
    """Cut off what the last token has after a stop string. In Qwen3, ">" and newline can be one
    token, so that a turn with `stop=">"` ends with ">\\n"."""
    stops = [stop] if isinstance(stop, str) else stop
    match = re.search("|".join(map(re.escape, stops)), text)
    return text[: match.end()] if match else text


RolloutFunction = Callable[[Episode], Awaitable[None]]


def chat_with(tools: Sequence[Tool]) -> RolloutFunction:
    """A rollout function that lets the model answer the row's prompt with tools."""

    async def chat_with_tools(episode: Episode) -> None:
        await episode.chat(episode.messages, tools)

    return chat_with_tools


def find_function(path: str) -> RolloutFunction:
    """Import the coroutine function at `package.module:function`.

    Raises:
        InputError: there is none, or it does not take one argument.
    """
    with explained(f"rollout.function={path}: cannot be imported"):
        function = pkgutil.resolve_name(path)
    check_function(function, f"rollout.function={path}")
    return function


def check_function(function: RolloutFunction, where: str) -> None:
    """Raise InputError unless the function is a coroutine function that can be called with just an
    episode. TRL's rollout functions take prompts and trainer instead."""
    with explained(f"{where}: must take one argument, the episode (docs/turns.md)", TypeError):
        inspect.signature(function).bind(None)
    if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise InputError(f"{where}: must be a coroutine function (async def)")


class Conversations:
    """Runs episodes in two threads: their coroutines in the process's event loop, the engine in the
    thread that calls `run`.

    A coroutine cannot use the engine itself, since engines belong to one thread. A turn goes

    1. from `ask`, in the event loop, which puts a request into a queue and waits for a future,
    2. to `_do_requests`, in the engine's thread, which adds the turn to the engine's batch,
    3. to `_step`, which calls the engine, and sets the future once the turn has ended,
    4. back to `ask`, which returns the turn to its coroutine.

    `run` repeats 2 and 3 until all coroutines have ended.
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._requests: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._turns: dict[int, Future[Completion]] = {}
        """The turns in progress, by their numbers."""
        self._numbers = count()

    async def ask(self, *request: Any) -> Completion:
        """Ask for a turn and wait for it; called by the coroutines.

        Args:
            request: prompt, seed and decoding.
        """
        turn: Future[Completion] = Future()
        self._requests.put(lambda: self._begin(turn, *request))
        return await asyncio.wrap_future(turn)

    def _begin(self, turn: Future[Completion], *request: Any) -> None:
        number = next(self._numbers)
        self._engine.add(number, *request)
        self._turns[number] = turn

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the engine's thread and wait for its result."""
        result: Future[Any] = Future()
        self._requests.put(lambda: deliver(result, function(*arguments)))
        return await asyncio.wrap_future(result)

    def run(self, function: RolloutFunction, episodes: Sequence[Episode]) -> None:
        """Run a coroutine for each episode to its end.

        Raises:
            Exception: raised by one of them, or by the engine.
        """
        with progress_bar("rollout", "episode", len(episodes)) as bar:
            running = {submit(run_one(function, episode)) for episode in episodes}
            for coroutine in running:
                # An empty request wakes `_do_requests`, which may be waiting, when one ends.
                coroutine.add_done_callback(lambda _: self._requests.put(lambda: None))
            try:
                while running:
                    self._do_requests()
                    self._step()
                    ended, running = wait(running, timeout=0)
                    for coroutine in ended:
                        coroutine.result()  # raises what the coroutine raised
                    bar.update(len(ended))
            finally:
                for coroutine in running:
                    coroutine.cancel()
                self._engine.abort()

    def _do_requests(self) -> None:
        """Do what the coroutines have asked for. Without a turn in progress, wait until they do."""
        # One round of the event loop: coroutines whose turn has just ended ask for the next one
        # before the engine's next step.
        submit(asyncio.sleep(0)).result()
        if not self._turns:
            self._requests.get()()
        while not self._requests.empty():
            self._requests.get()()

    def _step(self) -> None:
        """Let the engine sample for a moment, and give the coroutines the turns that have ended."""
        if self._turns:
            for number, completion in self._engine.step():
                deliver(self._turns.pop(number), completion)


async def run_one(function: RolloutFunction, episode: Episode) -> None:
    """Run one episode; the function is called in the event loop."""
    await function(episode)


def deliver(future: Future[Any], result: Any) -> None:
    """Set a future's result, unless its coroutine has stopped waiting (asyncio.timeout)."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def run_episodes(
    engine: RolloutEngine,
    sampling: RolloutSettings,
    chat: Chat,
    function: RolloutFunction,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    **changes: Any,
) -> list[list[Completion]]:
    """Sample as `RolloutEngine.generate` does, with each completion made by a coroutine.

    Args:
        changes: of `sampling`, for an evaluation.

    Raises:
        RunError: an episode is empty.
        Exception: raised by a coroutine.
    """
    sampling = replace(sampling, **changes)
    conversations = Conversations(engine)
    episodes = []
    for prompt, seed in each_sample(prompts, seeds, sampling.num_generations):
        # A coroutine may change its columns, and add some for the reward functions.
        prompt = replace(prompt, columns=copied(prompt.columns))
        episodes.append(Episode(prompt, seed, sampling, chat, conversations))
    conversations.run(function, episodes)
    return in_groups([episode.completion() for episode in episodes], sampling.num_generations)
