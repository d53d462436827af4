import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from stapo_lite.rewards.functions import SandboxedFunction
from stapo_lite.rewards.sandbox import Sandbox, SandboxError

GENEROUS = 20.0  # seconds: a loaded machine must not fail an honest answer


HEIRS = """
import os, subprocess, threading
def f(text):
    # outlives it, with all that it has open
    subprocess.Popen(["sleep", "30"], close_fds=False, start_new_session=True)
    threading.Timer(1.0, os._exit, (3,)).start()
    return len(text)
"""


@pytest.mark.parametrize("argument", ["a", "a" * 10_000_000], ids=["small", "large"])
def test_a_connection_that_outlives_its_process_blocks_no_call(tmp_path, monkeypatch, argument):
    (tmp_path / "heirs.py").write_text(HEIRS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(Sandbox("heirs:f", GENEROUS, 1 << 30)) as sandbox:
        assert sandbox.call({"text": argument}) == len(argument)
        sandbox._process.wait()
        begun = time.monotonic()
        with pytest.raises(SandboxError, match="ended its process with status 3"):
            sandbox.call({"text": argument})
        assert time.monotonic() - begun < 10
        assert sandbox.call({"text": "in a new one"}) == 12


def test_a_process_that_reads_nothing_ends_the_call_in_time(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("def f(text): return len(text)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(Sandbox("plain:f", GENEROUS, 1 << 30)) as sandbox:
        assert sandbox.call({"text": "abc"}) == 3
        os.kill(sandbox._process.pid, signal.SIGSTOP)
        with pytest.raises(SandboxError, match="took longer than 1 s"):
            sandbox.call({"text": "a" * 10_000_000}, timeout=1)
        assert sandbox.call({"text": "in a new one"}) == 12


def test_arguments_that_cannot_be_sent_are_an_error_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("def f(text): return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(Sandbox("plain:f", GENEROUS, 1 << 30)) as sandbox:
        with pytest.raises(SandboxError, match="cannot be sent its arguments: "):
            sandbox.call({"text": lambda: None})
        assert sandbox.call({"text": "abc"}) == 1


def test_a_function_that_forks_and_returns_answers_once(tmp_path, monkeypatch):
    source = "import os\ndef f(number): os.fork(); return number\n"
    (tmp_path / "forks.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(Sandbox("forks:f", GENEROUS, 1 << 30)) as sandbox:
        assert [sandbox.call({"number": n}) for n in range(4)] == [0, 1, 2, 3]


def connections():
    gc.collect()
    files = Path("/proc/self/fd").iterdir()
    return sum("socket:" in os.readlink(path) for path in files if path.is_symlink())


def test_closing_a_function_leaves_no_descriptor(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("def f(completions, **_): return [1.0]\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = connections()
    for _ in range(3):
        SandboxedFunction("plain:f", GENEROUS).close()
    assert connections() <= before


WORKERS = """
import multiprocessing, time
table = bytearray(b"x") * (150 << 20)
def read(_):
    time.sleep(0.5)
    return table[0]
def f():
    with multiprocessing.get_context("fork").Pool(6) as pool:
        return pool.map(read, range(6), chunksize=1)
"""


def test_memory_that_processes_share_counts_once(tmp_path, monkeypatch):
    (tmp_path / "workers.py").write_text(WORKERS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(Sandbox("workers:f", GENEROUS, 400 << 20)) as sandbox:
        assert sandbox.call({}) == [120] * 6
        sandbox.memory_bytes = 100 << 20  # less than the table
        with pytest.raises(SandboxError, match=r"took more than 0\.0977 GiB"):
            sandbox.call({})


def test_a_function_that_hangs_ends_with_its_parent(tmp_path):
    (tmp_path / "slow.py").write_text(
        "def f(**columns):\n    print('hangs', flush=True)\n    while True: pass\n"
    )
    program = (
        "from stapo_lite.rewards.sandbox import Sandbox; "
        f"Sandbox('slow:f', {GENEROUS}, 1 << 30).call({{}}, timeout=3.0)"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline() == "hangs\n"
        parent.kill()
        assert parent.stdout.read() == ""  # the worker, which writes there too, has ended


def test_once_killed_it_starts_no_other_process(tmp_path, monkeypatch):
    """The thread that kills it may not see the process that another is starting."""
    (tmp_path / "plain.py").write_text("def f(text): return len(text)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(Sandbox("plain:f", GENEROUS, 1 << 30)) as sandbox:
        sandbox.kill()
        with pytest.raises(SandboxError, match="ended its process with status -9"):
            sandbox.call({"text": "abc"})
