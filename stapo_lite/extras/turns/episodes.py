"""Completions of several turns: a coroutine lets the model write, adds a tool's output, and lets
the model continue.

The coroutines run in an event loop in their own thread, so that a tool may wait for the network.
The turns they ask for are sampled in rounds, by the thread that owns the engine. A round begins
when every unfinished coroutine waits for the model, so that the engine gets one large batch; or
when nothing has changed for QUIET seconds, since some may wait for others that hold a lock.
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
from stapo_lite.rollout.engine import (
    Decoding,
    RolloutEngine,
    RolloutSettings,
    each_sample,
    in_groups,
    progress_bar,
)
from stapo_lite.types import Completion, Prompt, derived_seed

QUIET = 1.0
"""Seconds without a change after which a round begins with the turns requested so far."""

Question = tuple[Prompt, int, Decoding]
"""A requested turn: what comes before it, its seed, and how to sample it."""


@dataclass(eq=False)
class Episode:
    """A completion in progress. What the model wrote is trained on; what was added is only context.

    Attributes:
        prompt: the prompt, with the columns of its row.
        token_ids: the tokens so far.
        finished: whether the model ended its last turn with a stop token or stop string, and there
            is still room after what was added since.
        busy: whether it cannot ask for a turn: one is in progress, or its coroutine has ended.
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
        """Tokens left of `rollout.max_completion_length`."""
        return self._sampling.max_completion_length - len(self.token_ids)

    async def generate(self, max_tokens: int | None = None, **options: Any) -> str:
        """Let the model continue; return what it wrote, or "" if no token is left.

        Args:
            max_tokens: limit of this turn; by default all that is left.
            options: of vLLM's SamplingParams. With `stop=["</tool>"]`, the text includes the stop
                string that ended it.

        Raises:
            RunError: a turn is in progress, or the coroutine has ended.
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
            calls = self._chat.calls(written, schemas) if schemas and self.finished else []
            if not calls or turn == max_turns - 1:
                break
            results = await asyncio.gather(*(run_tool(tools, call) for call in calls))
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
        return Completion(
            self.prompt,
            self.token_ids,
            self._logprobs,
            not self.finished,
            self._version,
            loss_mask=mask,
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
    """Runs the coroutines of some episodes; its methods run in their event loop.

    Attributes:
        episodes: one per coroutine.
        loop: the event loop, once it runs.
        over: set by the engine's thread when it needs no more rounds.
        ended: number of finished coroutines.
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
        self._all = asyncio.gather(*map(self._run_one, self.episodes))
        self._all.add_done_callback(lambda _: self._changed.set())
        self.loop.set_result(asyncio.get_running_loop())
        await self.over.wait()

    async def _run_one(self, episode: Episode) -> None:
        try:
            await self._function(episode)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop
            raise RunError(f"rollout.function: raised {error!r}") from error
        if episode.busy:
            raise RunError(
                "rollout.function: an episode ended before it had its turn: await generate()"
            )
        episode.busy = True  # a task it left running must not ask: the others would wait
        self.ended += 1
        self._changed.set()

    async def ask(self, question: Question) -> Completion:
        """Request a turn and wait for it; called by the coroutines."""
        answer = asyncio.get_running_loop().create_future()
        self._asked[answer] = question
        self._changed.set()
        try:
            return await answer
        finally:  # the coroutine may have stopped waiting (asyncio.timeout)
            self._asked.pop(answer, None)
            self._changed.set()

    async def next_round(self) -> dict[asyncio.Future, Question]:
        """Wait until a round may begin; return its requests, empty if all coroutines are done.

        Raises:
            Exception: raised by a coroutine.
        """
        while not self._all.done():
            if self._asked and len(self._asked) + self.ended == len(self.episodes):
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), QUIET if self._asked else None)
            except TimeoutError:
                if self._asked:  # otherwise all requests were withdrawn
                    break
        else:
            self._all.result()
        questions, self._asked = self._asked, {}
        return questions


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
        RunError: an episode is empty, or does not await a turn that it requested.
        Exception: raised by a coroutine.
    """
    sampling = replace(sampling, **changes)
    running, size = Conversations(function), sampling.num_generations
    for prompt, seed in each_sample(prompts, seeds, size):
        running.episodes.append(Episode(prompt, seed, sampling, chat, running.ask))
    with (
        ThreadPoolExecutor(1, thread_name_prefix="episodes") as thread,
        progress_bar("rollout", "episode", len(running.episodes)) as bar,
    ):
        thread.submit(asyncio.run, running.run())
        try:
            loop = running.loop.result()
            while True:
                asked = asyncio.run_coroutine_threadsafe(running.next_round(), loop)
                questions = asked.result()
                if not questions:
                    break
                bar.update(running.ended - bar.n)
                answers = list(questions)
                for index, completion in engine.stream(*zip(*questions.values(), strict=True)):
                    loop.call_soon_threadsafe(deliver, answers[index], completion)
        finally:  # also if the engine fails, or on Ctrl-C
            running.loop.result().call_soon_threadsafe(running.over.set)
    completions = [episode.completion() for episode in running.episodes]
    return in_groups(completions, size)


def deliver(answer: asyncio.Future, completion: Completion) -> None:
    """Hand a turn to its coroutine, unless it has stopped waiting."""
    if not answer.done():
        answer.set_result(completion)
