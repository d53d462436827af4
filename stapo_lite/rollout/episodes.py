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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.rollout import Decoding, RolloutEngine, Sampling, progress_bar
from stapo_lite.types import Completion, Prompt, derived_seed

QUIET = 0.25
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
    turn = threading.Condition()
    asked: dict[asyncio.Future, tuple[Prompt, int, Decoding]] = {}
    ended: list[Episode] = []
    tasks: list[asyncio.Task] = []  # the one that runs all coroutines, once it does

    async def ask(*question: Any) -> Completion:
        answer = asyncio.get_running_loop().create_future()
        with turn:
            asked[answer] = question
            turn.notify()
        try:
            return await answer
        finally:  # the coroutine may have stopped waiting (asyncio.timeout)
            with turn:
                asked.pop(answer, None)

    async def start(episode: Episode) -> None:
        await function(episode)
        if episode.busy:
            raise RunError("rollout.function: an episode ended before it had its turn: await generate()")
        episode.busy = True  # what it began and forgot may ask no more: the others would wait
        with turn:
            ended.append(episode)
            turn.notify()

    async def start_all() -> None:
        with turn:
            tasks.append(asyncio.current_task())  # type: ignore[arg-type]
            turn.notify()
        await asyncio.gather(*map(start, episodes))

    def notice_end(_: Any) -> None:
        with turn:
            turn.notify()

    size = sampling.num_generations
    episodes = [
        Episode(prompt, derived_seed(seed, g), sampling, tokenizer, ask)
        for prompt, seed in zip(prompts, seeds, strict=True)
        for g in range(size)
    ]
    with (
        ThreadPoolExecutor(1, thread_name_prefix="episodes") as thread,
        progress_bar("rollout", "episode", len(episodes)) as bar,
    ):
        running = thread.submit(lambda: asyncio.run(start_all()))
        running.add_done_callback(notice_end)
        try:
            while not running.done():
                with turn:
                    while not (running.done() or (asked and len(asked) + len(ended) == len(episodes))):
                        changed = turn.wait(QUIET if asked else None)
                        if asked and not changed:
                            break
                    answers, questions = list(asked), list(asked.values())
                    asked.clear()
                    bar.update(len(ended) - bar.n)
                turns, turn_seeds, decodings = zip(*questions, strict=True) if questions else ((), (), ())
                for index, completion in engine.stream(turns, turn_seeds, decodings):
                    with suppress(RuntimeError):  # the loop has ended
                        answers[index].get_loop().call_soon_threadsafe(_give, answers[index], completion)
            running.result()
        except BaseException:  # a coroutine's, the engine's, or Ctrl-C
            with turn, suppress(RuntimeError, IndexError):  # the loop has ended with the last coroutine
                turn.wait_for(lambda: tasks or running.done())
                tasks[0].get_loop().call_soon_threadsafe(tasks[0].cancel)
            raise
    completions = [episode.completion() for episode in episodes]
    return [completions[i : i + size] for i in range(0, len(completions), size)]


def _give(answer: asyncio.Future, completion: Completion) -> None:
    if not answer.done():  # nobody waits any more
        answer.set_result(completion)
