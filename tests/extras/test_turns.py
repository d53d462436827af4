"""Completions of several turns, with transformers as the engine."""

import asyncio
from contextlib import suppress

import pytest
from helpers import PROMPTS, SAMPLING

from stapo_lite.config import Prompting
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.extras.turns.episodes import run_episodes, until_stop
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.loop_thread import submit

ALL = SAMPLING.num_generations * len(PROMPTS)


@pytest.fixture
def run(make_policy, tokenizer):
    chat = Chat(tokenizer, Prompting())

    def run_all(function, kind=TransformersEngine):
        engine = kind(SAMPLING, max_num_seqs=64)
        engine.publish(make_policy(), 1)
        groups = run_episodes(engine, SAMPLING, chat, function, PROMPTS, [1, 2, 3])
        return [completion for group in groups for completion in group]

    yield run_all
    assert submit(tasks_after_a_while()).result() == 1  # that one


async def tasks_after_a_while():
    for _ in range(10):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks())


@pytest.mark.parametrize("limit", [asyncio.Lock(), asyncio.Semaphore(5), asyncio.Barrier(ALL)])
def test_coroutines_may_wait_for_each_other(run, limit):
    """With a lock around a turn, those behind it never ask, and those before it must not wait. A
    lock knows the event loop of the first step, and must be of use in the next."""

    async def with_limit(episode):
        async with limit:
            await episode.generate(max_tokens=1)
        await episode.generate(max_tokens=1)

    for _ in range(2):
        assert {len(c.token_ids) for c in run(with_limit)} == {2}


def test_an_episode_without_room_is_truncated(run):
    async def cut_off(episode):
        await episode.generate(max_tokens=1)
        for text, finished in ("a" * 5, True), ("a" * 6, False), ("", True):
            episode.finished = True  # as after a stop string
            episode.add(text)
            assert episode.finished == finished
        assert await episode.generate() == ""

    assert all(c.truncated and len(c.token_ids) == 12 for c in run(cut_off))


def after_a_turn(raises):
    async def function(episode):
        await episode.generate(max_tokens=1)
        if episode.prompt == PROMPTS[1]:
            raise raises
        await episode.generate()

    return function


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (after_a_turn(LookupError("no such tool")), LookupError, "no such tool"),
        (after_a_turn(SystemExit(3)), RunError, r"a coroutine raised SystemExit\(3\)"),
        (lambda e: asyncio.sleep(0), RunError, "an episode ended without a turn of the model's"),
        (lambda e: asyncio.gather(e.generate(1), e.generate(1)), RunError, "two turns at once"),
        (lambda e: e.generate(stop=["a"]), InputError, "rollout.engine=transformers knows no stop"),
    ],
)
def test_what_one_coroutine_raises_ends_all(run, function, error, message):
    with pytest.raises(error, match=message):
        run(function)


def test_a_turn_may_be_withdrawn_while_it_is_sampled(run):
    asking: list[asyncio.Task] = []

    class Interrupted(TransformersEngine):
        def step(self):
            for task in asking:
                task.get_loop().call_soon_threadsafe(task.cancel)
            return super().step()

    async def impatient(episode):
        asking.append(task := asyncio.ensure_future(episode.generate()))
        with pytest.raises(asyncio.CancelledError):
            await task
        await episode.generate(max_tokens=2)

    assert all(c.token_ids for c in run(impatient, Interrupted))


def test_a_turn_joins_those_in_progress_and_its_episode_goes_on_at_once(run):
    """An engine that finishes the newest turn first: the first episode to ask has its two turns
    before another one, that waited for something else, has its first. Each has its own seed."""
    order, seeds = [], []

    class NewestFirst(TransformersEngine):
        def add(self, index, prompt, seed, decoding):
            seeds.append(seed)
            super().add(index, prompt, seed, decoding)

        def step(self):
            index = max(self._asked)
            self._asked = {index: self._asked.pop(index)} | self._asked
            self._max_num_seqs = 1
            return super().step()

    async def two_turns(episode):
        me = len(order)
        order.append(None)
        for turn in range(2):
            await episode.generate(1)
            order.append((me, turn))

    run(two_turns, NewestFirst)
    turns = [pair for pair in order if pair]
    assert turns == [(me, turn) for me in reversed(range(ALL)) for turn in range(2)]
    assert len(set(seeds)) == len(seeds) == 2 * ALL


def test_a_turn_ends_with_its_stop_string():
    assert until_stop("see </tool>\n", "</tool>") == "see </tool>"  # one token has > and newline
    assert until_stop("a = b\nc", ["=>", "\n"]) == "a = b\n"
    assert until_stop("a + b", ["="]) == "a + b"  # a stop token ended it
    assert until_stop("why (", ["(", "?"]) == "why ("


def test_what_a_coroutine_changes_in_its_columns_is_its_own(run, monkeypatch):
    async def note(episode):
        await episode.generate(max_tokens=1)
        episode.prompt.columns["first"] = episode.token_ids[0]
        episode.prompt.columns["board"].append(episode.token_ids[0])

    for prompt in PROMPTS:
        monkeypatch.setitem(prompt.columns, "board", [])
    completions = run(note)
    found = [c.prompt.columns["first"] for c in completions]
    assert found == [c.token_ids[0] for c in completions]
    assert [c.prompt.columns["board"] for c in completions] == [[first] for first in found]
    assert len(set(found)) > len(PROMPTS)
    assert all(prompt.columns == {"board": []} for prompt in PROMPTS)


def test_an_episode_whose_turn_was_cancelled_is_truncated(run):
    async def out_of_time(episode):
        await episode.generate(max_tokens=1)
        episode.finished = True  # as after a stop string
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await episode.generate()

    assert all(c.truncated and len(c.token_ids) == 1 for c in run(out_of_time))


def test_a_stop_token_behind_a_turns_own_limit_does_not_count():
    engine = TransformersEngine(SAMPLING, max_num_seqs=8)
    engine._version = 1
    cut = engine._completion(PROMPTS[0], 2, [5, 6, 1], [-0.5] * 3)
    assert (cut.token_ids, cut.truncated) == ([5, 6], True)
