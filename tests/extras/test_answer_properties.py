"""Properties of the comparison of answers: generated answers, and every gold of the benchmarks."""

import re
import time

import pytest
from helpers import shared_data
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stapo_lite.extras.math.answers import canonical, equivalent, final_answer, grade
from stapo_lite.files import read_lines

BENCHMARKS = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench_674")
COMMANDS = r"\lor \cup \to \in \le \quad \pm \cdot \sim \equiv \neq \Rightarrow \ldots \simeq \pmod"
SIGNS = r"\approx ≈ = / < + & | : ... - ~ ^ _ \; \% )( }{ }\boxed{ ,\! {,} \, ^\circ \times10^ e =x= , ;"  # noqa: E501
WORDS = (
    " or ",
    " and ",
    r"\text{ or }",
    " ",
    "\\\\ ",
    "\n",
    r"} or \boxed{",
    "$ $",
    r"\text{ cm}",
    " x = ",
    ", x=",
)
SEPARATORS = [*(f"{command} " for command in COMMANDS.split()), *SIGNS.split(), *WORDS]
INSIDE = r"""ANSWER; \{ANSWER\}; x = ANSWER; x\approx ANSWER; (ANSWER); [ANSWER]; x\in\{ANSWER\}; f(x)=ANSWER;
    \text{ANSWER}; \begin{cases}ANSWER\end{cases}; \text{between } ANSWER; \left\{ANSWER\right\}; \sqrt{ANSWER};
    \text{either }ANSWER"""  # noqa: E501
WRAPPERS = [f"\\boxed{{{inside.strip()}}}" for inside in INSIDE.split(";")]
WRAPPERS += ["The answer is $ANSWER$.", "answer: ANSWER", "ANSWER", "#### ANSWER"]
VALUES = r"0 1 2 7 12 107 1/2 0.25 \frac{1}{3} \sqrt{2} x 1e-8 2e-8 4.5e33 C A"
SEVERAL = st.lists(st.sampled_from(VALUES.split()), min_size=2, unique=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(WRAPPERS), st.sampled_from(SEPARATORS), SEVERAL)
@example("\\boxed{ANSWER}", "\\approx", [str(n) for n in range(108)])
@example("\\boxed{x = ANSWER}", "\\approx ", ["1", "2", "7"])
@example("\\boxed{\\{ANSWER\\}}", "≈", ["1", "2", "7"])
@example("\\boxed{ANSWER}", "=", ["1", "2", "7"])
@example("\\boxed{ANSWER}", "\\equiv ", ["0", "C", "12"])
def test_an_answer_of_several_values_is_not_right_for_several_golds(wrapper, separator, values):
    response = wrapper.replace("ANSWER", separator.join(values))
    assert (
        sum(grade(value, response, True, ordered=False, tolerance=0.0)[0] for value in values) <= 1
    ), response


def golds(name):
    multiple = {
        row["id"]
        for row in read_lines(shared_data("olympiadbench_meta"))
        if row["is_multiple_answer"]
    }
    return [
        (row["answer"], name != "math500" and row["id"] not in multiple)
        for row in read_lines(shared_data(name))
    ]


def rewrites(gold):
    spaced, fractions = re.sub(r"([=+,])", r" \1 ", gold), re.sub(r"\\[dt]?frac", r"\\dfrac", gold)
    yield from (gold, f" {gold}.", rf"\displaystyle {gold}", spaced, fractions)
    if "\\left" not in gold:
        yield gold.replace("(", r"\left( ").replace(")", r" \right)")
    if scientific := re.fullmatch(r"(-?[\d.]+)e(-?\d+)", gold):
        yield from (
            rf"{scientific[1]}{sign}10^{{{scientific[2]}}}" for sign in (r" \times ", r"\cdot")
        )
    if re.fullmatch(r"-?\d+", gold):
        yield from (f"{int(gold):,}", f"{gold}.0")


def perturbed(gold):
    position = next(
        (i for i, c in enumerate(gold) if c.isdigit() and "_{" not in gold[max(0, i - 2) : i]), None
    )
    if position is not None:
        yield gold[:position] + str((int(gold[position]) + 1) % 10) + gold[position + 1 :]
    last = next((i for i in reversed(range(len(gold))) if gold[i].isdigit()), None)
    if (
        last is not None and last != position and not re.search(r"mbox|text", gold)
    ):  # the power of a unit
        yield gold[:last] + str((int(gold[last]) + 9) % 10) + gold[last + 1 :]
    if re.fullmatch(r"[\d.]*[1-9][\d.]*", gold):
        yield f"-{gold}"
    yield f"{gold}, 7"


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_gold_matches_its_rewrites_and_no_perturbed_value(name, every):
    chosen = golds(name)[::every]
    read = [
        (g, final_answer(f"So it is $\\boxed{{{text}}}$.") or "", o)
        for g, o in chosen
        for text in rewrites(g)
    ]
    missed = [
        (gold, answer)
        for gold, answer, ordered in read
        if not equivalent(gold, answer, ordered=ordered)
    ]
    taken = [
        (g, text)
        for g, ordered in chosen
        for text in perturbed(g)
        if equivalent(g, text, ordered=ordered)
    ]
    assert (missed, taken) == ([], [])


HOSTILE = [
    "{" * 20_000,
    "(" * 20_000,
    " " * 20_000,
    r"\boxed{" * 3000,
    "5" + r" \text{a}" * 30 + "!x",
]
HOSTILE += ["answer is a " * 500, "the answer is" + " " * 4000, "答案是很多的字" * 600]
HOSTILE += ["The answer is the answer is " * 150, r"\boxed{1}" + "\n" * 3000 + r"! \boxed{2}"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_read_quickly(text):
    started = time.process_time()
    assert not equivalent("5", text)
    assert not equivalent(text, "5")
    final_answer(text)
    canonical(text)
    assert time.process_time() - started < 5
