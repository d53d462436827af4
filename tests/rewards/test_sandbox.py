"""Reward functions in a process of their own."""

import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from types import SimpleNamespace

import psutil
import pytest
from helpers import ROOT

from stapo_lite.config import Reward
from stapo_lite.errors import RunError
from stapo_lite.rewards.functions import RewardModel, SandboxedFunction
from stapo_lite.rewards.sandbox import Pool
from stapo_lite.types import Completion, Prompt

GENEROUS = 20.0  # seconds: a loaded machine must not fail an honest answer
SHORT = 2.0
PROMPT = Prompt("2+2?", [5], None)
GOOD, BAD = (
    [Completion(PROMPT, [6, 7], [0.0, 0.0], False, 0, text=text) for text in (first, "a")]
    for first in ("good", "bad")
)


def ask(function, completions, seed=0):
    return function(completions, seed, SimpleNamespace(global_step=0, max_steps=1))


@pytest.fixture
def user_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    with ExitStack() as stack:

        def make(body, timeout=GENEROUS):
            source = f"import os, sys, random, time\ndef f(completions, **columns):\n    {body}\n"
            (tmp_path / "faulty.py").write_text(source, encoding="utf-8")
            return stack.enter_context(closing(SandboxedFunction("faulty:f", timeout)))

        yield make


FAULTS = {
    "raise ValueError('two\\nlines')": "raised ValueError: two lines",
    "raise type('Own', (Exception,), {})()": "raised Own: ",  # which the trainer cannot import
    "sys.exit(3)": "raised SystemExit: 3",
    "import re; re.match('(a+)+b', 'a' * 50)": "took longer than 2 s",  # hangs in C
    "os.kill(os.getpid(), 9)": "ended its process with status -9",
    "return 1.0": "raised TypeError: 'float' object is not iterable",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_function_that_fails_costs_its_batch_only(user_function, caplog, fault):
    body = f"if 'bad' in completions: {fault}\n    return [1, True]"
    function = user_function(body, SHORT if "match" in fault else GENEROUS)
    assert ask(function, BAD) == [None, None]
    message = f"reward.functions=faulty:f: {FAULTS[fault]}; it scores none of these completions"
    assert caplog.messages == [message]
    assert ('faulty.py", line 3, in f' in caplog.text) == ("raise" in fault or "exit" in fault)
    assert ask(function, GOOD) == [1.0, 1.0]


def test_three_failures_in_a_row_end_the_run(user_function):
    function = user_function("return [] if 'bad' in completions else [1.0, 2.0]")
    found = [ask(function, batch)[0] for batch in (BAD, BAD, GOOD, BAD, BAD)]
    assert found == [None, None, 1.0, None, None]
    with pytest.raises(RunError, match="returned 0 values, not 2; it failed on 3 batches in a row"):
        ask(function, BAD)


def test_values_become_pythons_own_and_none_where_they_are_no_number(user_function, caplog):
    """The trainer imports neither the user's module nor numpy for them."""
    numbers = "enum.IntEnum('Own', 'one two').two, fractions.Fraction(1, 4), numpy.float32(0.5)"
    body = f"import enum, fractions, numpy; return [{numbers}, None, float('nan'), 1e31]"
    assert ask(user_function(body), GOOD * 3) == [2.0, 0.25, 0.5, None, None, None]
    assert "2 of 6 values are not finite numbers" in caplog.text


def test_a_functions_draws_follow_from_the_seed(user_function):
    draws = "random.random() + numpy.random.rand() + torch.rand(()).item()"
    function = user_function(f"import numpy, torch; return [{draws}, 0]", timeout=120.0)
    assert ask(function, GOOD)[0] is not None  # it imports numpy and torch
    first, other, again = [ask(function, GOOD, seed)[0] for seed in (1, 2, 1)]
    assert first == again != other


def test_a_run_that_is_interrupted_waits_for_no_reward_function(tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    source = f"import os, time\ndef f(**_):\n    os.symlink(str(os.getpid()), {str(begun)!r})\n"
    (tmp_path / "endless.py").write_text(f"{source}    time.sleep(1000)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = RewardModel(Reward(functions=["endless:f"]), 10)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(model.score, GOOD, seed=0, step=1)
        while not begun.is_symlink():
            assert not wait([call], 0.05).done
        model.close()
        with pytest.raises(CancelledError):
            call.result(GENEROUS)
    assert not psutil.pid_exists(int(os.readlink(begun)))


@pytest.mark.parametrize("notices", [False, True])
def test_a_worker_that_dies_while_no_call_runs_is_replaced(user_function, notices):
    """The out-of-memory killer takes idle ones; pebble may not have noticed at the next call."""
    function = user_function("return [os.getpid(), 0]")
    pids = set()
    for _ in range(3):
        pid = int(ask(function, GOOD)[0])
        pids.add(pid)
        os.kill(pid, signal.SIGKILL)
        while notices and psutil.pid_exists(pid):
            os.sched_yield()
    assert len(pids) == 3


@pytest.mark.parametrize(("count", "size"), [(300, 10), (40, 100_000)])
def test_calls_that_were_waiting_when_a_pool_broke_are_made_again(count, size):
    """Those in pebble's queue are never resolved; large ones fill the pipe to the workers."""
    pool = Pool(2)
    try:
        for child in {call.result() for call in pool.call(os.getpid, [[]] * 20, GENEROUS)}:
            os.kill(child, signal.SIGKILL)
        calls = pool.call(len, [["x" * size]] * count, GENEROUS)
        assert [call.result() for call in calls] == [size] * count
    finally:
        pool.kill()


def test_a_worker_ends_with_a_killed_trainer_whose_tmpdir_is_long(tmp_path):
    """Even one that hangs in C code; and no socket's name is limited to 107 characters."""
    begun, folder = tmp_path / "begun", tmp_path / ("long" * 30)
    folder.mkdir()
    source = f"import os, re\ndef f(**_):\n    os.symlink(str(os.getpid()), {str(begun)!r})\n"
    (tmp_path / "endless.py").write_text(f"{source}    re.match('(a+)+b', 'a' * 50)\n")
    program = "from stapo_lite.rewards.sandbox import Pool, call\n"
    program += "Pool(1).call(call, [['endless:f', {}, 0]], timeout=1e6)"
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as trainer:
        while not begun.is_symlink():
            assert trainer.poll() is None
            os.sched_yield()
        worker = psutil.Process(int(os.readlink(begun)))
        trainer.kill()
    worker.wait(GENEROUS)


class Own:
    """A class of the user's script."""


class Initializer:
    """Is pickled while its worker starts."""

    def __reduce__(self):
        assert pickle.loads(pickle.dumps(Own())) is not None  # as another thread may now
        return eval, ("__import__('os').getpid",)


def test_the_users_script_stays_as_it_is_while_workers_start(monkeypatch):
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "Own", Own, raising=False)
    monkeypatch.setattr(Own, "__module__", "__main__")
    before = dict(vars(script))

    def start(_):
        pool = Pool(2, initializer=Initializer())
        try:
            return pool.schedule(os.getpid, []).result(GENEROUS)
        finally:
            pool.kill()

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(start, range(4)))) == 4
    assert sys.modules["__main__"] is script
    assert vars(script) == before


def test_a_script_without_a_main_guard_trains_once(write_config, user_reward, tmp_path):
    """Its rewards are called in processes that do not run it again; what they print is seen."""
    user_reward("def even(completions, **_): print('scored'); return [0.0] * len(completions)")
    config = write_config(train__max_steps=1, reward={"functions": ["parity:even", "math"]})
    script = f"print('begun')\nfrom stapo_lite import Trainer\nTrainer(config={str(config)!r})"
    (tmp_path / "script.py").write_text(f"{script}.train()\nprint('ended')\n", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command, options = [sys.executable, "script.py"], {"cwd": tmp_path, "env": environment}
    printed = subprocess.check_output(command, text=True, timeout=300, **options)
    counts = [printed.splitlines().count(word) for word in ("begun", "scored", "ended")]
    assert counts == [1, 1, 1]


def test_a_program_that_fails_before_its_run_ends():
    program = "from stapo_lite.config import Reward; from stapo_lite.rewards import functions\n"
    program += "functions.RewardModel(Reward(functions=['nowhere:f']), 10)"
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert done.returncode == 1
