"""Completions of several turns, with transformers as the engine."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from helpers import PROMPTS, SAMPLING
from transformers import AutoTokenizer

from stapo_lite.config import Prompting
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.turns.episodes import play, until_stop
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.types import Completion


@pytest.fixture(scope="module")
def chat(tiny_model):
    return Chat(AutoTokenizer.from_pretrained(tiny_model), Prompting())


def test_tools_run_side_by_side_and_what_one_raises_ends_all(make_policy, chat):
    engine = TransformersEngine(SAMPLING, max_num_seqs=64)
    engine.publish(make_policy(), 1)
    meeting: list[asyncio.Barrier] = []

    async def meet(episode):
        await episode.generate(max_tokens=1)
        meeting[:] = meeting or [asyncio.Barrier(SAMPLING.num_generations * len(PROMPTS))]
        await asyncio.wait_for(meeting[0].wait(), 60)  # for all the others
        await episode.generate(max_tokens=1)

    async def leave(episode):
        await episode.generate(max_tokens=1)
        if episode.prompt is PROMPTS[1]:
            raise SystemExit(3)  # such as from code that the model wrote
        await episode.generate()

    async def fail(episode):
        await episode.generate(max_tokens=1)
        if episode.prompt is PROMPTS[1]:
            raise LookupError("no such tool")
        await episode.generate()

    async def stopping(episode):
        await episode.generate(stop=["a"])

    async def nothing(episode):
        episode.add("only a tool")

    async def cut_off(episode):
        await episode.generate(max_tokens=1)
        episode.finished = True  # as after a stop string
        episode.add("a" * 5)
        assert episode.finished
        episode.add("a" * 100)
        assert not episode.finished
        episode.finished = True
        episode.add("")
        assert episode.finished
        assert (
            await episode.generate(max_tokens=0) == ""
        )  # a budget of the caller's that is used up
        episode.add("a")

    async def full(episode):
        episode.add("a" * 100)
        assert episode.room == 0
        assert await episode.generate() == ""
        assert not episode.finished

    async def two_at_once(episode):
        await asyncio.gather(episode.generate(1), episode.generate(1))

    async def forgetful(episode):
        asking = asyncio.ensure_future(episode.generate(1))
        await asyncio.sleep(0)
        assert not asking.done()

    async def more_forgetful(episode):
        await episode.generate(1)
        if episode.prompt is PROMPTS[0]:
            forgotten.append(
                asyncio.ensure_future(episode.generate(1))
            )  # has not asked when the coroutine ends
        else:
            await episode.generate(1)

    forgotten: list[asyncio.Task] = []
    groups = play(engine, SAMPLING, chat, more_forgetful, PROMPTS, [1, 2, 3])
    assert {len(c.token_ids) for c in groups[0]} == {1}
    assert {type(task.exception()) for task in forgotten} == {RunError}
    groups = play(engine, SAMPLING, chat, meet, PROMPTS, [1, 2, 3])
    assert {len(c.token_ids) for group in groups for c in group} == {2}
    groups = play(engine, SAMPLING, chat, cut_off, PROMPTS, [1, 2, 3])
    assert all(c.truncated and len(c.token_ids) == 12 for group in groups for c in group)
    for function, error, message in (
        (fail, LookupError, "no such tool"),
        (leave, RunError, r"rollout.function: raised SystemExit\(3\)"),
        (nothing, RunError, "an episode ended without a turn of the model's"),
        (full, RunError, "an episode ended without a turn of the model's"),
        (two_at_once, RunError, "asked for two turns at once"),
        (forgetful, RunError, "ended before it had its turn"),
    ):
        with pytest.raises(error, match=message):
            play(engine, SAMPLING, chat, function, PROMPTS, [1, 2, 3])
    refused = "rollout.engine=transformers knows no stop: set rollout.engine=vllm"
    with pytest.raises(InputError, match=refused):
        play(engine, SAMPLING, chat, stopping, PROMPTS, [1, 2, 3])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("episodes")]


@pytest.mark.parametrize("limit", [asyncio.Lock, lambda: asyncio.Semaphore(5)])
def test_coroutines_may_wait_for_each_other(make_policy, chat, limit, monkeypatch):
    """A lock or a semaphore around a turn: those behind it never ask, and those before it must not
    wait for them."""
    engine = TransformersEngine(SAMPLING, max_num_seqs=64)
    engine.publish(make_policy(), 1)
    monkeypatch.setattr("stapo_lite.extras.turns.episodes.QUIET", 0.05)
    made: list = []

    async def one_by_one(episode):
        made[:] = made or [limit()]
        async with made[0]:
            await episode.generate(max_tokens=1)
        await episode.generate(max_tokens=1)

    groups = play(engine, SAMPLING, chat, one_by_one, PROMPTS, [1, 2, 3])
    assert {len(c.token_ids) for group in groups for c in group} == {2}


def test_a_turn_that_is_withdrawn_as_a_round_would_begin(chat, monkeypatch):
    """Its timeout ends with the pause after which a round begins: there is nothing to sample, but
    the episodes go on."""
    monkeypatch.setattr("stapo_lite.extras.turns.episodes.QUIET", 0.2)

    class Answers(TransformersEngine):
        def stream(self, prompts, seeds, decodings):
            for index, prompt in enumerate(prompts):
                yield index, Completion(prompt, [5], [-0.1], False, 1)

    async def impatient(episode):
        if not first:
            first.append(episode)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await episode.generate(1)
        else:
            await asyncio.sleep(0.4)
        await episode.generate(1)
        await episode.generate(1)

    for _ in range(4):
        first: list = []
        settings = replace(SAMPLING, num_generations=2)
        groups = play(Answers(settings, 8), settings, chat, impatient, PROMPTS[:1], [7])
        assert [len(c.token_ids) >= 2 for c in groups[0]] == [True, True]


def test_a_coroutine_may_stop_waiting_for_the_model(make_policy, chat, monkeypatch):
    """Before its round begins, and while it is sampled."""
    monkeypatch.setattr("stapo_lite.extras.turns.episodes.QUIET", 60.0)
    others_may_ask: list[asyncio.Event] = []
    asking: list[asyncio.Task] = []

    class Interrupted(TransformersEngine):
        def stream(self, *batch):
            for task in list(asking):  # the first to be cancelled clears it, in the other thread
                task.get_loop().call_soon_threadsafe(task.cancel)
            yield from super().stream(*batch)

    async def ask_in_vain(episode):
        asking.append(task := asyncio.ensure_future(episode.generate()))
        with pytest.raises(asyncio.CancelledError):
            await task

    async def impatient(episode):
        others_may_ask[:] = others_may_ask or [asyncio.Event()]
        if episode.prompt is PROMPTS[0]:
            early = asyncio.ensure_future(episode.generate())
            await asyncio.sleep(0)  # it has asked
            early.cancel()
            with pytest.raises(asyncio.CancelledError):
                await early
            others_may_ask[0].set()
        await others_may_ask[0].wait()
        await ask_in_vain(episode)
        asking.clear()
        await episode.generate(max_tokens=2)
        await ask_in_vain(episode)  # all end while this round is sampled

    engine = Interrupted(SAMPLING, max_num_seqs=64)
    engine.publish(make_policy(), 1)
    groups = play(engine, SAMPLING, chat, impatient, PROMPTS, [1, 2, 3])
    assert all(c.token_ids for group in groups for c in group)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("episodes")]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("see </tool>\n", ["</tool>"], "see </tool>"),  # the last token is ">" and a newline
        ("see </tool>\n", "</tool>", "see </tool>"),
        ("a = b\nc", ["=>", "\n"], "a = b\n"),
        ("a + b", ["="], "a + b"),  # a stop token ended it
        ("why (", ["(", "?"], "why ("),
    ],
)
def test_a_turn_ends_with_its_stop_string(text, stop, expected):
    assert until_stop(text, stop) == expected


def test_each_turn_of_each_completion_has_draws_of_its_own(make_policy, chat):
    asked = []

    class Noted(TransformersEngine):
        def stream(self, prompts, seeds, decodings):
            asked.extend(seeds)
            yield from super().stream(prompts, seeds, decodings)

    async def two_turns(episode):
        await episode.generate(1)
        await episode.generate(1)

    engine = Noted(SAMPLING, 64)
    engine.publish(make_policy(), 1)
    play(engine, SAMPLING, chat, two_turns, PROMPTS, [1, 2, 3])
    assert len(set(asked)) == len(asked) == 2 * len(PROMPTS) * SAMPLING.num_generations
