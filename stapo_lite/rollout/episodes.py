"""Completions of several turns: a coroutine lets the model write, adds what a tool says, and lets the model go on.

The coroutines run in an event loop of their own thread, so that a tool may wait for the network. What they ask of the
model is sampled in rounds, by the thread that owns the engine: a round begins when every coroutine that is not done
waits for the model, so that the engine always has all of them at once.
"""

import asyncio
import inspect
import pkgutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from stapo_lite.errors import InputError, RunError, one_line
from stapo_lite.rollout import Decoding, RolloutEngine, Sampling, progress_bar
from stapo_lite.types import Completion, Prompt, derived_seed


class Episode:
    """One completion in the making: what the model wrote trains, what was added is only read.

    Attributes:
        prompt: with the columns of its row.
        token_ids: so far.
        finished: whether the model ended its last turn itself, by a stop token or a stop string.
    """

    def __init__(self, prompt: Prompt, seed: int, sampling: Sampling, tokenizer: Any, ask: Callable[..., Awaitable]):
        self.prompt, self.token_ids, self.finished = prompt, list[int](), True
        self._seed, self._sampling, self._tokenizer, self._ask = seed, sampling, tokenizer, ask
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._turns, self._version = 0, 0

    @property
    def room(self) -> int:
        """Tokens that are left of `rollout.max_completion_length`."""
        return self._sampling.max_completion_length - len(self.token_ids)

    async def generate(self, max_tokens: int | None = None, **options: Any) -> str:
        """Let the model go on; returns what it wrote, nothing where no room is left.

        Args:
            max_tokens: of this turn; all that is left by default.
            options: of vLLM's SamplingParams, such as `stop=["</tool>"]`, which the text then ends with.
        """
        limit = min(self.room, max_tokens or self.room)
        if limit == 0:
            self.finished = False
            return ""
        so_far = Prompt("", self.prompt.token_ids + self.token_ids, None)
        options |= {"include_stop_str_in_output": True} if "stop" in options else {}
        decoding = Decoding(limit, self._sampling.temperature, 1.0, logprobs=True, options=options)
        turn: Completion = await self._ask(so_far, derived_seed(self._seed, self._turns), decoding)
        self._turns += 1
        self._version, self.finished = turn.adapter_version, not turn.truncated
        self._extend(turn.token_ids, turn.rollout_logprobs, own=True)
        return self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)

    def add(self, text: str) -> None:
        """Add text that the model reads but did not write: a tool's result. What has no room is cut off."""
        token_ids = self._tokenizer(text, add_special_tokens=False).input_ids[: self.room]
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


RolloutFunction = Callable[[Episode], Awaitable[None]]


def find_function(path: str) -> RolloutFunction:
    """The coroutine function at `package.module:function`.

    Raises:
        InputError: there is none.
    """
    try:
        function = pkgutil.resolve_name(path)
    except Exception as error:  # the module is the user's
        raise InputError(f"rollout.function={path}: cannot be imported ({one_line(error)})") from None
    if not inspect.iscoroutinefunction(function):
        raise InputError(f"rollout.function={path}: must be a coroutine function (async def)")
    return function


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
        RunError: an episode is empty.
        Exception: what a coroutine raised.
    """
    turn = threading.Condition()
    asked: list[tuple[Prompt, int, Decoding, asyncio.Future]] = []
    ended: list[Episode] = []
    failed: list[Exception] = []
    coroutines: list[asyncio.Task] = []

    async def ask(prompt: Prompt, seed: int, decoding: Decoding) -> Completion:
        answer = asyncio.get_running_loop().create_future()
        with turn:
            asked.append((prompt, seed, decoding, answer))
            turn.notify()
        return await answer

    async def start(episode: Episode) -> None:
        try:
            await function(episode)
        except Exception as error:
            failed.append(error)
        finally:
            with turn:
                ended.append(episode)
                turn.notify()

    async def start_all() -> None:
        coroutines.append(asyncio.current_task())  # type: ignore[arg-type]
        await asyncio.gather(*map(start, episodes))

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
        try:
            while len(ended) < len(episodes):
                with turn:
                    turn.wait_for(lambda: len(asked) + len(ended) == len(episodes))
                    batch = asked[:]
                    asked.clear()
                    bar.update(len(ended) - bar.n)
                if failed:
                    raise failed[0]
                turns, turn_seeds, decodings, answers = zip(*batch, strict=True) if batch else ((), (), (), ())
                for index, completion in engine.stream(turns, turn_seeds, decodings):
                    answers[index].get_loop().call_soon_threadsafe(answers[index].set_result, completion)
            running.result()
        except BaseException:  # a coroutine's, the engine's, or Ctrl-C
            with suppress(RuntimeError):  # the loop has ended with the last coroutine
                coroutines[0].get_loop().call_soon_threadsafe(coroutines[0].cancel)
            raise
    completions = [episode.completion() for episode in episodes]
    return [completions[i : i + size] for i in range(0, len(completions), size)]
