"""Completions of several turns: a coroutine lets the model write, adds what a tool says, and lets the model go on.

The coroutines run in an event loop of their own thread, so that a tool may wait for the network. What they ask of the
model is sampled in rounds, by the thread that owns the engine: a round begins when every coroutine that is not done
waits for the model, so that the engine has all of them at once; or when nothing has changed for a short time, since
some may wait for others that hold a lock.
"""

import asyncio
import inspect
import pkgutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.rollout import Decoding, RolloutEngine, Sampling, progress_bar
from stapo_lite.types import Completion, Prompt, derived_seed

QUIET = 1.0
"""Seconds without a change after which a round begins with those that wait for the model."""


class Episode:
    """One completion in the making: what the model wrote trains, what was added is only read.

    Attributes:
        prompt: with the columns of its row.
        token_ids: so far.
        finished: whether the model ended its last turn itself, by a stop token or a stop string, and what was added
            since has left room.
        busy: whether it may not ask for a turn, since one is under way or its coroutine has ended.
    """

    def __init__(self, prompt: Prompt, seed: int, sampling: Sampling, tokenizer: Any, ask: Callable[..., Awaitable]):
        self.prompt, self.token_ids, self.finished = prompt, list[int](), True
        self._seed, self._sampling, self._tokenizer, self._ask = seed, sampling, tokenizer, ask
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._turns, self._version = 0, 0
        self.busy = False

    @property
    def room(self) -> int:
        """Tokens that are left of `rollout.max_completion_length`."""
        return self._sampling.max_completion_length - len(self.token_ids)

    async def generate(self, max_tokens: int | None = None, **options: Any) -> str:
        """Let the model go on; returns what it wrote, nothing where no token is left.

        Args:
            max_tokens: of this turn; all that is left by default.
            options: of vLLM's SamplingParams, such as `stop=["</tool>"]`, which the text then ends with.

        Raises:
            RunError: a turn is under way, or the coroutine has ended.
        """
        if self.busy:
            raise RunError(
                "rollout.function: an episode asked for two turns at once, or after its end: await generate()"
            )
        limit = self.room if max_tokens is None else min(self.room, max_tokens)
        if limit <= 0:
            self.finished = False
            return ""
        so_far = Prompt("", self.prompt.token_ids + self.token_ids, None)
        options |= {"include_stop_str_in_output": True} if "stop" in options else {}
        decoding = Decoding(limit, self._sampling.temperature, 1.0, logprobs=True, options=options)
        self.busy = True
        try:
            turn: Completion = await self._ask(so_far, derived_seed(self._seed, self._turns), decoding)
        finally:
            self.busy = False
        self._turns += 1
        self._version, self.finished = turn.adapter_version, not turn.truncated
        self._extend(turn.token_ids, turn.rollout_logprobs, own=True)
        text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        if not (stop := options.get("stop")):
            return text
        before = self._tokenizer.decode(turn.token_ids[:-1], skip_special_tokens=True)
        return until_stop(text, len(before.rstrip("\ufffd")), stop)  # the last token may complete a character

    def add(self, text: str) -> None:
        """Add text that the model reads but did not write: a tool's result. What has no room is cut off."""
        token_ids = self._tokenizer(text, add_special_tokens=False).input_ids
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
            raise RunError("rollout.function: an episode ended without a turn of the model's: call generate() in it")
        mask = None if all(self._mask) else self._mask
        return Completion(self.prompt, self.token_ids, self._logprobs, not self.finished, self._version, loss_mask=mask)


def until_stop(text: str, before: int, stop: str | Sequence[str]) -> str:
    """The text without what its last token has behind a stop string (Qwen3's ">" and newline are one token).

    Args:
        before: characters before the last token.
        stop: one string, or several; the text may end without any.
    """
    stops = [stop] if isinstance(stop, str) else stop
    begins = [(text.find(string, max(0, before - len(string) + 1)), string) for string in stops]
    return text[: min((at + len(string) for at, string in begins if at >= 0), default=None)]


RolloutFunction = Callable[[Episode], Awaitable[None]]


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
    """Raises InputError where it does not take an episode alone; TRL calls its own with prompts and trainer."""
    with explained(f"{where}: must take one argument, the episode (docs/turns.md)", TypeError):
        inspect.signature(function).bind(None)


class Question(NamedTuple):
    """A turn that is asked for."""

    prompt: Prompt
    seed: int
    decoding: Decoding


class Meeting:
    """The place where the coroutines, in the thread of their event loop, meet the thread that owns the engine.

    Attributes:
        episodes: one for each coroutine.
        ended: how many coroutines are done.
    """

    def __init__(self, function: RolloutFunction):
        self.episodes: list[Episode] = []
        self.ended = 0
        self._function = function
        self._changed = threading.Condition()
        self._asked: dict[asyncio.Future, Question] = {}
        self._task: asyncio.Task | None = None

    async def ask(self, *question: Any) -> Completion:
        """Wait for a turn of the model's; called by the coroutines."""
        answer = asyncio.get_running_loop().create_future()
        with self._changed:
            self._asked[answer] = Question(*question)
            self._changed.notify()
        try:
            return await answer
        finally:  # the coroutine may have stopped waiting (asyncio.timeout)
            with self._changed:
                self._asked.pop(answer, None)

    async def run(self) -> None:
        """Run all coroutines."""
        self._task = asyncio.current_task()
        self.notify()
        await asyncio.gather(*map(self._play, self.episodes))

    async def _play(self, episode: Episode) -> None:
        await self._function(episode)
        if episode.busy:
            raise RunError("rollout.function: an episode ended before it had its turn: await generate()")
        episode.busy = True  # what it began and forgot may ask no more: the others would wait
        with self._changed:
            self.ended += 1
            self._changed.notify()

    def notify(self, *_: Any) -> None:
        """Let the engine's thread look again."""
        with self._changed:
            self._changed.notify()

    def next_round(self, running: Future) -> dict[asyncio.Future, Question]:
        """Wait until a round may begin; returns what was asked, or nothing if all is done.

        Args:
            running: done when the event loop has ended.
        """
        with self._changed:
            while not running.done():
                if self._asked and len(self._asked) + self.ended == len(self.episodes):
                    break
                changed = self._changed.wait(QUIET if self._asked else None)
                if self._asked and not changed:
                    break
            questions = dict(self._asked)
            self._asked.clear()
            return questions

    def cancel(self, running: Future) -> None:
        """End all coroutines, once they have begun."""
        with self._changed:
            self._changed.wait_for(lambda: self._task or running.done())
        if self._task is not None:
            with suppress(RuntimeError):  # the loop has ended with the last coroutine
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def play(
    engine: RolloutEngine,
    sampling: Sampling,
    tokenizer: Any,
    function: RolloutFunction,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """Groups of completions as `RolloutEngine.generate` gives them, each made by a coroutine.

    Raises:
        RunError: an episode is empty, or asks for a turn and does not await it.
        Exception: what a coroutine raised.
    """
    size, meeting = sampling.num_generations, Meeting(function)
    for prompt, seed in zip(prompts, seeds, strict=True):
        for g in range(size):
            meeting.episodes.append(Episode(prompt, derived_seed(seed, g), sampling, tokenizer, meeting.ask))
    with (
        ThreadPoolExecutor(1, thread_name_prefix="episodes") as thread,
        progress_bar("rollout", "episode", len(meeting.episodes)) as bar,
    ):
        running = thread.submit(lambda: asyncio.run(meeting.run()))
        running.add_done_callback(meeting.notify)
        try:
            while not running.done():
                questions = meeting.next_round(running)
                bar.update(meeting.ended - bar.n)
                sample_round(engine, questions)
            running.result()
        except BaseException:  # a coroutine's, the engine's, or Ctrl-C
            meeting.cancel(running)
            raise
    completions = [episode.completion() for episode in meeting.episodes]
    return [completions[i : i + size] for i in range(0, len(completions), size)]


def sample_round(engine: RolloutEngine, questions: dict[asyncio.Future, Question]) -> None:
    """Sample the turns that were asked for, and hand each over when it is finished."""
    if not questions:
        return
    answers = list(questions)
    for index, completion in engine.stream(*zip(*questions.values(), strict=True)):
        with suppress(RuntimeError):  # the loop has ended
            answers[index].get_loop().call_soon_threadsafe(_give, answers[index], completion)


def _give(answer: asyncio.Future, completion: Completion) -> None:
    if not answer.done():  # nobody waits any more
        answer.set_result(completion)
