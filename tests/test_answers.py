import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stapo_lite.answers import canonical, equivalent, final_answer, grade
from stapo_lite.rewards import _case

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
BENCHMARKS = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench_674")


def read(name):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} of the shared benchmark data is not here")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {3}", "3"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"it is \boxed{41}. No, \boxed{42}", "42"),
        (r"first \boxed{5}, no: \boxed{4}", "4"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{7}, so \boxed{7}", "7"),
        (r"\boxed{\frac12} or \boxed{0.5}", r"\frac12, 0.5"),
        (r"\boxed{5} \boxed{}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"Put it in \boxed{}. The answer is 5.", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{f(x)=\left\{x\right.}", r"f(x)=\left\{x\right."),
        ("the answer is\n$$\n\\frac34\n$$", r"\frac34"),
        ("The answer is (1, 2).", "(1, 2)"),
        ("Answer: B", "B"),
        ("the answer is 4.5e3", "4.5e3"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
        ("The answer is that x is even and it is 4.", "4"),
        (r"$\boxed{-2}$ and $\boxed{1}$.", "-2, 1"),
        (r"\(x_1 = \boxed{3}\), \quad \(x_2 = \boxed{4}\)", "3, 4"),
        (r"\boxed{3} \text{ or } \boxed{4}", "3, 4"),
        ("The total is 15 and the final answer is 12.", "12"),
        ("So the cost is $1,000.99 in all, done.", "1000.99"),
        ("#### 7,425", "7425"),
        ("**Answer:** $x = 5$", "x = 5"),
        ("总共有99颗弹珠", "99"),
        ("3/4", "3/4"),
        (r"<think>\boxed{3}, or</think> it is \boxed{4}", "4"),
        (r"reasoning </think> the answer is 4", "4"),
        (r"<think>\boxed{4}</think>", None),
        (r"<think> so \boxed{4}, and now I check", None),
        ("I do not know", None),
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_the_final_answer(response, answer):
    assert final_answer(response) == answer


EQUAL = [
    ("48 / 2 = <<48/2=24>>24 clips in May,\n48 + 24 = 72 in all.\n#### 72", "72"),
    ("#### 1,000", "1000"),
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("4.5e33", r"4.5\cdot10^{33} \mathrm{~erg} / \mathrm{s}"),
    ("1e-5", "0.00001"),
    ("2.7778e-6", "2.7778*10^-6"),
    ("-3./2", r"-\frac{3}{2}"),
    ("np.arcsin(10/13)", r"\arcsin\left(\frac{10}{13}\right)"),
    ("52_8", r"52_{8}"),
    (r"\frac 59", r"\dfrac{5}{9}"),
    (r"1\frac{4}{5}", "1.8"),
    (r"\frac{1}{12}", "0.0833333333333333"),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    (r"\$32,\!348", "32348"),
    ("10,\\!080", "10{,}080"),
    (r"28\%", "28"),
    (r"28\%", "0.28"),
    (r"90^\circ", "90"),
    (r"864 \mbox{ inches}^2", "864"),
    ("5.4", r"5.4 \text{ cents}"),
    ("45", "45 minutes"),
    (r"\text{Evelyn}", "evelyn."),
    (r"\text{(C)}", "C"),
    ("x=5", "5"),
    ("1/3", r"x = \frac{1}{3} \approx 0.33"),
    (r"k \geqslant 2", r"2 \le k"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("-2 < x < 7", "(-2,7)"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"\{1,2,3\}", r"\{3,1,2\}"),
    ("1 or 2", "2 and 1"),
    ("(1,1), (3,2)", "(3,2),(1,1)"),
    ("a=1, b=2", "b=2, a=1"),
    ("(p,q)=(3,2)", "(3,2)"),
    ("f(x)=2x", "2x"),
    ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix} -\frac13 \\ \frac23 \end{bmatrix}"),
    (r"\frac{K-1}{L}", "(K-1)/L"),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{E_1+2E_2}{3}"),
    (r"m \frac{d v}{d t}+b v=f", r"b v + m\frac{dv}{dt} = f"),
    ("1 000 000", "1,000,000"),
    (r"\frac1m t", r"\frac tm"),
    (r"\frac1{\sqrt2}c", r"\frac c{\sqrt2}"),
    ("a + b + c", "c+b+a"),
    ("1 - t", "-t+1"),
    (r"-8-8 \sqrt{3} i", r"-8-8i\sqrt3"),
    (r"\frac{e^{2 i t}}{(2+2 i)}", r"\frac{e^{2it}}{2+2i}"),
    (r"\frac{e^{2 i t}}{(2+2 i)}", r"\frac{1-i}{4}e^{2it}"),
    (r"\frac{a M^{1 / 3}}{G M^{2 / 3}+b}", r"\frac{aM^{1/3}}{GM^{2/3}+b}"),
    (r"y^{\prime}+r y-r x(t)=0", "y' + ry - r x(t) = 0"),
    (r"(5,\infty)", "x>5"),
    (r"(-\infty,0]", r"x\le0"),
    (r"x \in [-2,7]", r"-2\le x\le7"),
    (r"137 \frac12", "137 1/2"),
    ("9.81", r"9.81 \, \mathrm{m/s^{2}}"),
    ("5", r"5 \mathrm{~W~m^{-2}}"),
    ("3.3e12", r"3.3 \times 10^{12} \mathrm{erg\ s^{-1}}"),
    ("1.6", "1.6cm"),
    ("1.04e-3", "1.04 x 10^-3"),
    ("f(n)=n", r"f(n)=n \text{ for all } n \in \mathbb{N}"),
    ("f(n)=n", r"f(n)=n, \forall n"),
    ("125", "125 miles"),
    ("125 miles", "125"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[4pt]2\end{pmatrix}"),
    (
        r"\frac{2-\omega^{2}-\omega i / 4}{\omega^{4}-\frac{63}{16} \omega^{2}+4}",
        r"\frac{2-\omega^2-\frac{i\omega}{4}}{4-\frac{63}{16}\omega^2+\omega^4}",
    ),
    (r"\hbar \omega(v+1 / 2)", r"\hbar\omega(v+\frac12)"),
    (r"1+\sqrt{3} i", r"1+i\sqrt{3}"),
    (r"\ln 2 + i\pi / 3", r"\ln 2+\frac{i\pi}{3}"),
    ("2+3i", "3i+2"),
    ("310", "310 K"),
    ("4.5e33", "4.5e33 erg/s"),
    ("10", "10 m/s^2"),
    (r"\frac{2\pi}{3}", r"2/3 \pi"),
    (r"2\pi k", r"2k\pi, k \in \mathbb{Z}"),
    ("5", r"\approx 5"),
]
DIFFERENT = [
    ("48 / 2 = <<48/2=24>>24 clips in May,\n48 + 24 = 72 in all.\n#### 72", "24"),
    ("4.5e33", "4.6e33"),
    ("4.5e33", "4.5e32"),
    ("1e-8", "2e-8"),
    ("0.0000001", "0.0000002"),
    ("52_8", "52_9"),
    ("52_8", "52"),
    ("np.arcsin(10/13)", r"\arcsin(11/13)"),
    ("3986729", "3986730"),
    ("16386.20", "16386.21"),
    (r"\frac{1}{3}", "0.33"),
    (r"2^{1009}", r"2^{1009}+1"),
    ("28/100", "28"),
    (r"28\%", r"0.28\%"),
    ("1,1,2", "1,2"),
    ("7", "7, 7"),
    ("(1,2)", "(2,1)"),
    ("(3,4]", "(3,4)"),
    (r"\pm 2021", "2021"),
    ("32349", "32, 349"),
    ("x=5", "6"),
    ("a=1, b=2", "a=2, b=1"),
    ("a^2 + b = 0", "0"),
    ("12:00", "1:00"),
    (r"\text{even}", r"\text{odd}"),
    ("E", r"\mathrm{E}*2"),
    ("C", "(B) 12"),
    ("N=n", "N=n+1"),
    (r"m \frac{d v}{d t}+b v=f", r"m \frac{d w}{d t}+b v=f"),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{1}{4} E_{1}+\frac{2}{3} E_{2}"),
    (r"m_{p} c^{2}\left(\gamma^{2}-1\right)", r"m_{p} c^{2}\gamma^{2}"),
    (r"(-\infty, 0]", r"(\infty, 0]"),
    (r"\frac{25}{2}R", r"\frac{25}{2}r"),
    ("42", "41 or 42"),
    ("1.6", "1.64"),
    ("x + 5", "x + 5 m"),
    ("D = (0, 1)", "D = (0, 1.5)"),
    (r"\frac{1}{3}", "0.333"),
    ("-5", "5"),
    (r"\frac{1}{2}", r"-\frac{1}{2}"),
    (r"\frac{E_1}{2}", r"\frac{e_1}{2}"),
    (r"\frac{1}{\sqrt2}c", r"\frac1{\sqrt2}"),
    (r"\frac1m t", r"\frac1m"),
    ("2ab", "2"),
    (r"2\pi r h", r"2\pi r"),
    ("c_1+c_2 t", "c_1+c_2"),
    ("kT", "kt"),
    ("mR^2", "mr^2"),
    ("f'", "f"),
    ("y'+ry=0", "y+ry=0"),
    ("$6m$", "6"),
    ("2a+3h", "2a+3"),
    ("4h^2", "4"),
    ("5m", "5"),
    ("2 xyz", "2"),
    (r"\frac12 abc", r"\frac12"),
    ("8/9", "4 4/9"),
    ("(2,251,252)", "2251252"),
    ("(1,234)", "1234"),
    ("(1,5)", "1.5"),
    ("142857", "1000000/7"),
    ("333333", r"\frac{1000000}3"),
    (r"x\in[-2,7]", "-2,7"),
    ("1,2", "(1,2]"),
    (r"\frac{37}{4} m", r"\frac{37}{4}"),
    ("16", "32/3"),
    ("C", "(C) (D)"),
    ("11/2", "1 1/2"),
    ("56", "5 6"),
    ("12", r"1\,2"),
    (r"\frac12", "0.5000001"),
    ("10^{7}", "10000001.0"),
    ("2^{20}", "1048577.0"),
    ("2", "2x"),
    ("42", ""),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold, answer):
    assert equivalent(gold, answer)
    assert equivalent(gold, f"${answer}$." if "$" not in answer else answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold, answer):
    assert not equivalent(gold, answer)


def test_what_the_answer_type_decides():
    assert equivalent("1,3,5", "5, 1, 3", ordered=False)
    assert not equivalent("16,3,1,1", "16,3,1", ordered=False)
    assert not equivalent("1,1,2", "1,2,2", ordered=False)
    assert not equivalent("(1,2)", "(2,1)", ordered=False)
    assert equivalent("10, 4, -2", "4, 10, -2")
    assert not equivalent("10, 4, -2", "4, 10, -2", ordered=True)
    assert not equivalent("(1,2), 5, 3", "(1,2), 3, 5", ordered=True)


def test_tolerance_is_absolute():
    assert equivalent("4.2", "4.15", tolerance=0.1)
    assert not equivalent("4.2", "4.35", tolerance=0.1)
    assert equivalent("1.68,0.45", "0.46, 1.7", ordered=False, tolerance=0.02)
    assert equivalent("3.1", r"\pi", tolerance=0.05)
    assert not equivalent("3.1", r"\pi", tolerance=0.04)


def test_one_spelling_for_votes():
    assert {canonical(text) for text in (r"\dfrac12", "1/2", "0.5", r"$\frac{1}{2}$.", ".50")} == {"1/2"}
    assert canonical(r"x^{2} + 1") == canonical("x^2+1") != canonical("x^2+2")


def test_cases_of_other_projects_own_suites():
    """The labels that begin with `policy` are choices (docs/grading.md), and so is the order of a plain list."""
    agreed = total = 0
    for case in read("verify_cases"):
        correct, _ = grade(**asdict(_case(case, "")))
        if not case.get("note", "").startswith("policy"):
            total += 1
            agreed += correct == case["equal"]
            ordered = case.get("note") == "order-sensitive list semantics"
            assert case["equal"] or not correct or ordered, f"false positive: {case}"
    assert agreed >= 0.985 * total


def join(wrapper, separator, values):
    return wrapper.replace("ANSWER", separator.join(values))


SEPARATORS = [
    *(
        "\\approx",
        "≈",
        "=",
        ", ",
        " or ",
        " and ",
        "\\text{ or }",
        "/",
        "\\lor ",
        "\\cup ",
        "\\to ",
        "\\in ",
        "\\le ",
        "<",
    ),
    *(
        "; ",
        " ",
        "\\quad ",
        "\\pm ",
        "\\cdot ",
        "+",
        "\\\\ ",
        "&",
        "|",
        ":",
        "\\sim ",
        "\\equiv ",
        "\\neq ",
        "\\Rightarrow ",
    ),
    *(
        "\\ldots ",
        "...",
        "-",
        "~",
        "\\simeq ",
        "\\;",
        "\n",
        "^",
        "_",
        "\\%",
        ")(",
        "}{",
        "}\\boxed{",
        "} or \\boxed{",
        "$ $",
    ),
    *(
        ",\\!",
        "{,}",
        "\\,",
        "\\text{ cm}",
        "^\\circ",
        "\\times 10^",
        "e",
        " x = ",
        "=x=",
        " \\approx x ",
        ", x=",
        "\\pmod ",
    ),
]
WRAPPERS = [
    *(
        "\\boxed{ANSWER}",
        "\\boxed{\\{ANSWER\\}}",
        "\\boxed{x = ANSWER}",
        "\\boxed{x\\approx ANSWER}",
        "\\boxed{(ANSWER)}",
    ),
    *(
        "\\boxed{[ANSWER]}",
        "The answer is $ANSWER$.",
        "\\boxed{x\\in\\{ANSWER\\}}",
        "answer: ANSWER",
        "\\boxed{f(x)=ANSWER}",
    ),
    *(
        "\\boxed{\\text{ANSWER}}",
        "\\boxed{\\begin{cases}ANSWER\\end{cases}}",
        "\\boxed{\\text{between } ANSWER}",
        "ANSWER",
    ),
    *("\\boxed{\\left\\{ANSWER\\right\\}}", "\\boxed{\\sqrt{ANSWER}}", "\\boxed{\\text{either }ANSWER}", "#### ANSWER"),
]
VALUES = [
    "0",
    "1",
    "2",
    "7",
    "12",
    "107",
    "1/2",
    "0.25",
    "\\frac{1}{3}",
    "\\sqrt{2}",
    "x",
    "1e-8",
    "2e-8",
    "4.5e33",
    "C",
    "A",
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(WRAPPERS), st.sampled_from(SEPARATORS), st.lists(st.sampled_from(VALUES), min_size=2, unique=True)
)
@example("\\boxed{ANSWER}", "\\approx", [str(n) for n in range(108)])
@example("\\boxed{x = ANSWER}", "\\approx ", ["1", "2", "7"])
@example("\\boxed{\\{ANSWER\\}}", "≈", ["1", "2", "7"])
@example("\\boxed{ANSWER}", "=", ["1", "2", "7"])
@example("\\boxed{ANSWER}", "\\equiv ", ["0", "C", "12"])
def test_what_names_several_values_is_not_right_for_several_golds(wrapper, separator, values):
    response = join(wrapper, separator, values)
    assert sum(grade(value, response, True, ordered=False, tolerance=0.0)[0] for value in values) <= 1, response


@pytest.mark.parametrize("tiny", ["2.88e-19", "1e-8"])
def test_small_values_are_not_all_alike(tiny):
    """math-verify rounds to six decimals."""
    for answer in ("0", "x = 0", "3e-7", "0.0000001", r"\lambda \approx 4 \times 10^{-9} \text{ m}"):
        assert not equivalent(tiny, answer)


def golds(name):
    multiple = {row["id"] for row in read("olympiadbench_meta") if row["is_multiple_answer"]}
    return [(row["answer"], name != "math500" and row["id"] not in multiple) for row in read(name)]


def rewrites(gold):
    scientific = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", gold)
    yield gold
    yield f" {gold}."
    yield rf"\displaystyle {gold}"
    yield re.sub(r"([=+,])", r" \1 ", gold)
    yield re.sub(r"\\[dt]?frac", r"\\dfrac", gold)
    if "\\left" not in gold:
        yield gold.replace("(", r"\left( ").replace(")", r" \right)")
    if scientific:
        yield rf"{scientific[1]} \times 10^{{{scientific[2]}}}"
        yield rf"{scientific[1]}\cdot10^{{{scientific[2]}}}"
    if re.fullmatch(r"-?\d{4,}", gold):
        yield f"{int(gold):,}"
    if re.fullmatch(r"-?\d+", gold):
        yield f"{gold}.0"


def perturbed(gold):
    """Other digits, signs and powers."""
    position = next((i for i, c in enumerate(gold) if c.isdigit() and "_{" not in gold[max(0, i - 2) : i]), None)
    if position is not None:
        yield gold[:position] + str((int(gold[position]) + 1) % 10) + gold[position + 1 :]
    last = next((i for i in reversed(range(len(gold))) if gold[i].isdigit()), None)
    if last is not None and last != position and not re.search(r"mbox|text", gold):  # the power of a unit
        yield gold[:last] + str((int(gold[last]) + 9) % 10) + gold[last + 1 :]
    if re.fullmatch(r"[\d.]*[1-9][\d.]*", gold):
        yield f"-{gold}"
    yield f"{gold}, 7"


every = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])


@every
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_gold_matches_itself_and_its_rewrites(name, every):
    wrong = [
        (gold, text)
        for gold, ordered in golds(name)[::every]
        for text in rewrites(gold)
        if not equivalent(gold, final_answer(f"So it is $\\boxed{{{text}}}$.") or "", ordered=ordered)
    ]
    assert not wrong


@every
@pytest.mark.parametrize("name", BENCHMARKS)
def test_no_gold_matches_a_perturbed_value(name, every):
    wrong = [
        (gold, text)
        for gold, ordered in golds(name)[::every]
        for text in perturbed(gold)
        if equivalent(gold, text, ordered=ordered)
    ]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        *("{" * 20_000, "(" * 20_000, " " * 20_000, r"\boxed{" * 3000, "5" + r" \text{a}" * 30 + "!x"),
        *(
            "answer is a " * 500,
            "the answer is" + " " * 4000,
            "答案是很多的字" * 600,
            "The answer is the answer is " * 150,
        ),
        r"\boxed{1}" + "\n" * 3000 + r"! \boxed{2}",
    ],
)
def test_hostile_text_is_read_quickly(text):
    """What is slow all the same ends with its worker."""
    started = time.monotonic()
    assert not equivalent("5", text)
    assert not equivalent(text, "5")
    final_answer(text)
    canonical(text)
    assert time.monotonic() - started < 5
