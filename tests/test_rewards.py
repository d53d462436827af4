import json
import os
import re
import subprocess
import sys
import threading
import time

import psutil
import pytest

from stapo_lite.config import InputError, Reward, RunError
from stapo_lite.grading import UNREADABLE, MathGrader, Question, Verdict
from stapo_lite.rewards import RewardModel, UserFunction, last_integer_equals, main, overlong_share
from stapo_lite.sandbox import Sandbox, SandboxError
from stapo_lite.types import Completion, Prompt

GENEROUS = 20.0  # seconds: a loaded machine must not fail an honest answer
SHORT = 2.0


def grade(grader, *pairs):
    return [verdict.correct for verdict in grader.grade([Question(gold, response) for gold, response in pairs])]


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout=GENEROUS, num_workers=2)
    yield grader
    grader.close()


def completion(text, answer="4", prompt="2+2?", **columns):
    return Completion(
        Prompt(prompt, [5], answer, {"answer": answer, **columns}), [6, 7], [0.0, 0.0], False, 0, text=text
    )


def score(functions, completions, **changes):
    limits = {"timeout": GENEROUS, "num_workers": 1, "function_timeout": GENEROUS, "max_failures": 2}
    model = RewardModel(Reward(functions=functions, **limits | changes))
    try:
        model.score(completions, seed=0)
    finally:
        model.close()
    return [c.reward for c in completions]


@pytest.mark.parametrize(
    ("gold", "response", "correct"),
    [
        ("4", r"so \boxed{4}", True),
        ("4", r"first \boxed{4}, no: \boxed{5}", False),
        ("4", r"first \boxed{5}, no: \boxed{4}", True),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \frac{\pi}{2})}", True),
        (r"\sqrt{2}", r"\boxed{1.5}", False),
        (4, "The answer is $4$.", True),
        ("4", "I do not know", False),
        ("4", "", False),
        ("4", r"\boxed{4", False),
        ("4", r"\boxed{}", False),
    ],
)
def test_math_on_the_final_answer(grader, gold, response, correct):
    assert grade(grader, (gold, response)) == [correct]


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "10^{10^{10}}!", "\\int_0^1 x^{x^{x^{x}}} dx"])
def test_a_pathological_answer_costs_at_most_the_limit_and_is_wrong(answer):
    impatient = MathGrader(timeout=SHORT, num_workers=1)
    try:
        assert grade(impatient, ("4", r"\boxed{4}")) == [True]  # started
        started = time.monotonic()
        assert impatient.grade([Question("4", f"\\boxed{{{answer}}}")]) == [Verdict(False, UNREADABLE)]
        assert SHORT <= time.monotonic() - started < SHORT + 1.0
        assert grade(impatient, *[("4", r"\boxed{4}")] * 4) == [True] * 4  # and the run goes on
    finally:
        impatient.close()


def test_a_process_that_dies_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "mortal.py").write_text(
        "import os\ndef f(die): return os.getpid() if not die else os.kill(os.getpid(), 9)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sandbox = Sandbox("mortal:f", GENEROUS, 1 << 30)
    first = sandbox.call({"die": False})
    assert sandbox.call({"die": False}) == first
    with pytest.raises(SandboxError, match="ended its process with status -9"):
        sandbox.call({"die": True})
    assert sandbox.call({"die": False}) != first
    sandbox.close()


def test_processes_do_not_import_the_trainer(tmp_path, monkeypatch):
    """Replacing one is quick, and many of them are small."""
    (tmp_path / "look.py").write_text(
        "import sys, stapo_lite.answers\ndef f(): return sorted({'torch', 'peft', 'sympy'} & {*sys.modules})\n", "utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sandbox = Sandbox("look:f", GENEROUS, 1 << 30)
    assert sandbox.call({}) == ["sympy"]
    sandbox.close()


def test_a_machine_that_starts_no_process_is_named_and_leaves_nothing_waiting(monkeypatch):
    def refuse(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    grader = MathGrader(timeout=GENEROUS, num_workers=1)
    for _ in range(2):
        with pytest.raises(RunError, match=r"did not start \(no process can be started \(Resource temporarily"):
            grade(grader, ("4", r"\boxed{4}"))
    grader.close()


def test_a_grading_process_that_cannot_start_ends_the_run(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    grader = MathGrader(timeout=GENEROUS, num_workers=1)
    with pytest.raises(RunError, match="the grading process did not start"):
        grade(grader, ("4", r"\boxed{4}"))
    grader.close()


def test_many_answers_in_order(grader):
    pairs = [(str(i), f"\\boxed{{{i if i % 3 else -1}}}") for i in range(1, 61)]
    assert grade(grader, *pairs) == [bool(i % 3) for i in range(1, 61)]


def test_a_response_larger_than_a_pipe(grader):
    assert grade(grader, ("4", "blah " * 100_000 + r"\boxed{4}")) == [True]


def test_verdicts_carry_the_answer_in_one_spelling(grader):
    questions = [
        Question("0.5", r"\boxed{\dfrac12}"),
        Question("1,3", r"\boxed{3, 1}"),
        Question("1,3", r"\boxed{3, 1}", ordered=True),
        Question("4.2", r"\boxed{4.3}", tolerance=0.2),
        Question("4.2", "no idea"),
    ]
    assert grader.grade(questions) == [(True, "1/2"), (True, "3,1"), (False, "3,1"), (True, "43/10"), (False, None)]


def test_grading_a_file(tmp_path, capsys, monkeypatch):
    cases, out = tmp_path / "cases.jsonl", tmp_path / "verdicts.jsonl"
    rows = [
        {"gold": "1/2", "pred": "0.5", "form": "answer", "id": "é"},
        {"gold": 4, "pred": "We get 3, then the answer is 4."},
        {"gold": "1,3", "pred": "3,1", "form": "answer"},
        {"gold": "1,3", "pred": "3,1", "form": "answer", "answer_type": "list"},
        {"gold": "4.2", "pred": 4.25, "form": "answer", "tolerance": 0.1},
        {"gold": "4", "pred": "no idea", "form": "response"},
    ]
    cases.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ["rewards", "grade", str(cases), "--out", str(out), "--timeout", str(GENEROUS), "--num-workers", "1"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert capsys.readouterr().out == f"6 graded, 4 correct, 1 without an answer: {out}\n"
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert written == [
        row | {"correct": correct} for row, correct in zip(rows, [True, True, True, False, True, False], strict=True)
    ]
    for line, message in [
        ('{"gold": "1"}', "case 1: pred must be text or a number, got None"),
        ('{"gold": null, "pred": "1"}', "case 1: gold must be text or a number, got None"),
        ("3", "line 1: must be a JSON object, got int"),
        ('{"gold": "1", "pred": "1", "tolerance": "x"}', "case 1: tolerance must be a number, got 'x'"),
    ]:
        cases.write_text(line, encoding="utf-8")
        with pytest.raises(SystemExit, match="2"):
            main()
        assert f"error: {cases}, {message}" in capsys.readouterr().err
    cases.unlink()
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"error: {cases}: cannot be read (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        (" 22", True),
        ("17 + 5 = 22.", True),
        ("22 or 23", False),
        ("-22", False),
        ("no", False),
        ("2 2", False),
        ("022", True),
        ("9" * 5000, False),
    ],
)
def test_arithmetic_is_the_last_integer(text, correct):
    assert last_integer_equals(text, "22") == correct


def test_a_completion_that_was_cut_off_states_no_answer():
    pair = [completion("the answer is 4"), completion("the answer is 4")]
    pair[1].truncated = True
    assert score(["math"], pair) == [1.0, -1.0]


def test_a_completion_that_was_cut_off_earns_nothing_for_an_early_box():
    """Token-mean would reinforce all that follows it."""
    pair = [completion(r"\boxed{4}" + " and so on" * 3000) for _ in range(2)]
    pair[1].truncated = True
    assert score(["math"], pair) == [1.0, -1.0]
    assert score(["math"], pair, truncated_is_incorrect=False) == [1.0, 1.0]
    assert score(["arithmetic"], pair, incorrect=0.0) == [1.0, 1.0]  # others are not overruled


def test_scales_and_weights():
    pair = [completion("4"), completion("5")]
    assert score(["arithmetic"], pair) == [1.0, -1.0]
    assert score(["arithmetic"], pair, incorrect=0.0) == [1.0, 0.0]
    assert score(["arithmetic", "math"], pair, weights=[2.0, 0.5]) == [2.5, -2.5]


def test_a_user_function_is_called_as_trl_calls_it(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def length(prompts, completions, completion_ids, level, **columns):\n"
        "    assert sorted(columns) == ['answer'], columns\n"
        "    assert prompts == ['2+2?'] * 2 and completion_ids == [[6, 7]] * 2\n"
        "    return [None if l else float(len(c)) for c, l in zip(completions, level)]\n"
        "def chat(completions, **columns):\n"
        "    return [len(c[0]['content']) for c in completions if c[0]['role'] == 'assistant']\n"
        "def numpy(**columns):\n"
        "    import numpy\n"
        "    return numpy.array([1.0, 2.0], dtype=numpy.float32)\n"
        "value = 3\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert score(["my_rewards:length"], [completion("abc", level=0), completion("abc", level=1)]) == [3.0, None]
    messages = [{"role": "user", "content": "2+2?"}]
    assert score(["my_rewards:chat"], [completion("abcd", prompt=messages), completion("", prompt=messages)]) == [
        4.0,
        0.0,
    ]
    pair = [completion("a", completions="a column of the data"), completion("b", completions="")]
    assert score(["my_rewards:numpy"], pair) == [1.0, 2.0]
    (tmp_path / "broken_rewards.py").write_text("raise ValueError('two\\nlines')\n", encoding="utf-8")
    for path, message in [
        ("broken_rewards:f", r"cannot be imported \(ValueError: two lines\)"),
        ("my_rewards:nothing", "cannot be imported"),
        ("no_such_module:f", "cannot be imported"),
        ("my_rewards:value", "is a int, not a function"),
        ("maths", "use math, arithmetic or package.module:function"),
    ]:
        with pytest.raises(InputError, match=message):
            score([path], pair)


FAULTS = {
    "raises": ("raise ValueError('two\\nlines')", "raised ValueError: two lines"),
    "hangs": ("while True: pass", r"took longer than 2 s \(reward.function_timeout\)"),
    "hangs in C": ("import re; re.match('(a+)+b', 'a' * 50)", "took longer than 2 s"),
    "takes all memory": (
        "hoard = [bytearray(1 << 20) for _ in iter(int, 1)]",
        r"took more than 0.2 GiB \(reward.function_memory_gb\)",
    ),
    "starts a process that takes all memory": (
        "import subprocess; subprocess.run([sys.executable, '-c', 'x = [bytearray(1 << 20) for _ in iter(int, 1)]'])",
        r"took more than 0.2 GiB",
    ),
    "ends its process": ("os._exit(3)", "ended its process with status 3"),
    "exits": ("sys.exit(4)", "ended its process with status 4"),
    "is killed": ("os.kill(os.getpid(), 9)", "ended its process with status -9"),
    "too few": ("return [1.0]", "returned 1 values, not 2"),
    "no list": ("return 3", "returned 3, not a list"),
    "no numbers at all": ("return [sys, {}]", "returned no finite number"),
    "no numbers": ("return ['a', float('nan')]", "returned no finite number"),
    "out of range": ("return [1e31, -float('inf')]", "returned no finite number"),
}


@pytest.fixture
def user_function(tmp_path):
    """A function whose body is given, in a process of its own."""
    functions = []

    def make(body, max_failures=2, **limits):
        source = f"import os, sys, random, time\ndef f(completions, **columns):\n    {body}\n"
        (tmp_path / "faulty.py").write_text(source, encoding="utf-8")
        limits = {"timeout": 20.0, "memory_bytes": 1 << 30} | limits
        functions.append(UserFunction("faulty:f", max_failures=max_failures, **limits))
        return functions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        yield make
    for function in functions:
        function.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_function_that_fails_is_asked_twice_and_then_judges_nothing(user_function, caplog, fault):
    body, message = FAULTS[fault]
    function, pair = user_function(body), [completion("a"), completion("b")]
    function.sandbox.timeout = 2.0 if "hangs" in fault else GENEROUS
    function.sandbox.memory_bytes = int(0.2 * 2**30) if "memory" in fault else 1 << 30
    assert function(pair, 0) == [None, None]
    assert len(re.findall(f"reward.functions=faulty:f: {message}", caplog.text)) == 2
    function.sandbox.timeout, function.sandbox.memory_bytes = 20.0, 1 << 30
    function.close()  # a new process reads the mended file
    with open(sys.path[0] + "/faulty.py", "a", encoding="utf-8") as file:
        file.write("\ndef f(completions, **columns): return [1, True]\n")
    assert function(pair, 0) == [1.0, 1.0]


def test_what_a_function_started_ends_with_it(user_function, tmp_path):
    started = (
        "import subprocess; p = subprocess.Popen(['sleep', '1000']); open(__file__ + '.pid', 'a').write(f'{p.pid} ')"
    )
    function = user_function(f"{started}; time.sleep(1000)")
    function.sandbox.timeout = 2.0
    assert function([completion("a")], 0) == [None]
    pids = (tmp_path / "faulty.py.pid").read_text(encoding="utf-8").split()
    assert len(pids) == 2
    children = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(children, timeout=20)
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)


def test_a_function_that_fails_once_is_asked_again(user_function, tmp_path):
    body = "p = __file__ + '.x'; os.path.exists(p) or (open(p, 'w').close(), os._exit(1)); return [1.0, None]"
    assert user_function(body)([completion("a"), completion("b")], 0) == [1.0, None]


def test_a_notebooks_own_function(monkeypatch):
    """It, and what it uses, goes to the process as it is now."""
    names: dict = {"__name__": "__main__"}
    exec(
        "import math\nhalf = 0.5\ndef f(completions, **_): return [math.floor(len(c) * half) for c in completions]",
        names,
    )
    for name in ("f", "half", "math"):
        monkeypatch.setattr(sys.modules["__main__"], name, names[name], raising=False)
    assert score(["__main__:f"], [completion("abcd"), completion("a")]) == [2.0, 0.0]
    for name, message in (("g", "AttributeError"), ("lock", "TypeError: cannot pickle")):
        monkeypatch.setattr(sys.modules["__main__"], "lock", threading.Lock(), raising=False)
        with pytest.raises(InputError, match=f"reward.functions=__main__:{name}: cannot be imported \\({message}"):
            score([f"__main__:{name}"], [completion("a")])


def test_too_many_failures_in_a_row_end_the_run(user_function):
    function, pair = user_function("return [] if 'bad' in completions else [1.0, 2.0]"), [completion("a")] * 2
    bad = [completion("bad"), completion("a")]
    assert [function(batch, 0)[0] for batch in (bad, pair, bad)] == [None, 1.0, None]
    with pytest.raises(RunError, match=r"returned 0 values, not 2; it failed on 2 batches in a row \(reward.max_fail"):
        function(bad, 0)


def test_single_values_that_are_no_numbers_are_not_judged(user_function, caplog):
    function = user_function("return [float('nan'), 2]")
    assert function([completion("a"), completion("b")], 0) == [None, 2.0]
    assert "1 of 2 values are no finite numbers, their completions not judged" in caplog.text


def test_numbers_of_other_types(user_function):
    """They come back as Python's own: the trainer does not import the user's module, or numpy."""
    body = (
        "import enum, fractions, decimal; Own = enum.IntEnum('Own', 'one two'); Sub = type('Sub', (float,), {}); "
        "return [Own.two, fractions.Fraction(1, 4), decimal.Decimal('0.5'), Sub(3), sys]"
    )
    assert user_function(body)([completion("a")] * 5, 0) == [2.0, 0.25, 0.5, 3.0, None]


def test_a_functions_draws_follow_from_the_seed(user_function):
    body = "import numpy, torch; return [random.random() + numpy.random.rand() + torch.rand(()).item(), 0]"
    function, pair = user_function(body, timeout=120.0), [completion("a"), completion("b")]
    first = [function(pair, seed)[0] for seed in (1, 1, 2)]  # the first call imports numpy and torch
    assert first[1] != first[2]
    assert function(pair, 1)[0] == first[1]


def test_rows_may_lack_columns(user_function):
    function = user_function("return [float(x or -1) for x in columns['level']]")
    assert function([completion("a", level=3), completion("b")], 0) == [3.0, -1.0]


def test_a_functions_process_ends_with_its_parent(tmp_path):
    """Killed while the function hung."""
    (tmp_path / "slow.py").write_text("def f(**columns):\n    print('hangs', flush=True)\n    while True: pass\n")
    program = (
        "from stapo_lite.rewards import UserFunction\nfrom stapo_lite.types import Completion, Prompt\n"
        "f = UserFunction('slow:f', 5.0, 1 << 30, 1)\n"
        "f([Completion(Prompt('p', [1], 'a'), [1], [0.0], False, 0)], 0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    ) as parent:
        assert parent.stdout.readline() == "hangs\n"
        parent.kill()
        assert parent.stdout.read() == ""  # the worker, which writes there too, has ended


def test_soft_overlong_punishment_by_hand():
    shares = [overlong_share(length, max_completion_length=10, buffer=0.4) for length in (1, 6, 7, 8, 10)]
    assert shares == pytest.approx([0.0, 0.0, 0.25, 0.5, 1.0])
