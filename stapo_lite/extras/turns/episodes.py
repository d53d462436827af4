"""Completions of several turns: a coroutine lets the model write, adds what a tool says, and lets
the model go on.

The coroutines run in an event loop of their own thread, so that a tool may wait for the network.
What they ask of the model is sampled in rounds, by the thread that owns the engine. A round begins
when every coroutine that is not done waits for the model, so that the engine has all of them at
once; or when nothing has changed for a short time, since some may wait for others that hold a lock.
"""

import asyncio
import inspect
import pkgutil
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.extras.turns.tools import (
    Chat,
    Message,
    Schema,
    Tool,
    answer_of,
    run_tool,
    schemas_of,
)
from stapo_lite.rollout import (
    Decoding,
    RolloutEngine,
    RolloutSettings,
    each_sample,
    in_groups,
    progress_bar,
)
from stapo_lite.types import Completion, Prompt, derived_seed

QUIET = 1.0
"""Seconds without a change after which a round begins with the turns asked for so far."""

Question = tuple[Prompt, int, Decoding]
"""A turn that is asked for: what comes before it, its seed, and how to sample it."""


@dataclass(eq=False)
class Episode:
    """One completion in the making: what the model wrote trains, what was added is only read.

    Attributes:
        prompt: the prompt, with the columns of its row.
        token_ids: the tokens so far.
        finished: whether the model ended its last turn itself, by a stop token or a stop string,
            and what was added since has left room.
        busy: whether it may not ask for a turn, since one is under way or its coroutine has ended.
    """

    prompt: Prompt
    _seed: int
    _sampling: RolloutSettings
    _chat: Chat
    _ask: Callable[[Question], Awaitable[Completion]]
    token_ids: list[int] = field(default_factory=list)
    finished: bool = True
    busy: bool = False
    _logprobs: list[float] = field(default_factory=list)
    _mask: list[bool] = field(default_factory=list)
    _turns: int = 0
    _version: int = 0

    @property
    def room(self) -> int:
        """How many tokens are left of `rollout.max_completion_length`."""
        return self._sampling.max_completion_length - len(self.token_ids)

    async def generate(self, max_tokens: int | None = None, **options: Any) -> str:
        """Let the model go on and return what it wrote; nothing if no token is left.

        Args:
            max_tokens: limit of this turn; all that is left by default.
            options: options of vLLM's SamplingParams. With `stop=["</tool>"]` the text ends with
                the stop string that was found.

        Raises:
            RunError: a turn is under way, or the coroutine has ended.
        """
        if self.busy:
            raise RunError(
                "rollout.function: an episode asked for two turns at once, or after its end: await "
                "generate()"
            )
        limit = self.room if max_tokens is None else min(self.room, max_tokens)
        if limit <= 0:
            self.finished = False
            return ""
        stop = options.get("stop")
        if stop:
            options["include_stop_str_in_output"] = True
        so_far = Prompt("", self.prompt.token_ids + self.token_ids, None)
        decoding = Decoding(limit, self._sampling.temperature, 1.0, logprobs=True, options=options)
        self.busy = True
        try:
            turn = await self._ask((so_far, derived_seed(self._seed, self._turns), decoding))
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
        """Give messages to the model and let it answer. The tools that it calls run side by side,
        and it goes on with their results, until it calls none.

        Args:
            messages: of the chat template. The first call's take the place of the prompt
                (`episode.messages` are those of the row); later ones are what a user says next.
            tools: functions or coroutine functions with type hints, and a docstring that describes
                the arguments. What one raises is its result.
            max_turns: the model's turns, after which a call gets no result.
            options: of each turn, as in `generate`.

        Returns:
            The text of the last turn.

        Raises:
            InputError: the chat template or vLLM's parsers cannot do this.
            RunError: the messages are longer than `data.max_prompt_length`; as `generate`.
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
            calls = self._chat.calls(written, schemas) if schemas and self.finished else []
            if not calls or turn == max_turns - 1:
                break
            results = await asyncio.gather(*(run_tool(tools, call) for call in calls))
            answers = [answer_of(*pair) for pair in zip(calls, results, strict=True)]
            self._reply(answers, schemas)
        return text

    def _open(self, messages: list[Message], schemas: list[Schema]) -> None:
        """Begin with other messages than those of the row."""
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
        """Add messages behind the model's last turn, which ends with a stop token, unless it was
        ended by a stop string."""
        end, last = self._chat.end, self.token_ids[-1]
        ended = last in self._sampling.stop_token_ids or self._chat.tokenizer.decode(last) == end
        self.add(("" if ended else end) + self._chat.reply(messages, schemas))

    def add(self, text: str) -> None:
        """Add text that the model reads but did not write, such as a tool's result. It is cut off
        if it is longer than `room`."""
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
        """The episode as something to train on.

        Raises:
            RunError: it holds nothing that the model wrote.
        """
        if not any(self._mask):
            raise RunError(
                "rollout.function: an episode ended without a turn of the model's: call generate() "
                "in it"
            )
        mask = None if all(self._mask) else self._mask
        return Completion(
            self.prompt,
            self.token_ids,
            self._logprobs,
            not self.finished,
            self._version,
            loss_mask=mask,
        )


def until_stop(text: str, stop: str | Sequence[str]) -> str:
    """Cut off what the last token has behind a stop string (Qwen3's ">" and newline are one
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
    """The coroutine function at `package.module:function`.

    Raises:
        InputError: there is none.
    """
    with explained(f"rollout.function={path}: cannot be imported"):
        function = pkgutil.resolve_name(path)
    if not inspect.iscoroutinefunction(function):
        raise InputError(f"rollout.function={path}: must be a coroutine function (async def)")
    check_argument(function, f"rollout.function={path}")
    return function


def check_argument(function: RolloutFunction, where: str) -> None:
    """Raise InputError if the function does not take an episode alone; TRL calls its own with
    prompts and trainer."""
    with explained(f"{where}: must take one argument, the episode (docs/turns.md)", TypeError):
        inspect.signature(function).bind(None)


class Meeting:
    """The coroutines of some episodes; its methods run in their event loop.

    Attributes:
        episodes: one for each coroutine.
        loop: the event loop, once it runs.
        over: set by the engine's thread when it needs no more rounds.
        ended: how many coroutines are done.
    """

    def __init__(self, function: RolloutFunction):
        self.episodes: list[Episode] = []
        self.loop: Future[asyncio.AbstractEventLoop] = Future()
        self.over, self._changed = asyncio.Event(), asyncio.Event()
        self.ended = 0
        self._function = function
        self._asked: dict[asyncio.Future, Question] = {}

    async def run(self) -> None:
        """Run the coroutines until `over` is set; `asyncio.run` then cancels the others."""
        self._all = asyncio.gather(*map(self._play, self.episodes))
        self._all.add_done_callback(lambda _: self._changed.set())
        self.loop.set_result(asyncio.get_running_loop())
        await self.over.wait()

    async def _play(self, episode: Episode) -> None:
        await self._function(episode)
        if episode.busy:
            raise RunError(
                "rollout.function: an episode ended before it had its turn: await generate()"
            )
        episode.busy = True  # what it began and forgot may ask no more: the others would wait
        self.ended += 1
        self._changed.set()

    async def ask(self, question: Question) -> Completion:
        """Wait for a turn of the model's; called by the coroutines."""
        answer = asyncio.get_running_loop().create_future()
        self._asked[answer] = question
        self._changed.set()
        try:
            return await answer
        finally:  # the coroutine may have stopped waiting (asyncio.timeout)
            self._asked.pop(answer, None)
            self._changed.set()

    async def next_round(self) -> dict[asyncio.Future, Question]:
        """Wait until a round may begin and return what was asked; nothing if all are done.

        Raises:
            Exception: what a coroutine raised.
        """
        while not self._all.done():
            if self._asked and len(self._asked) + self.ended == len(self.episodes):
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), QUIET if self._asked else None)
            except TimeoutError:
                if self._asked:  # else what was asked has been withdrawn meanwhile
                    break
        else:
            self._all.result()
        questions, self._asked = self._asked, {}
        return questions


def play(
    engine: RolloutEngine,
    sampling: RolloutSettings,
    chat: Chat,
    function: RolloutFunction,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """Groups of completions as `RolloutEngine.generate` gives them, each made by a coroutine.

    Raises:
        RunError: an episode is empty, or asks for a turn and does not await it.
        Exception: what a coroutine raised.
    """
    meeting, size = Meeting(function), sampling.num_generations
    for prompt, seed in each_sample(prompts, seeds, size):
        meeting.episodes.append(Episode(prompt, seed, sampling, chat, meeting.ask))
    with (
        ThreadPoolExecutor(1, thread_name_prefix="episodes") as thread,
        progress_bar("rollout", "episode", len(meeting.episodes)) as bar,
    ):
        thread.submit(asyncio.run, meeting.run())
        try:
            loop = meeting.loop.result()
            while True:
                asked = asyncio.run_coroutine_threadsafe(meeting.next_round(), loop)
                questions = asked.result()
                if not questions:
                    break
                bar.update(meeting.ended - bar.n)
                answers = list(questions)
                for index, completion in engine.stream(*zip(*questions.values(), strict=True)):
                    loop.call_soon_threadsafe(give, answers[index], completion)
        finally:  # also if the engine fails, or on Ctrl-C
            meeting.loop.result().call_soon_threadsafe(meeting.over.set)
    completions = [episode.completion() for episode in meeting.episodes]
    return in_groups(completions, size)


def give(answer: asyncio.Future, completion: Completion) -> None:
    """Hand a turn to its coroutine, unless that has stopped waiting."""
    if not answer.done():
        answer.set_result(completion)
