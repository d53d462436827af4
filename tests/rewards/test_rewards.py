import asyncio
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from helpers import command

from stapo_lite.config import Reward
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.math.grading import UNREADABLE, MathGrader, Question, Verdict
from stapo_lite.extras.math.reward import math_reward
from stapo_lite.extras.quickstart import one_sentence
from stapo_lite.files import read_lines, write_lines
from stapo_lite.rewards.functions import RewardModel, SandboxedFunction, overlong_share
from stapo_lite.types import Completion, Prompt

GENEROUS = 20.0  # seconds: a loaded machine must not fail an honest answer
SHORT = 2.0
RIGHT = Question("4", r"\boxed{4}")


def completion(text, answer="4", prompt="2+2?", **columns):
    columns = {"answer": answer, **columns}
    return Completion(Prompt(prompt, [5], answer, columns), [6, 7], [0.0, 0.0], False, 0, text=text)


def score(functions, completions, own=None, **changes):
    settings = Reward(functions=functions, function_timeout=GENEROUS, **changes)
    grader = MathGrader()
    math = partial(math_reward, grader, settings)
    with closing(grader), closing(RewardModel(settings, 10, own, {"math": math})) as model:
        model.score(completions, seed=0, step=4)
    return [c.reward for c in completions]


def ask(function, completions, seed=0):
    return function(completions, seed, SimpleNamespace(global_step=0, max_steps=1))


def test_questions_are_graded_in_order_with_the_answer_in_one_spelling():
    grader = MathGrader(GENEROUS, num_workers=2)
    cases = [
        (Question("0.5", r"\boxed{\dfrac12}"), (True, "1/2")),
        (Question("1,3", r"\boxed{3, 1}"), (True, "3,1")),
        (Question("1,3", r"\boxed{3, 1}", ordered=True), (False, "3,1")),
        (Question("4.2", r"\boxed{4.3}", tolerance=0.2), (True, "43/10")),
        (Question("4.2", "no idea"), (False, None)),
        (Question(4, "The answer is $4$."), (True, "4")),
        (Question("4", "the answer is 4", finished=False), (False, None)),
        (Question("4", r"\boxed{4", finished=False), (False, None)),
        (Question("4", "larger than a pipe " * 30_000 + r"\boxed{4}"), (True, "4")),
    ]
    cases += [
        (Question(str(i), f"\\boxed{{{i - i % 3}}}"), (i % 3 == 0, str(i - i % 3)))
        for i in range(60)
    ]
    assert grader.grade([question for question, _ in cases]) == [verdict for _, verdict in cases]
    grader.close()


def test_a_pathological_answer_costs_at_most_the_limit_and_is_wrong():
    grader = MathGrader(SHORT, num_workers=1)
    assert grader.grade([RIGHT]) == [Verdict(True, "4")]  # started
    for answer in ("9^{9^{9^{9}}}", r"\int_0^1 x^{x^{x^{x}}} dx"):
        started = time.monotonic()
        assert grader.grade([Question("4", f"\\boxed{{{answer}}}")]) == [Verdict(False, UNREADABLE)]
        assert SHORT <= time.monotonic() - started < SHORT + 1.0
        assert grader.grade([RIGHT] * 4) == [Verdict(True, "4")] * 4  # and the run goes on
    grader.close()


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("/nowhere", r"\(no process can be started \(No such file"),
        ("/bin/false", r"\(ended its process with status 1"),
    ],
)
def test_a_grading_process_that_cannot_start_ends_the_run_and_leaves_nothing_waiting(
    monkeypatch, python, reason
):
    monkeypatch.setattr(sys, "executable", python)
    grader = MathGrader(GENEROUS, num_workers=1)
    for _ in range(2):
        with pytest.raises(RunError, match=f"the grading process did not start {reason}"):
            grader.grade([RIGHT])
    grader.close()


def test_grading_a_file(tmp_path, capsys):
    cases, out, verdicts = (tmp_path / name for name in ("cases.jsonl", "out", "verdicts.jsonl"))
    out.symlink_to(verdicts)
    rows = [
        {"gold": "1/2", "pred": "0.5", "form": "answer", "id": "é"},
        {"gold": 4, "pred": "We get 3, then the answer is 4."},
        {"gold": "1,3", "pred": "3,1", "form": "answer"},
        {"gold": "1,3", "pred": "3,1", "form": "answer", "answer_type": "list"},
        {"gold": "4.2", "pred": 4.25, "form": "answer", "tolerance": 0.1},
        {"gold": "4", "pred": "no idea", "form": "response"},
    ]
    write_lines(cases, rows)
    arguments = ["grade", cases, "--out", out, "--timeout", GENEROUS, "--num-workers", 1]
    assert command(*arguments) == 0
    assert capsys.readouterr().out == f"6 graded, 4 correct, 1 without an answer: {out}\n"
    right = [True, True, True, False, True, False]
    assert read_lines(verdicts) == [
        row | {"correct": correct} for row, correct in zip(rows, right, strict=True)
    ]
    assert out.is_symlink()
    assert command(*arguments[:3], "/dev/null", *arguments[4:]) == 2
    assert "error: --out=/dev/null: not a file" in capsys.readouterr().err
    for text, message in [
        ('{"gold": "1"}', ", case 1: pred must be text or a number, got None"),
        ('{"gold": null, "pred": "1"}', ", case 1: gold must be"),
        ('{"gold": "1", "pred": "1", "tolerance": "x"}', ", case 1: tolerance must be"),
        ('{"gold": "1", "pred": "1", "tolerance": NaN}', ", case 1: tolerance must be"),
        ("3", ", line 1: must be a JSON object"),
        (None, ": cannot be read (No such file or directory)"),
    ]:
        cases.unlink() if text is None else cases.write_text(text, encoding="utf-8")
        assert command(*arguments) == 2
        assert f"error: {cases}{message}" in capsys.readouterr().err


def test_the_quickstarts_reward_by_hand():
    right = ["A stone sank.", '"Is it STONE?"']
    wrong = ["A stone sank. It was grey.", "A stone sank", "Stones sank.", ""]
    assert one_sentence.reward(right + wrong, ["stone"] * 6, prompts=[]) == [
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


def test_weights_scales_and_truncated_completions():
    """Token-mean would reinforce all that follows an early box."""
    pair = [completion("one stone.", word="stone"), completion("4", word="stone")]
    sentence = "stapo_lite.extras.quickstart.one_sentence:reward"
    assert score(["math"], pair, incorrect=0.0, correct=2.0) == [0.0, 2.0]
    assert score([sentence, "math"], pair, weights=[2.0, 0.5]) == [1.5, 0.5]
    ways = {"a": lambda **_: [0.1, 0.3], "b": lambda **_: [0.2, 0.0]}
    assert len(set(score(["a", "b"], pair, ways))) == 1  # 0.1 + 0.2 is not another reward than 0.3
    texts = ("the answer is 4", "the answer is 4", r"\boxed{4}" + " and so on" * 3000)
    completions = [completion(text) for text in texts]
    completions[1].truncated = completions[2].truncated = True
    assert score(["math"], completions) == [1.0, -1.0, -1.0]
    assert score(["math"], completions, truncated_is_incorrect=False) == [
        1.0,
        -1.0,
        1.0,
    ]  # it states no answer


def test_a_user_function_is_called_as_trl_calls_it(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def length(prompts, completions, completion_ids, level, **columns):\n"
        "    state = columns.pop('trainer_state')\n"
        "    assert (state.global_step, state.max_steps) == (3, 10)\n"
        "    assert sorted(columns) == ['answer'], columns\n"
        "    assert prompts == ['2+2?'] * 2 and completion_ids == [[6, 7]] * 2\n"
        "    return [None if l else float(len(c)) for c, l in zip(completions, level)]\n"
        "def chat(completions, **columns):\n"
        "    return [len(c[0]['content']) for c in completions if c[0]['role'] == 'assistant']\n"
        "def numpy(**columns):\n"
        "    import numpy\n"
        "    return numpy.array([1.0, 2.0], dtype=numpy.float32)\n"
        "async def later(completions, **columns):\n"
        "    import asyncio\n"
        "    await asyncio.sleep(0)\n"
        "    return [float(len(c)) for c in completions]\n"
        "value = 3\n",
        encoding="utf-8",
    )
    (tmp_path / "broken_rewards.py").write_text(
        "raise ValueError('two\\nlines')\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert score(
        ["my_rewards:length"], [completion("abc", level=0), completion("abc", level=1)]
    ) == [3.0, None]
    messages = [{"role": "user", "content": "2+2?"}]
    chat = [completion("abcd", prompt=messages), completion("", prompt=messages)]
    assert score(["my_rewards:chat"], chat) == [4.0, 0.0]
    pair = [completion("a", completions="a column of the data"), completion("b", completions="")]
    assert score(["my_rewards:numpy"], pair) == [1.0, 2.0]
    assert score(["my_rewards:later"], pair) == [1.0, 1.0]
    for path, message in [
        ("broken_rewards:f", r"cannot be imported \(ValueError: two lines\)"),
        ("my_rewards:nothing", "cannot be imported"),
        ("no_such_module:f", r"cannot be imported \(ModuleNotFoundError"),
        ("my_rewards:value", "is a int, not a function"),
        ("maths", "use math or package.module:function"),
    ]:
        with pytest.raises(InputError, match=message):
            score([path], pair)


@pytest.fixture
def user_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    with ExitStack() as stack:

        def make(body, timeout=GENEROUS):
            source = f"import os, sys, random, time\ndef f(completions, **columns):\n    {body}\n"
            (tmp_path / "faulty.py").write_text(source, encoding="utf-8")
            return stack.enter_context(closing(SandboxedFunction("faulty:f", timeout)))

        yield make


HOARD, TOO_MUCH = "hoard = [bytearray(1 << 20) for _ in iter(int, 1)]", "took more than 0.2 GiB"
FAULTS = {
    "raises": (
        "raise ValueError('two\\nlines')",
        r"raised ValueError: two lines \(faulty.py, line 3\)",
    ),
    "hangs in C": ("import re; re.match('(a+)+b', 'a' * 50)", "took longer than 2 s"),
    "takes all memory": (HOARD, TOO_MUCH),
    "its process takes all memory": (
        f"import subprocess; subprocess.run([sys.executable, '-c', '{HOARD}'])",
        TOO_MUCH,
    ),
    "is killed": ("os.kill(os.getpid(), 9)", "ended its process with status -9"),
    "too few": ("return [1.0]", "returned 1 values, not 2"),
    "no list": ("return 1.0", "returned 1.0, not a list"),
    "no numbers": ("return [sys, float('nan')]", "returned no finite number"),
    "out of range": ("return [1e31, -float('inf')]", "returned no finite number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_function_that_fails_judges_nothing(user_function, caplog, tmp_path, fault):
    body, message = FAULTS[fault]
    function, pair = user_function(body), [completion("a"), completion("b")]
    function.sandbox.timeout = SHORT if "hangs" in fault else GENEROUS
    function.sandbox.memory_bytes = int(0.2 * 2**30) if "memory" in fault else 1 << 30
    assert ask(function, pair) == [None, None]
    assert (
        len(re.findall(f"reward.functions=faulty:f: {message}; it judges none", caplog.text)) == 1
    )
    function.sandbox.timeout, function.sandbox.memory_bytes = GENEROUS, 1 << 30
    function.sandbox.close()  # a new process reads the fixed file
    (tmp_path / "faulty.py").write_text(
        "def f(completions, **columns): return [1, True]\n", encoding="utf-8"
    )
    assert ask(function, pair) == [1.0, 1.0]


def test_what_a_function_prints_is_seen_though_its_process_is_killed(user_function, capfd):
    function = user_function("print('judging'); return [1.0]")
    assert ask(function, [completion("a")]) == [1.0]
    function.close()
    assert "judging" in capfd.readouterr().out


def test_processes_that_a_function_started_end_with_it(user_function, tmp_path):
    start = (
        "import subprocess; p = subprocess.Popen(['sleep', '1000']); open(__file__ + 'p', "
        "'a').write(f'{p.pid} ')"
    )
    function = user_function(f"{start}; time.sleep(1000)")
    function.sandbox.timeout = 5.0  # enough to start the process on a loaded machine
    assert ask(function, [completion("a")]) == [None]
    pids = (tmp_path / "faulty.pyp").read_text(encoding="utf-8").split()
    assert len(pids) == 1
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(pids[0]))
        _, alive = psutil.wait_procs([child], timeout=GENEROUS)
        assert not alive or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("body", "values"),
    [
        # single values that are no numbers
        ("return [float('nan'), 2]", [None, 2.0]),
        # Python's own come back: the trainer does not import the user's module, or numpy
        (
            "import enum, fractions, decimal; Own = enum.IntEnum('Own', 'one two'); Sub = "
            "type('Sub', (float,), {}); "
            "return [Own.two, fractions.Fraction(1, 4), decimal.Decimal('0.5'), Sub(3), 'text']",
            [2.0, 0.25, 0.5, 3.0, None],
        ),
        # a column that some rows lack
        ("return [float(x or -1) for x in columns['level']]", [3.0, -1.0]),
    ],
)
def test_values_of_a_user_function(user_function, caplog, body, values):
    completions = [completion("a", level=3), *(completion("b") for _ in values[1:])]
    assert ask(user_function(body), completions) == values
    unusable = values.count(None)
    warning = (
        f"{unusable} of {len(values)} values are not finite numbers; their completions are not"
    )
    assert (warning in caplog.text) == (unusable > 0)


def test_functions_of_this_process_keep_their_state_and_run_beside_each_other():
    seen, threads, both = [], [], threading.Barrier(2)

    def first(completions, trainer_state, **_):
        seen.append(trainer_state.global_step)
        threads.append(threading.current_thread())
        both.wait(GENEROUS)  # breaks if the other one begins only after this one
        return [len(c) for c in completions]

    async def second(completions, **_):
        both.wait(GENEROUS)
        return np.array([1.0, np.nan])

    pair = [completion("abc"), completion("a")]
    names = {"first": first, "second": second}
    assert score(["first", "second", "math"], pair, names, weights=[1.0, 2.0, 0.5]) == [
        3.0 + 2.0 - 0.5,
        1.0 - 0.5,
    ]
    assert [c.scores for c in pair] == [
        {"first": 3, "second": 1, "math": -1},
        {"first": 1, "math": -1},
    ]
    assert seen == [3]
    assert threads == [threading.current_thread()]  # whose device and signals it may need
    with pytest.raises(
        RunError, match=r"reward_funcs: short returned 1 values, not 2; fix it, then resume=True"
    ):
        score(["short"], pair, {"short": lambda **_: [1.0]})
    with pytest.raises(ZeroDivisionError):  # with its traceback: it is the caller's own
        score(["wrong"], pair, {"wrong": lambda **_: 1 / 0})


LIMITED = """
import asyncio
few = asyncio.Semaphore(1)
async def judge(completions, **_):
    async with few:
        await asyncio.gather(*(asyncio.sleep(0) for _ in completions))
    return [1.0 for _ in completions]
"""


def test_what_a_coroutine_function_holds_lives_through_all_its_calls(tmp_path, monkeypatch):
    """A semaphore or a client belongs to an event loop."""
    (tmp_path / "limited.py").write_text(LIMITED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    own: dict = {}
    exec(LIMITED, own)
    few, crowd = asyncio.Semaphore(1), [completion("a"), completion("b")]

    async def waits(completions, **_):
        async def one():
            async with few:
                await asyncio.sleep(0.001)
            return 1.0

        return await asyncio.gather(*(one() for _ in completions))

    settings = Reward(functions=["limited:judge", "waits"], function_timeout=GENEROUS)
    with closing(RewardModel(settings, 10, {"waits": waits})) as model:
        for step in (1, 2, 3):
            model.score(crowd, seed=0, step=step)
            assert [c.reward for c in crowd] == [2.0, 2.0]


def test_a_function_that_returns_a_coroutine_works_in_a_notebook():
    """There the run's thread has an event loop that runs; the coroutine's own one is the same for
    all its calls."""
    loops = []

    async def judge(completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    async def cell():
        with closing(
            RewardModel(
                Reward(functions=["later"]),
                10,
                {"later": lambda completions, **_: judge(completions)},
            )
        ) as model:
            for step in (1, 2):
                model.score(pair, seed=0, step=step)

    pair = [completion("a"), completion("b")]
    # In a thread of its own: a browser's test may have left a loop in this one.
    with ThreadPoolExecutor() as pool:
        pool.submit(asyncio.run, cell()).result()
    assert [c.reward for c in pair] == [1.0, 1.0]
    assert loops[0] is loops[1]


def test_a_weight_of_0_judges_nothing():
    pair = [completion("a"), completion("b")]
    own = {"logged": lambda **_: [5.0, 5.0], "judge": lambda **_: [2.0, None]}
    assert score(["logged", "judge"], pair, own, weights=[0.0, 1.0]) == [2.0, None]
    assert pair[1].scores == {"logged": 5.0}
    with pytest.raises(ValueError, match=r"reward.weights=\[0.0, 0.0\]: a weight of 0 only logs"):
        Reward(functions=["math", "a:b"], weights=[0.0, 0.0])


def test_a_run_that_is_interrupted_waits_for_no_reward_function(tmp_path, monkeypatch):
    source = "import time\ndef f(**_): open(__file__ + '.begun', 'w'); time.sleep(1000)\n"
    (tmp_path / "endless.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = RewardModel(Reward(functions=["endless:f"]), 10)
    process = model._functions["endless:f"].sandbox._process
    with ThreadPoolExecutor() as threads:
        call = threads.submit(model.score, [completion("a")], seed=0, step=1)
        while not (tmp_path / "endless.py.begun").exists():
            assert not wait([call], 0.05).done
        model.close()
        with pytest.raises(RunError, match="interrupted"):
            call.result(GENEROUS)
    assert process.poll() is not None


def test_too_many_failures_in_a_row_end_the_run(user_function):
    function, pair = (
        user_function("return [] if 'bad' in completions else [1.0, 2.0]"),
        [completion("a")] * 2,
    )
    bad = [completion("bad"), completion("a")]
    assert [ask(function, batch)[0] for batch in (bad, bad, pair, bad, bad)] == [
        None,
        None,
        1.0,
        None,
        None,
    ]
    with pytest.raises(
        RunError, match="returned 0 values, not 2; it failed on 3 batches in a row: fix it"
    ):
        ask(function, bad)


def test_a_functions_draws_follow_from_the_seed(user_function):
    body = (
        "import numpy, torch; return [random.random() + numpy.random.rand() + "
        "torch.rand(()).item(), 0]"
    )
    function, pair = user_function(body, timeout=120.0), [completion("a"), completion("b")]
    assert ask(function, pair)[0] is not None  # it imports numpy and torch
    first, other, again = [ask(function, pair, seed)[0] for seed in (1, 2, 1)]
    assert first == again != other


def test_soft_overlong_punishment_by_hand():
    shares = [
        overlong_share(length, max_completion_length=10, buffer=0.4) for length in (1, 6, 7, 8, 10)
    ]
    assert shares == pytest.approx([0.0, 0.0, 0.25, 0.5, 1.0])
