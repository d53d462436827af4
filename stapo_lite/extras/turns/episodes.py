"""Completions of several turns: a coroutine lets the model write, adds a tool's output, and lets
the model continue.

The coroutines run in an event loop in their own thread, so that a tool may wait for the network. A
turn that one asks for joins the engine's running batch before its next step, and the coroutine goes
on as soon as its turn has ended. Plain tools run between two steps, in the thread of the engine.
"""

import asyncio
import inspect
import pkgutil
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
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
from stapo_lite.rewards.functions import copied
from stapo_lite.rollout.engine import (
    Decoding,
    RolloutEngine,
    RolloutSettings,
    each_sample,
    in_groups,
)
from stapo_lite.types import Completion, Prompt, derived_seed


@dataclass(eq=False)
class Episode:
    """A completion in progress. What the model wrote is trained on; what was added is only context.

    Attributes:
        prompt: the prompt, with the columns of its row.
        token_ids: the tokens so far.
        finished: whether the model ended its last turn with a stop token or stop string, and there
            is still room after what was added since.
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
    _mask: list[bool] = field(default_factory=list)
    _said: list[Message] = field(default_factory=list)
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
        limit = self.room if max_tokens is None else min(self.room, max_tokens)
        if limit <= 0:
            self.finished = False
            return ""
        stop = options.get("stop")
        if stop:
            options["include_stop_str_in_output"] = True
        if "stop_token_ids" in options:  # they end a turn in addition to the usual ones
            options["stop_token_ids"] = [*self._sampling.stop_token_ids, *options["stop_token_ids"]]
        so_far = Prompt("", self.prompt.token_ids + self.token_ids, None)
        decoding = Decoding(limit, self._sampling.temperature, 1.0, logprobs=True, options=options)
        self.busy, self.finished = True, False
        try:
            seed = derived_seed(self._seed, self._turns)
            turn = await self._running.ask(so_far, seed, decoding)
        finally:
            self.busy = False
        self._turns += 1
        self._version, self.finished = turn.adapter_version, not turn.truncated
        self._extend(turn.token_ids, turn.rollout_logprobs, own=True)
        text = self._chat.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        return until_stop(text, stop) if stop else text

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
        """Send messages to the model and let it answer. Tools that it calls run concurrently, and
        it continues with their results, until it calls none.

        Args:
            messages: messages for the chat template. In the first call they replace the prompt
                (`episode.messages` are the row's); in later ones they are what the user says next.
            tools: functions or coroutine functions with type hints and a docstring that describes
                the arguments. If one raises, the error is its result.
            max_turns: most turns of the model; tools called in the last one do not run.
            options: options of each turn, as in `generate`.

        Returns:
            The text of the last turn.

        Raises:
            InputError: the chat template or vLLM's parsers do not support this.
            RunError: the messages are longer than `data.max_prompt_length`; also as in `generate`.
        """
        schemas, text = schemas_of(tools), ""
        if self.token_ids:
            self._reply(messages, schemas)
        else:
            self._open(messages, schemas)
        for turn in range(max_turns):
            begin = len(self.token_ids)
            text = await self.generate(**options)
            written = self._chat.tokenizer.decode(self.token_ids[begin:]).removesuffix(
                self._chat.end
            )
            before, calls = "", list[Call]()
            if schemas and self.finished:
                before, calls = self._chat.calls(written, schemas)
            self._said.append(assistant(before if calls else text, calls))
            if not calls or turn == max_turns - 1:
                break
            run = partial(run_tool, tools, self._running.call)
            results = await asyncio.gather(*map(run, calls))
            answers = [answer_of(*pair) for pair in zip(calls, results, strict=True)]
            self._reply(answers, schemas)
        return text

    def _open(self, messages: list[Message], schemas: list[Schema]) -> None:
        """Replace the row's prompt with these messages."""
        text = self._chat.opening(messages, schemas)
        token_ids = self._chat.tokenizer(text, add_special_tokens=False).input_ids
        longest = self._sampling.max_model_len - self._sampling.max_completion_length
        if len(token_ids) > longest:
            raise RunError(
                f"rollout.function: the messages have {len(token_ids)} tokens, "
                f"data.max_prompt_length is {longest}: raise it"
            )
        self.prompt = replace(self.prompt, token_ids=token_ids)

    def _reply(self, messages: list[Message], schemas: list[Schema]) -> None:
        """Add messages after the model's last turn, and that turn's end token if it is missing
        (after a stop string)."""
        end, last = self._chat.end, self.token_ids[-1]
        ended = last in self._sampling.stop_token_ids or self._chat.tokenizer.decode(last) == end
        self.add(("" if ended else end) + self._chat.reply(messages, schemas))
        self._said += messages

    def add(self, text: str) -> None:
        """Add text that the model did not write, such as a tool's result, cut to `room` tokens."""
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate that the model wrote
        token_ids = self._chat.tokenizer(text, add_special_tokens=False).input_ids
        if len(token_ids) >= max(1, self.room):
            self.finished = False
        token_ids = token_ids[: self.room]
        self._extend(token_ids, [0.0] * len(token_ids), own=False)

    def _extend(self, token_ids: list[int], logprobs: list[float], own: bool) -> None:
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._mask += [own] * len(token_ids)

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
        mask = None if all(self._mask) else self._mask
        said = sum(message["role"] == "assistant" for message in self._said)
        return Completion(
            self.prompt,
            self.token_ids,
            self._logprobs,
            not self.finished,
            self._version,
            loss_mask=mask,
            messages=self._said if said >= self._turns else None,  # else some were by `generate`
        )


def until_stop(text: str, stop: str | Sequence[str]) -> str:
    """Cut off what the last token has after a stop string (in Qwen3, ">" and newline can be one
    token)."""
    stops = [stop] if isinstance(stop, str) else stop
    found = re.search("|".join(map(re.escape, stops)), text)
    return text[: found.end()] if found else text


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
    """Raise InputError unless it is a coroutine function that can be called with just an episode;
    TRL's take prompts and trainer."""
    with explained(f"{where}: must take one argument, the episode (docs/turns.md)", TypeError):
        inspect.signature(function).bind(None)
    if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise InputError(f"{where}: must be a coroutine function (async def)")


class Conversations:
    """Runs episodes: their coroutines in the process's event loop; what they ask for in this
    thread, between the engine's steps."""

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._turns: dict[int, Future[Completion]] = {}
        self._numbers = count()

    async def ask(self, *request: Any) -> Completion:
        """Ask for a turn and wait for it; called by the coroutines.

        Args:
            request: prompt, seed and decoding.
        """
        return await asyncio.wrap_future(await self.call(self._begin, *request))

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the engine's thread."""
        result: Future[Any] = Future()
        self._work.put(lambda: deliver(result, function(*arguments)))
        return await asyncio.wrap_future(result)

    def _begin(self, *request: Any) -> Future[Completion]:
        index = next(self._numbers)
        self._engine.add(index, *request)
        self._turns[index] = Future()
        return self._turns[index]

    def run(self, function: RolloutFunction, episodes: Sequence[Episode]) -> None:
        """Run a coroutine for each episode to its end.

        Raises:
            Exception: raised by one of them, or by the engine.
        """
        with progress_bar("rollout", "episode", len(episodes)) as bar:
            running = {submit(run_one(function, episode)) for episode in episodes}
            for each in running:
                # An idle engine waits for work.
                each.add_done_callback(lambda _: self._work.put(lambda: None))
            try:
                while running:
                    # Coroutines that can go on ask before the engine's next step.
                    submit(asyncio.sleep(0)).result()
                    self._catch_up()
                    if self._turns:
                        for index, completion in self._engine.step():
                            deliver(self._turns.pop(index), completion)
                    for ended in [each for each in running if each.done()]:
                        ended.result()
                        running.remove(ended)
                        bar.update()
            finally:
                for each in running:
                    each.cancel()
                self._engine.abort()

    def _catch_up(self) -> None:
        """Do what the coroutines have asked for; without a turn in progress, wait until they do."""
        with suppress(Empty):
            self._work.get(block=not self._turns)()
            while True:
                self._work.get(block=False)()


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
    """Like `RolloutEngine.generate`, with each completion made by a coroutine.

    Args:
        changes: of `sampling`, for an evaluation.

    Raises:
        RunError: an episode is empty.
        Exception: raised by a coroutine.
    """
    sampling = replace(sampling, **changes)
    running, size = Conversations(engine), sampling.num_generations
    samples = each_sample(prompts, seeds, size)
    episodes = []
    for prompt, seed in samples:
        # A coroutine may change its columns, and add some for the reward functions.
        own = replace(prompt, columns=copied(prompt.columns))
        episodes.append(Episode(own, seed, sampling, chat, running))
    running.run(function, episodes)
    return in_groups([episode.completion() for episode in episodes], size)
