"""Properties of grading: answers of several values, hostile text, and the golds of benchmarks."""

import itertools
import random
import re
import time

import pytest
from helpers import shared_data

from stapo_lite.extras.math.answers import final_answer, grade
from stapo_lite.extras.math.grading import MathGrader, Question
from stapo_lite.files import read_lines

BENCHMARKS = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench_674")
VALUES = ["0", "1", "7", "107", "1/2", r"\frac{1}{3}", r"\sqrt{2}", "x", "1e-8", "4.5e33", "C", "A"]
SEPARATORS = r""", | or |; | and | = |<|\approx |\lor |\cup |\to |\in |\le |\quad |\pm |\cdot |:
    |\sim |_|\neq |\Rightarrow |\ldots | + | & |\\ |/|-|\; |\%|\text{ or }|} or \boxed{| x = | """
WRAPPERS = r"""\boxed{#}|\boxed{\{#\}}|\boxed{x = #}|\boxed{(#)}|\boxed{x\in\{#\}}|\boxed{f(x)=#}|#
    |\boxed{\text{#}}|\boxed{\text{either }#}|The answer is $#$.|answer: #|<answer>#</answer>"""


@pytest.mark.parametrize("wrapper", WRAPPERS.split("|"))
def test_an_answer_of_several_values_is_right_for_at_most_one_of_them(wrapper):
    draw = random.Random(wrapper)
    for separator in SEPARATORS.split("|"):
        values = draw.sample(VALUES, 3)
        response = wrapper.replace("#", separator.join(values))
        right = [value for value in values if grade(value, response, True, False, 0.0)[0]]
        assert len(right) <= 1, (response, right)


def rewrites(gold):
    yield from (gold, f" {gold}.", rf"\displaystyle {gold}", re.sub("([=+])", r" \1 ", gold))
    yield re.sub(r"\\[dt]?frac", r"\\dfrac", gold)
    if re.fullmatch(r"-?\d+", gold):
        yield from (f"{int(gold):,}", f"{gold}.0")


def perturbed(gold):
    yield f"{gold}, 7"
    for digit in list(re.finditer(r"(?<!_\{)(?<!_)\d", re.split("mbox|text", gold)[0]))[:1]:
        yield gold[: digit.start()] + str((int(digit[0]) + 1) % 10) + gold[digit.end() :]


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_gold_equals_its_rewrites_and_neither_perturbed_values_nor_other_golds(name, every):
    golds = [str(row["answer"]) for row in read_lines(shared_data(name))][::every]
    pairs = [(gold, text, True) for gold in golds for text in rewrites(gold)]
    pairs += [(gold, text, False) for gold in golds for text in perturbed(gold)]
    distinct = {re.sub(r"[\s$]|\\[dt]?frac", "", gold): gold for gold in golds}.values()
    pairs += [(a, b, False) for a, b in itertools.pairwise(distinct)]
    grader = MathGrader(timeout=20.0, num_workers=1)
    verdicts = grader.grade([Question(gold, rf"\boxed{{{text}}}") for gold, text, _ in pairs])
    grader.close()
    assert [
        pair for pair, (right, _) in zip(pairs, verdicts, strict=True) if right != pair[2]
    ] == []


HOSTILE = ["{" * 20_000, "(" * 20_000, " " * 20_000, r"\boxed{" * 3000, "answer is a " * 500]
HOSTILE += ["1, " * 9000, r"5 \text{a}" + r" \text{a}" * 30 + "!x", "答案是很多的字" * 600]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_read_quickly(text):
    started = time.process_time()
    final_answer(text)
    grade("5", f"<answer>{text[:200]}</answer>", True, False, 0.0)
    assert time.process_time() - started < 3
