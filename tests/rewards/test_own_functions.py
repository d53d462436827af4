"""Reward functions that are called in the trainer's process."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from stapo_lite.config import Reward
from stapo_lite.rewards import functions
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.types import Completion, Prompt

GENEROUS = 20.0  # seconds: a loaded machine must not fail an honest answer


def completion(text, prompt="2+2?", **columns):
    return Completion(Prompt(prompt, [5], None, columns), [6, 7], [0.0, 0.0], False, 0, text=text)


def reward_model(own):
    return closing(RewardModel(Reward(functions=list(own)), 10, own))


def test_coroutine_functions_that_begin_together_share_a_loop(monkeypatch):
    """What one keeps, such as a client, is tied to its loop."""
    new_loop, loops, both = asyncio.new_event_loop, set(), threading.Barrier(2)

    def slow():
        with suppress(threading.BrokenBarrierError):
            both.wait(1)  # for the other thread, if it is here too
        return new_loop()

    async def judge(**_):
        loops.add(asyncio.get_running_loop())
        return [1.0]

    functions._start_loop.cache_clear()
    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    own = {"a": judge, "b": judge}
    with reward_model(own) as model:
        model.score([completion("a")], seed=0, step=1)
    assert len(loops) == 1


@pytest.mark.parametrize("under_way", [True, False])
def test_a_coroutine_ends_with_its_run(under_way):
    begun, ended = threading.Event(), threading.Event()

    async def judge():
        begun.set()
        try:
            await asyncio.sleep(3 * GENEROUS)
        finally:
            ended.set()

    def function(**_):
        if not under_way:  # the run ends after the call, before the coroutine begins
            model.close()
        return judge()

    model = RewardModel(Reward(functions=["slow"]), 10, {"slow": function})
    with ThreadPoolExecutor() as threads:
        call = threads.submit(model.score, [completion("a")], seed=0, step=1)
        if under_way:
            assert begun.wait(GENEROUS)
            model.close()
        with pytest.raises(CancelledError):
            call.result(GENEROUS)
    assert not begun.is_set() or ended.wait(GENEROUS)


def test_what_a_function_does_to_its_arguments_reaches_nobody():
    said, tool = [{"role": "user", "content": "2+2?"}], threading.Lock()
    completions = [completion("4", said, tags=["a"], tool=tool) for _ in range(2)]

    def careless(prompts, completions, completion_ids, tags, **columns):
        assert columns["tool"] == [tool] * 2  # what is not plain data stays what it is
        for each in (*prompts, *completion_ids, *tags):
            each.append("more")
        return [float(len(prompt) + len(tag)) for prompt, tag in zip(prompts, tags, strict=True)]

    with reward_model({"careless": careless}) as model:
        model.score(completions, seed=0, step=1)
    assert [c.prompt.prompt for c in completions] == [said] * 2
    assert said == [{"role": "user", "content": "2+2?"}]
    assert [c.token_ids for c in completions] == [[6, 7]] * 2
    assert [c.prompt.columns["tags"] for c in completions] == [["a"]] * 2


@pytest.mark.parametrize("order", [["waits", "tells"], ["tells", "waits"]])
def test_they_run_at_the_same_time_in_any_order(order):
    told = threading.Event()

    async def waits(**_):
        return [float(await asyncio.to_thread(told.wait, GENEROUS))]

    def tells(**_):
        told.set()
        return [2.0]

    known = {"waits": waits, "tells": tells}
    (judged,) = [completion("4")]
    with reward_model({name: known[name] for name in order}) as model:
        model.score([judged], seed=0, step=1)
    assert judged.reward == 3.0
    assert list(judged.scores) == order
