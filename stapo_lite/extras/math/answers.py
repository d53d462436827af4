r"""Final answers: find one in a response, and compare two. A thin layer over math-verify.

Added to math-verify, for answers of real benchmarks that it misjudges (docs/grading.md):

- the answer is the last box or `<answer>`, and nothing inside <think>;
- plain numbers are compared as fractions, and exact values exactly: math-verify reads e-notation
  (Minerva) as a product with Euler's number, and rounds to six decimals;
- lists are compared part by part, in order if the benchmark says so;
- words, choices and numbers with a base (`52_8`, MATH500) are compared literally;
- capitals and derivatives are symbols of their own, and only words after a number are units.

`rules.py` brings both answers to one spelling first. Time limits are up to the caller
(`grading.py`): sympy may never finish.
"""

import logging
import re
from itertools import product
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Rational, nsimplify, sympify

from stapo_lite.extras.math.rules import NUMBERS, SYMBOLS, normalise, rewrite

TAIL = 4000
"""Characters at the end of a response that are searched for an answer without a box."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs what it cannot parse


def grade(
    gold: Any, response: str, finished: bool, ordered: bool, tolerance: float
) -> tuple[bool, str | None]:
    """Whether a response is right, and its final answer as written (None if it has none). The
    arguments are those of `final_answer` and `equivalent`."""
    answer = final_answer(response, finished)
    if answer is None:
        return False, None
    return equivalent(gold, answer, ordered, tolerance), answer


def _nested(plain: str, opening: str, closing: str) -> str:
    """A pattern of text in which brackets are closed, up to ten levels deep."""
    pattern = f"(?:{plain})*+"
    for _ in range(10):
        pattern = f"(?:{plain}|{opening}{pattern}{closing})*+"
    return pattern


# Patterns that find the final answer.

_THOUGHT = re.compile(
    r"(?is)^.*[<\[]/(?:think|reason|thought)\w*[>\]]|[<\[](?:think|reason|thought)\w*[>\]].*"
)
"""All up to the last `</think>`, or from a `<think>` that is never closed."""
_TAGGED = re.compile(r"(?is)<((?:final_?)?answer|solution)>\s*(\S.*?)\s*</\1>")
_BRACES = _nested(r"[^{}\\]|\\[\s\S]", r"\{", r"\}")
_BOX = re.compile(rf"(?:\\?\b(?:boxed|fbox)\s*\{{\s*)++(?!\}})({_BRACES})\}}")
_GAP = re.compile(
    r"(?:[^.!?:\n]{0,40}?\b(?:and|or)\b)?(?:\\q?quad|\\text\s*\{|[\s$,;&()\[\]{}\\])*"
    r"(?:[a-zA-Z]\w*(?:_\{\w+\})?\s*=\s*)?"
)
"""What may stand between two boxes of one list."""

# Patterns that find an answer without a box or tags. They are verbose: a space is `\ `.

_NUMERAL = (
    r"[-+]?(?:\\frac\{[^{}]*\}\{[^{}]*\}|[$€£]?(?:\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|"
    r"\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?:\ *(?:\\?%|percent|pct))?)"
)
_FORMULA = rf"""(?:
    \$\$.+?\$\$ | \\\[.+?\\\] | \\\(.+?\\\) | \$(?!\d[\d,.]*\ [a-z]{{2}})[^$\n]+\$
    | (?<![a-zA-Z])[(\[][^()\[\]\n]*,[^()\[\]\n]*[)\]] | \([A-J]\) | (?<=\n\n)[A-E](?=\.?\s*\Z)
    | (?<![a-zA-Z\d.]){_NUMERAL}(?:\ *[-+*/^×÷=≈]\ *{_NUMERAL})*
)"""  # noqa: RUF001
"""A formula, number, tuple or choice in a text. `$5 for` is money, and opens no formula. A letter
in brackets is a choice, and so is one that is the whole last paragraph."""
_VALUES = rf"{_FORMULA}(?:\ *(?:,\ *(?:and|or)?|and|or)\ *(?:[a-zA-Z]\w{{,3}}\ *=\ *)?{_FORMULA})*"
"""One of them, or a list."""
_ANNOUNCEMENT = (
    r"(?:\b(?i:answer|(?:correct|right|best)\ (?:option|choice))s?\b"
    r"(?:[a-z\ ]{0,40}?\b(?:is|are)\b|\W*:):?|<(?i:answer|solution)>|\#{4}(?!\s*\d+[.)]\s))"
)
"""`The answer is`, `**Answer:`, `<answer>` or `####` (GSM8K), but not the heading `#### 2. `."""
_KEPT = r"(?!.*\bWait\b)(?!\s*(?:indeed\s)?(?:correct|helpful|wrong)\b)"
"""No `Wait` follows, which takes the answer back, and it is not about an answer: `is correct`."""
_SHORT = r"(\$\$.+?\$\$|\\\[.+?\\\]|\S(?:(?!\b[a-zA-Z]{2,}(?:\s+[a-zA-Z]{2,}){2})[^\n])*?)"
"""A displayed formula, or text without three words in a row."""
_END = (
    r"(?=\.?\s*(?:\n|$)|\.\s|I\ hope|<[|/]|\s\((?:[a-z]{3}|\d+\\?%)"
    r"|,?\s(?:not|since|because|as|so|which|where)\b)"
)
_STATED = re.compile(
    rf"(?sx).*{_ANNOUNCEMENT}{_KEPT}[\s*]*(?:(?:indeed|definitely|therefore|thus)\s+)?"
    rf"(?:{_SHORT}{_END}|(?:[^\n]{{0,100}}(?:\bis|\bare|=)\s+)?({_VALUES}))"
)
"""The last statement of an answer: what is announced is short, or a value in a longer sentence."""


def final_answer(response: str, finished: bool = True) -> str | None:
    r"""The final answer of a response, as written; None if there is none.

    Args:
        finished: False for a response that was cut off: only a box or `<answer>` counts.
    """
    text = _THOUGHT.sub("", response)
    tags = list(_TAGGED.finditer(text))
    if tags:
        text = f"Answer: {tags[-1][2]}"
        finished = True
    box = _last_box(text)
    if box or not finished:
        return box
    tail = text[-TAIL:]
    if statement := _STATED.match(tail):
        return statement[1] or statement[2]
    values = re.findall(f"(?sx){_VALUES}", tail)
    return values[-1] if values else None


def _last_box(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, the innermost of nested ones.
    Boxes that form a list (`\boxed{1} and \boxed{2}`) are joined."""
    contents: list[str] = []
    end = 0
    for box in _BOX.finditer(text):
        if not _GAP.fullmatch(text, end, box.start()):
            contents = []
        contents.append(box[1])
        end = box.end()
    return ", ".join(dict.fromkeys(contents)) or None


# Patterns that compare two answers in normal spelling.

_BRACKETS = _nested(r"[^()\[\]{}]", r"[(\[{]", r"[)\]}]")
_PART = re.compile(
    rf"""(?x)(?=\S)(?:
        (?<![\d,])\d{{1,3}}(?:,\d{{3}})+(?!,?\d)  # 1,234
        | [^,;()\[\]{{}}] | [(\[{{]{_BRACKETS}[)\]}}] | [()\[\]{{}}]
    )+(?<=\S)"""
)
"""A part of a list: text without commas and semicolons, but for those in brackets and numbers."""
_TUPLES = re.compile(r"([(\[])([^()\[\]\n]*;[^()\[\]\n]*)([)\]])\n\1(.*)\3")
"""Two tuples or intervals with the same brackets, one on each line, with semicolons for commas."""
_LABEL = re.compile(r"^\s*[a-zA-Z](?:_\w|_\{[^{}]*\})?(?:\([^()=]*\))?\s*=(?=[^=]*$)")
"""`x =`, `x_1 =` or `f(x) =`."""
_MODULUS = re.compile(r"\s*(?:\\text\{\s*)?\(?\\?[pb]?mod\b.*")
_LITERAL = re.compile(
    r"(?![ei])[a-zA-Z]|[A-Z][A-Za-z]{2,}|(?i:yes|no|[a-z]{4,})|-?[0-9A-Z]+_(?:\d|\{\d+\})"
)
"""A letter, a word, or a number with a base. `e` and `i` are numbers."""
_CASED = re.compile("[eEk-zK-Z]")
"""A letter that is a symbol: `m` is not `M`. The others may be choices: `b` is `B`."""
_NUMBER = re.compile(r"[+-]?(?:(?:\d+ -?)?\d+/0*[1-9]\d*|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)")
"""`-3/4`, `1 1/2`, `.5` or `1.5e-3`, which Python's fractions can read."""
_DECIMAL = re.compile(r"[^.]*?(?<![\d.])(?=[0.]*[1-9](?:\.?\d){5})\d*\.(\d+)[^.]*")
"""Two answers with one decimal, which has six or more significant digits."""
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}[\s,]+[a-zA-Z]{2,}|(?<![_^\d])\d+\s+\d")
"""Two words or two numbers in a row, which math-verify would multiply."""
# Without its `units`, which takes the `t` of `2t` for tonnes.
_BOXED = LatexExtractionConfig(
    try_extract_without_anchor=True,
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(malformed_operators=True, nits=True),
)


def equivalent(gold: Any, answer: str, ordered: bool = False, tolerance: float = 0.0) -> bool:
    r"""Whether an answer equals the gold.

    Args:
        gold: text or number; may be a whole solution, with a \boxed{} or ending in `#### 72` as in
            GSM8K, or in tags.
        answer: as `final_answer` returns it.
        ordered: whether the order of a plain list counts (`1, 2`). It always does in tuples.
        tolerance: absolute difference up to which numbers are equal.
    """
    return _equal(_reference(gold), normalise(answer), ordered, Rational(tolerance))


def _reference(gold: Any) -> str:
    """The answer of a gold in normal spelling."""
    text = str(gold)
    if _TAGGED.search(text) or re.search(r"\\f?box|####|answer is", text):
        text = final_answer(text) or text
    return normalise(text)


def _parts(text: str) -> list[str]:
    """The parts of a list. They are separated by commas, semicolons and `or` outside brackets."""
    return _PART.findall(text.replace("¦", ","))


def _equal(gold: str, answer: str, ordered: bool, tolerance: Rational) -> bool:
    """Whether two answers in normal spelling are equal. `ordered` and `tolerance` as for
    `equivalent`."""
    golds = _parts(gold)
    answers = _parts(answer)
    if len(golds) == 1 and "¦" in answer:
        if "\\cup" in gold:  # `x < 2 or x > 3` has a part for each interval
            golds = _parts(gold.replace("\\cup", ","))
        else:  # `3/4, or 75 %` says it twice
            golds *= len(answers)
    if len(golds) != len(answers):
        if "(" not in (gold[:1], answer[:1]):
            return False
        return _equal(gold.strip("()"), answer.strip("()"), True, tolerance)  # (1, 2) for 1, 2
    for part in golds:
        candidates = answers[:1] if ordered else answers
        match = next((each for each in candidates if _same(part, each, tolerance)), None)
        if match is None:
            return False
        answers.remove(match)
    return True


def _same(gold: str, answer: str, tolerance: Rational) -> bool:
    """Whether two answers that are no lists are equal."""
    # In a tuple, 1,234 has two entries.
    if tuples := _TUPLES.fullmatch(f"{gold}\n{answer}".replace(",", ";")):
        return _equal(tuples[2], tuples[4], True, tolerance)
    gold, answer = _without_labels(gold, answer)
    if "\n" in gold + answer:  # a choice with its value
        readings = product(gold.split("\n"), answer.split("\n"))
        return any(_same(*reading, tolerance) for reading in readings)
    gold_text = _bare(gold)
    answer_text = _bare(answer)
    if gold_text == answer_text:
        return True
    if _LITERAL.fullmatch(gold_text) or _LITERAL.fullmatch(answer_text):
        same = gold_text.casefold() == answer_text.casefold()
        return same and not _CASED.fullmatch(gold_text)
    if "%" in (gold[-1:], answer[-1:]) and _same(gold.rstrip("% "), answer.rstrip("% "), tolerance):
        return True  # 17.5 % is 17.5 here, and 0.175 below
    return _same_value(gold, answer, tolerance)


def _without_labels(gold: str, answer: str) -> tuple[str, str]:
    """Remove what only one of two answers says: `x =`, or `(mod 11)`."""
    if "=" not in gold:
        answer = re.split(r"(?<![<>!])=|\\equiv", answer)[-1]
    elif "=" not in answer:
        gold = _LABEL.sub("", gold)
    if "mod" not in gold:
        answer = _MODULUS.sub("", answer)
    return gold, answer


def _bare(text: str) -> str:
    """Remove markup that shows nothing, for a literal comparison; `1 1/2` is not `11/2`."""
    return re.sub(r"\\text\{([^{}]*)\}|(?<!\d)\s+|\s+(?!\d)|^\+", r"\1", text)


def _same_value(gold: str, answer: str, tolerance: Rational) -> bool:
    """Whether two numbers differ by the tolerance at most, or two expressions are equal."""
    x = _value(gold)
    y = _value(answer)
    if x is None or y is None:
        return False
    if not (x.is_number and y.is_number):
        return verify(x, y, allow_set_relation_comp=True, timeout_seconds=None)
    if decimal := _DECIMAL.fullmatch(f"{gold} {answer}"):  # 0.333333 is 1/3, up to its last digit
        tolerance = max(tolerance, Rational(f"99e-{len(decimal[1]) + 2}"))
    difference = (x - y).doit()
    if not difference.is_Rational:
        difference = difference.evalf(60)
        tolerance = max(tolerance, abs(x.evalf()) / 10**50)
    return bool(difference.is_finite and abs(difference) <= tolerance)


def _value(text: str) -> Any:
    """The sympy expression of an answer, with decimals as fractions; None if it has none."""
    number = _number(text)
    if number is not None:
        return number
    latex = rewrite(text, SYMBOLS)
    if _PROSE.search(latex):
        return None
    expressions = parse(f"\\boxed{{{latex}}}", [_BOXED], "no_fallback", parsing_timeout=None)
    if not expressions:
        return None
    value = sympify(expressions[0])  # matrices have no `is_number`
    return nsimplify(value, rational=True) if value.is_number else value


def _number(text: str) -> Rational | None:
    """Read a plain number; None if it is anything else."""
    text = rewrite(text, NUMBERS)
    return sum(map(Rational, text.split())) if _NUMBER.fullmatch(text) else None
