"""Rewards from functions of the trainer's process, of an import path, and from `math`."""

import asyncio
import os
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from functools import partial

import numpy as np
import pytest

from stapo_lite import loop_thread
from stapo_lite.config import Reward
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.math import grading
from stapo_lite.extras.math.grading import UNREADABLE, MathGrader, Question
from stapo_lite.extras.math.reward import math_reward
from stapo_lite.extras.quickstart import one_sentence
from stapo_lite.loop_thread import submit
from stapo_lite.method.advantages import overlong_share
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.types import Completion, Prompt

GENEROUS = 20.0  # seconds: a loaded machine must not fail an honest answer
SHORT = 2.0
RIGHT = Question("4", r"\boxed{4}")
ENDLESS = Question("4", r"\boxed{9^{9^{9^{9}}}}")


@pytest.fixture(scope="module")
def grader():
    with closing(MathGrader(GENEROUS, num_workers=2)) as grader:
        yield grader


def completion(text, prompt="2+2?", truncated=False, **columns):
    prompt = Prompt(prompt, [5], "4", {"answer": "4", **columns})
    return Completion(prompt, [6, 7], [0.0, 0.0], truncated, 0, text=text, whole_text=text)


def score(functions, completions, own=None, steps=(4,), grader=None, **settings):
    settings = Reward(functions=list(functions), function_timeout=GENEROUS, **settings)
    math = partial(math_reward, grader, settings)
    with closing(RewardModel(settings, 10, own or {}, {"math": math})) as model:
        for step in steps:
            model.score(completions, seed=0, step=step)
    return [c.reward for c in completions]


def test_questions_are_graded_in_order_with_the_answer_as_written(grader):
    cases = [
        (Question("0.5", r"\boxed{\dfrac12}"), (True, r"\dfrac12")),
        (Question("1,3", r"\boxed{3, 1}"), (True, "3, 1")),
        (Question("1,3", r"\boxed{3, 1}", ordered=True), (False, "3, 1")),
        (Question("4.2", r"\boxed{4.3}", tolerance=0.2), (True, "4.3")),
        (Question("4.2", "no idea"), (False, None)),
        (Question(4, "The answer is $4$."), (True, "$4$")),
        (Question("4", "the answer is 4", finished=False), (False, None)),
        (Question("4", "larger than a pipe " * 30_000 + r"\boxed{4}"), (True, "4")),
    ]
    for i in range(60):
        third = i - i % 3
        cases.append((Question(str(i), f"\\boxed{{{third}}}"), (i == third, str(third))))
    assert grader.grade([question for question, _ in cases]) == [verdict for _, verdict in cases]


def test_a_pathological_answer_costs_at_most_the_limit_and_is_wrong():
    with closing(MathGrader(SHORT, num_workers=1)) as grader:
        assert grader.grade([RIGHT]) == [(True, "4")]  # started
        for question in (ENDLESS, Question("4", r"\boxed{\int_0^1 x^{x^{x^{x}}} dx}")):
            started = time.monotonic()
            assert grader.grade([question]) == [(False, UNREADABLE)]
            assert SHORT <= time.monotonic() - started < SHORT + 1.0
            assert grader.grade([RIGHT] * 4) == [(True, "4")] * 4  # and the run goes on


def test_graders_that_do_not_start_or_are_closed_call_no_answer_wrong(monkeypatch):
    with closing(MathGrader(num_workers=1)) as grader:
        assert grader.grade([RIGHT]) == [(True, "4")]
        call = grader._pool.schedule(grading.grade, ENDLESS)
    with pytest.raises(CancelledError):
        grading.outcome(call)
    monkeypatch.setattr(grading, "warm_up", os.abort)
    with closing(MathGrader(num_workers=1)) as grader, pytest.raises(BrokenProcessPool):
        grader.grade([RIGHT])


def test_the_quickstarts_reward_by_hand():
    right = ["A stone sank.", '"Is it STONE?"']
    wrong = ["A stone sank. It was grey.", "A stone sank", "Stones sank.", ""]
    wrong.append('"A stone sank." It was grey.')
    found = one_sentence.reward(right + wrong, ["stone"] * 7, prompts=[])
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_weights_and_scales(grader):
    pair = [completion("one stone.", word="stone"), completion("4", word="stone")]
    sentence = "stapo_lite.extras.quickstart.one_sentence:reward"
    assert score(["math"], pair, grader=grader, incorrect=0.0, correct=2.0) == [0.0, 2.0]
    assert score([sentence, "math"], pair, grader=grader, weights=[2.0, 0.5]) == [1.5, 0.5]
    ways = {"a": lambda **_: [0.1, 0.3], "b": lambda **_: [0.2, 0.0]}
    assert len(set(score(ways, pair, ways))) == 1  # 0.1 + 0.2 is not another reward than 0.3
    own = {"logged": lambda **_: [5.0, 5.0], "judge": lambda **_: [2.0, None]}
    assert score(own, pair, own, weights=[0.0, 1.0]) == [2.0, None]
    assert pair[1].scores == {"logged": 5.0}


def test_a_score_that_is_too_large_for_fp32_is_none_whatever_its_sign():
    values = [1e31, -1e31, float("inf"), float("-inf"), 9e29, -9e29]
    some = [completion("a") for _ in values]
    own = {"own": lambda **_: values}
    assert score(own, some, own) == [None, None, None, None, 9e29, -9e29]


def test_truncated_completions_are_wrong_unless_they_may_be_right(grader):
    completions = [completion("the answer is 4", truncated=cut) for cut in (False, True)]
    completions.append(completion(r"\boxed{4}" + " and so on" * 3000, truncated=True))
    for allowed, rewards in (True, [1.0, -1.0, -1.0]), (False, [1.0, -1.0, 1.0]):
        options = {"truncated_is_incorrect": allowed}
        assert score(["math"], completions, grader=grader, **options) == rewards


def test_soft_overlong_punishment_by_hand():
    shares = [overlong_share(length, 10, buffer=0.4) for length in (1, 6, 7, 8, 10)]
    assert shares == pytest.approx([0.0, 0.0, 0.25, 0.5, 1.0])


MODULE = """
import asyncio, numpy
few = asyncio.Semaphore(1)  # tied to the first loop that waits for it
def length(prompts, completions, completion_ids, level, **columns):
    state = columns.pop('trainer_state')
    assert (state.global_step, state.max_steps) == (3, 10)
    assert sorted(columns) == ['answer'], columns
    assert prompts == ['2+2?'] * 2 and completion_ids == [[6, 7]] * 2
    return [None if l else float(len(c)) for c, l in zip(completions, level)]
def chat(completions, **columns):
    return numpy.array([len(c[0]['content']) for c in completions if c[0]['role'] == 'assistant'])
async def one(text):
    async with few:
        await asyncio.sleep(0)
    return float(len(text))
async def later(completions, **columns):
    return await asyncio.gather(*map(one, completions))
value = 3
"""


def test_a_user_function_is_called_as_trl_calls_it(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("raise ValueError('two\\nlines')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    pair = [completion("abc"), completion("abc", level=1)]  # one row lacks the column
    assert score(["my_rewards:length"], pair) == [3.0, None]
    chat = [completion(text, [{"role": "user", "content": "2+2?"}]) for text in ("abcd", "")]
    assert score(["my_rewards:chat"], chat) == [4.0, 0.0]
    pair = [completion("a", completions="a column of the data"), completion("b", completions="")]
    assert score(["my_rewards:later"], pair, steps=(1, 2)) == [1.0, 1.0]
    for path, message in [
        ("broken:f", "reward.functions=broken:f: raised ValueError: two lines"),
        ("no_such_module:f", "raised ModuleNotFoundError"),
        ("my_rewards:value", "not a function"),
        ("maths", "use math or package.module:function"),
    ]:
        with pytest.raises(InputError, match=message):
            score([path], pair)


@pytest.mark.parametrize("order", [["plain", "waits"], ["waits", "plain"]])
def test_plain_functions_run_in_the_callers_thread_beside_coroutines(order):
    both = threading.Barrier(2)  # breaks if one begins only after the other

    def plain(completions, trainer_state, **_):
        assert (trainer_state.global_step, trainer_state.max_steps) == (3, 10)
        assert threading.current_thread() is threading.main_thread()
        both.wait(GENEROUS)
        return [len(c) for c in completions]

    async def waits(**_):
        await asyncio.to_thread(both.wait, GENEROUS)
        return np.array([1.0, np.nan])

    pair, own = [completion("abc"), completion("a")], {"plain": plain, "waits": waits}
    assert score(order, pair, own) == [4.0, 1.0]
    scores = {"plain": 3, "waits": 1}
    assert [[*c.scores.items()] for c in pair] == [[(n, scores[n]) for n in order], [("plain", 1)]]


def test_coroutines_share_one_loop_through_all_runs_also_in_a_notebook():
    """There the caller's thread has a loop, too; clients and semaphores belong to one loop."""
    loops = []

    async def judge(**_):
        loops.append(asyncio.get_running_loop())
        return [1.0]

    async def cell():
        own = {"a": judge, "b": lambda **columns: judge(**columns)}
        return score(own, [completion("a")], own, steps=(1, 2))

    # In a thread of its own: a browser's test may have left a loop in this one.
    with ThreadPoolExecutor() as threads:
        for _ in range(2):
            assert threads.submit(asyncio.run, cell()).result() == [2.0]
    assert len(loops) == 8
    assert len(set(loops)) == 1


def test_two_coroutines_that_begin_at_the_same_time_share_one_loop(monkeypatch):
    """A loop is made as if both threads were there: the first one waits for the second."""
    both = threading.Barrier(2)
    make = asyncio.new_event_loop

    def make_late():
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)
        return make()

    monkeypatch.setattr(loop_thread.asyncio, "new_event_loop", make_late)

    async def current():
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: submit(current(), "new").result(), range(2))
    assert first is second


def test_an_exit_in_a_coroutine_ends_the_run_and_not_the_loop_of_the_others():
    async def leaves(**_):
        raise SystemExit(3)

    model = RewardModel(Reward(functions=["leaves"]), 10, {"leaves": leaves})
    for step in (1, 2):
        with pytest.raises(RunError, match=r"a coroutine raised SystemExit\(3\)"):
            model.score([completion("a")], seed=0, step=step)
    model.close()


def test_a_coroutine_under_way_is_cancelled_at_the_end_of_its_run():
    begun, ended = threading.Event(), threading.Event()

    async def judge(**_):
        begun.set()
        try:
            await asyncio.sleep(3 * GENEROUS)
        finally:
            await asyncio.sleep(0.01)  # it may clean up
            ended.set()

    model = RewardModel(Reward(functions=["slow"]), 10, {"slow": judge})
    with ThreadPoolExecutor() as threads:
        call = threads.submit(model.score, [completion("a")], seed=0, step=1)
        assert begun.wait(GENEROUS)
        model.close()
        assert ended.is_set()
        with pytest.raises(CancelledError):
            call.result(GENEROUS)


def test_functions_get_copies_of_prompts_ids_and_columns():
    said, tool = [{"role": "user", "content": "2+2?"}], threading.Lock()
    asked = completion("4", said, tags=["a"], tool=tool)

    def careless(prompts, completion_ids, tags, **columns):
        assert columns["tool"] == [tool]  # what is not plain data stays what it is
        for each in (*prompts, *completion_ids, *tags):
            each.append("more")
        return [float(len(prompts[0]) + len(tags[0]))]

    assert score(["careless"], [asked], {"careless": careless}) == [4.0]
    assert asked.prompt.prompt == said == [{"role": "user", "content": "2+2?"}]
    assert (asked.token_ids, asked.prompt.columns["tags"]) == ([6, 7], ["a"])


def test_a_function_of_the_caller_that_fails_ends_the_run():
    pair = [completion("a"), completion("b")]
    with pytest.raises(RunError, match="reward_funcs: own returned 1 values, not 2; fix it"):
        score(["own"], pair, {"own": lambda **_: [1.0]})
    with pytest.raises(RunError, match="reward_funcs: own 'NoneType' .* is not iterable; fix it"):
        score(["own"], pair, {"own": lambda **_: None})  # a `return` is missing
    with pytest.raises(ZeroDivisionError):
        score(["own"], pair, {"own": lambda **_: 1 / 0})
