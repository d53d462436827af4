r"""Final answers: find one in a response, and compare two. A thin layer over math-verify.

math-verify parses and compares expressions, sets, intervals, matrices and relations, and finds
answers outside a box. Added here, each for answers of real benchmarks that it misjudges
(docs/grading.md):

- the answer is the last box only, and nothing inside <think>;
- plain numbers are compared as fractions, with OlympiadBench's tolerance: math-verify reads
  e-notation (Minerva) as a product with Euler's number, and rounds decimals below 1e-6 to zero;
- lists are compared part by part, with repetitions and `\pm`, and in order if the benchmark says
  so;
- words, single letters and numbers with a base are compared literally: it drops the base of `52_8`
  (MATH500);
- symbols of Minerva's formulas are kept apart: it confuses capital and small letters, `E_1` and
  `E_2`, derivatives and zero;
- units after a number (`\text{...}` of MATH and Minerva) are removed only if the gold has no
  letters.

Time limits are up to the caller (`grading.py`): sympy may never finish.
"""

import logging
import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from latex2sympy2_extended import NormalizationConfig, normalize_latex
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Float, I, Symbol

from stapo_lite.extras.math.spelling import GREEK, NUMBERS, plain_key, respell, rewrite

LONGEST = 1000
"""Most characters of an answer to parse; longer ones are compared literally."""
TAIL = 4000
"""Characters at the end of a response that are searched for an answer without a box."""
SAME = Fraction(5, 10**6)
"""Largest relative difference between an exact value and a decimal with six significant digits."""

_BOX = r"\\(?:boxed|fbox)\s*\{"
_UNIT = re.compile(  # \text{ cm}^2, \mathrm{~erg} / \mathrm{s}, ^\circ
    r"(?<=[^\s=,^_({\[+\-])(?:(?:\\[,;: ]|[\s~])*(?:(?:/|\\cdot|\\mu)\s*)?\\text\{(?!\d|[^{}]*[\s(,]\d)"  # noqa: E501
    r"(?:[^{}]|\{[^{}]*\})*\}(?:\s*_\s*\{?\s*(?:\\text\{[^{}]*\}|\\[a-zA-Z]+|\w)\s*\}?)?"
    r"(?:\s*\^\s*\{?-?\d+\}?)?)+$|\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°)$"
)
_UNIT_SYMBOL = (
    "[kcmnpMG]?(?:m|g|s|eV|Hz|J|N|W|Pa|V|A|K|C|T|L|pc|mol)|erg|h|ft|in|mph|dollars?|people"
)
_PLAIN_UNIT = re.compile(  # 3 m/s^2, 4.5e33 erg/s, 310 K (Minerva)
    rf"(?<=[\d}}])\s+(?:(?:{_UNIT_SYMBOL})(?:\^\{{?-?\d\}}?)?(?:\s*[/·]\s*|\s+|$))+$"
)
_DECIMAL = re.compile(
    r"(?P<digits>(?:[1-9]\d{0,2}(?:[ ,]\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:\\times10\^\{(?P<e>[+-]?\d{1,3})\})?"
)
_FRACTION = re.compile(r"(?:(?P<whole>\d+) )?(?P<a>[+-]?\d+)/(?P<b>\d+)")  # 1/2, 1 1/2
_REPEATING = re.compile(
    r"(?P<start>\d*\.(?P<once>\d*))\\(?:overline|bar)\{(?P<again>\d{1,30})\}"  # 0.1\overline{6}
)
_CHOICE = re.compile(
    r"(?:\\text\{\s*)?\(?([A-J])\)(?:\s*\})?(?:\\[,;: ]|[\s~])*(?=[^\s.,}])"
)  # \textbf{(B)}\ 27
_PROSE = re.compile(r"\\[(\[]|(?<![\\a-zA-Z])[^\W\d_]{4,}|[^\W\d_]{2,}\s+[^\W\d_]{2,}|=")
_LITERAL = re.compile(r"[a-zA-Z]|[a-zA-Z]{4,}|[0-9A-Z]+_(?:\d|\{\d+\})")  # C; ellipse; 52_8
_NAME = r"[A-Za-z](?:_\w|_\{[^{}]*\})?(?:\s*\([^()=]*\))?"
_LABELLED = re.compile(rf"({_NAME})\s*=([^=<>]*)")  # x = 5, f(x) = 2x
_SUBSCRIPT = r"\s*_\s*(?:\w|\\text\s*\{[^{}]*\}|\\[a-zA-Z]+|\{(?:[^{}]|\{[^{}]*\})*\})"
_MARKS = rf"'*(?:{_SUBSCRIPT})?'*"
_SYMBOL = re.compile(  # \frac{d M}{d r} is one, too
    r"(?P<as_is>\\(?:begin|end|mathbb|text|operatorname)\s*\{[^{}]*\})"
    r"|\\frac\{d(?:\^\{?\d\}?)?\s*[^{}]*(?:\{[^{}]*\}[^{}]*)?\}\{d\s*[^{}]*(?:\{[^{}]*\})?\}"
    rf"|{GREEK}{_MARKS}|(?P<command>\\[a-zA-Z]+)|[A-Z]{_MARKS}|[a-z](?=\s*[_']){_MARKS}"
)
_OF = rf"((?:{GREEK}|[a-zA-Z])(?:{_SUBSCRIPT})?)"
_DERIVATIVES = [
    (r"\s*\^\s*\{?\\prime\s*\\prime\s*\}?", "''"),
    (r"\s*\^\s*\{?\\prime\s*\}?", "'"),
    (rf"\\ddot\s*(?:{_OF}|\{{{_OF}\}})", r"\1\2''"),
    (rf"\\dot\s*(?:{_OF}|\{{{_OF}\}})", r"\1\2'"),
    (rf"\\frac\{{d\^\{{?2\}}?\s*{_OF}\}}\{{d\s*t\^\{{?2\}}?\}}", r"\1''"),
    (rf"\\frac\{{d\s*{_OF}\}}\{{d\s*t\}}", r"\1'"),
]
"""Time derivatives: x^{\\prime}, \\dot{x} and dx/dt all become x'."""
_CONFUSED = re.compile(
    rf"[A-Z]|_|'|\\prime|\\d+ot|{GREEK}|\\frac\{{d|(?<![a-zA-Z\\])[a-z]?\s*i(?![a-zA-Z])"
)


# math-verify logs every answer it cannot parse.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def grade(
    gold: Any, response: str, finished: bool, ordered: bool, tolerance: float
) -> tuple[bool, str | None]:
    """Whether a response is right, and its final answer in canonical form (None if it has none).
    The arguments are those of `final_answer` and `equivalent`."""
    answer = final_answer(response, finished)
    if answer is None:
        return False, None
    return equivalent(gold, answer, ordered=ordered, tolerance=tolerance), canonical(answer)


def final_answer(response: str, finished: bool = True) -> str | None:
    r"""The final answer of a response, as written; None if there is none.

    Boxes that form a list (`\boxed{1} and \boxed{2}`) are joined.

    Args:
        finished: False for a response that was cut off: only a box counts as its answer.
    """
    response = response.rpartition("</think>")[2].partition("<think>")[0]
    boxes = _boxes(response)
    if boxes:
        start, _, answer = boxes.pop()
        while boxes and _is_list(response[boxes[-1][1] : start]):
            start, _, content = boxes.pop()
            answer = answer if plain_key(content) == plain_key(answer) else f"{content}, {answer}"
        return answer.strip()
    if not finished:
        return None
    # Chinese has no spaces around numbers.
    text = re.sub(r"([\u3040-\u9fff\uff00-\uffef])", r" \1 ", response[-TAIL:])
    # $ $ must be on one line, as in Markdown.
    text = re.sub(r"(?<!\$)\$[ \t]*\n[^$]*\n[ \t]*\$(?!\$)", " ", text)
    return _stated(text) or _found(text)


def _stated(text: str) -> str:
    """The end of a response after its last "answer is" or "answer:", in plain words (GSM8K, base
    models); empty if there is none, or if it is prose."""
    *before, stated = re.split(r"(?i)\banswer(?:\s+is|\s*:)", text)
    stated = stated.strip(" \n:*").partition("I hope")[0].rstrip(" .*")
    return "" if not before or re.search(r"[\n$]", stated) or _PROSE.search(stated) else stated


def _found(text: str) -> str | None:
    """The formula or number that math-verify finds in a response, as written."""
    normal = NormalizationConfig(False, boxed="none")
    kinds = [LatexExtractionConfig(normalization_config=normal), ExprExtractionConfig()]
    found = parse(text, kinds, extraction_mode="first_match", parsing_timeout=None)
    if not found:
        return None
    answer = str(found[-1]).lstrip(" *").rstrip(" *.")
    return (answer if "(" in answer else answer.rstrip(")")) or None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of each complete, non-empty \boxed{...} or \fbox{...}; only the
    innermost of nested ones."""
    found = []
    opened: list[tuple[int, int] | None] = []  # start and content of a box; None: another brace
    for match in re.finditer(rf"{_BOX}|(?<!\\)\\[{{}}]|[{{}}]", text):
        if match[0] not in (r"\{", r"\}", "}"):
            opened.append((match.start(), match.end()) if match[0] != "{" else None)
        elif match[0] == "}" and opened and (box := opened.pop()):
            content = text[box[1] : match.start()]
            if content.strip() and not re.search(_BOX, content):
                found.append((box[0], match.end(), content))
    return found


def _is_list(gap: str) -> bool:
    """Whether the boxes on both sides of a gap form a list: the gap is punctuation, `and`, `or` or
    a label."""
    gap = re.sub(r"\\(?:text\s*\{([^{}]*)\}|q?quad|[()\[\],;: ])|\$", r" \1 ", gap)
    gap = " ".join(gap.split())
    pattern = rf"(?:[,;]?|[^.!?:]{{,40}}?\b(?:and|or)\b) ?(?:{_NAME} ?=)?"
    return len(gap) <= 80 and re.fullmatch(pattern, gap) is not None


def canonical(answer: str) -> str:
    r"""Canonical form of an answer, for counting votes: `\dfrac12`, `1/2` and `0.5` give `1/2`."""
    if len(answer) > LONGEST:
        return plain_key(answer)
    text = respell(answer)
    number = _number(text, units=True)
    return str(number.value) if number else plain_key(text)


def equivalent(gold: Any, answer: str, *, ordered: bool = False, tolerance: float = 0.0) -> bool:
    r"""Whether an answer equals the gold.

    Args:
        gold: text or number; may be a whole solution, with a \boxed{} or ending in `#### 72` as in
            GSM8K.
        answer: as `final_answer` returns it.
        ordered: whether the order of a plain list counts (`1, 2`). It always does in tuples.
        tolerance: absolute difference up to which numbers are equal.
    """
    gold = str(gold).rpartition("####")[2]
    if "\\boxed" in gold or "answer is" in gold:
        gold = final_answer(gold) or gold
    if max(len(gold), len(answer)) > LONGEST:
        return plain_key(gold) == plain_key(answer)
    return _equal(respell(gold), respell(answer), ordered, Fraction(tolerance))


def _equal(gold: str, answer: str, ordered: bool, tolerance: Fraction) -> bool:
    """Whether two respelled answers are equal. `ordered` and `tolerance` as for `equivalent`."""
    if not gold or not answer:
        return False
    if plain_key(gold) == plain_key(answer):
        return True
    gold, answer = _without_labels(_one_value(gold), _one_value(answer))
    answer = _of_choice(answer, by_letter=re.fullmatch("[A-J]", plain_key(gold)) is not None)
    a, b = plain_key(gold), plain_key(answer)
    if _LITERAL.fullmatch(a) or _LITERAL.fullmatch(b):
        return a == b or (len(a) > 3 and a.casefold() == b.casefold())
    units = not _has_letters(gold)
    number, other = _number(gold, units), _number(answer, units)
    if number and other:
        return _close(number, other, tolerance)
    if gold.endswith("%") or answer.endswith("%"):  # here 17.5 % is 17.5; below it is 0.175
        share, of_answer = (_number(side.rstrip("\\% "), units) for side in (gold, answer))
        if share and of_answer and _close(share, of_answer, tolerance):
            return True
    golds, answers = _parts(gold), _parts(answer)
    if number and len(answers) > 1:
        return False  # whatever else the answer says
    # `x = 1, y = 2` against `1, 2`: the order assigns the values.
    names = {match[1] for part in golds if (match := _LABELLED.fullmatch(part))}
    ordered |= len(names) == len(golds) == len(answers) and "=" not in answer
    if len(golds) == len(answers) > 1:
        return _equal_lists(golds, answers, ordered, tolerance)
    if len(golds) != len(answers):
        # math-verify turns lists into sets: `7, 7` would equal 7.
        same_set = set(map(plain_key, golds)) == set(map(plain_key, answers))
        if same_set or (ordered and len(golds) > 1):
            return False
    return _symbolic(gold, answer, units, tolerance)


def _one_value(text: str) -> str:
    r"""Pick one side: the exact one of `\frac{1}{3} \approx 0.33`, the number of `x \approx 0.33`.
    A chain of several values must not be right for each of them."""
    sides = [side.strip() for side in re.split(r"\\(?:approx|simeq)(?![a-zA-Z])|≈", text)]
    if len(sides) == 1:
        return sides[0]
    if any(len(_parts(side)) > 1 and not _number(side, units=True) for side in sides):
        return text  # a list: each part has its own
    exact = sides[0] and not _has_letters(sides[0].rpartition("=")[2])
    return sides[0] if exact else sides[-1]


def _without_labels(gold: str, answer: str) -> tuple[str, str]:
    """Strip labels: `x = 5` against `5` or `x = 6` compares the right sides."""
    a, b = _LABELLED.fullmatch(gold), _LABELLED.fullmatch(answer)
    if a and b:
        if plain_key(a[1]) == plain_key(b[1]):
            return a[2].strip(), b[2].strip()
    elif a and "=" not in answer:
        return a[2].strip(), answer
    elif b and "=" not in gold:
        return gold, b[2].strip()
    return gold, answer


def _of_choice(answer: str, by_letter: bool) -> str:
    """The part of `(B) 27` that counts: the letter if the gold is one, else the value."""
    choice = _CHOICE.match(answer)
    if not choice:
        return answer
    value = answer[choice.end() :]
    if not by_letter:
        return value
    return answer if re.search(r"\([A-J]\)", value) else choice[1]


def _has_letters(text: str) -> bool:
    r"""Whether a text has variables. `\text{cents}`, other commands and words of four or more
    letters do not count."""
    text = re.sub(GREEK, "x", text)
    text = re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|(?<![a-zA-Z])[a-z]{4,}", "", text)
    return re.search("[a-zA-Z]", text) is not None


class _Number(NamedTuple):
    """A plain number. `digits` counts a decimal's significant digits; infinity for others."""

    value: Fraction
    digits: float


def _number(text: str, units: bool) -> _Number | None:
    """Read a plain number, with units after it if `units`; None if it is anything else."""
    if units:
        text = _PLAIN_UNIT.sub("", _UNIT.sub("", text))
    text = rewrite(text, NUMBERS)
    unsigned = text[1:] if text.startswith(("+", "-")) else text
    digits = math.inf
    if match := _REPEATING.fullmatch(unsigned):
        nines = 10 ** len(match["again"]) - 1
        again = Fraction(int(match["again"]), nines * 10 ** len(match["once"]))
        value = Fraction(f"0{match['start']}") + again
    elif match := _DECIMAL.fullmatch(unsigned):
        mantissa = re.sub("[ ,]", "", match["digits"])
        value = Fraction(f"{mantissa}e{match['e'] or 0}")
        if "." in mantissa:
            digits = _significant(mantissa)
    elif (match := _FRACTION.fullmatch(unsigned)) and int(match["b"]):
        value = int(match["whole"] or 0) + Fraction(int(match["a"]), int(match["b"]))
    else:
        return None
    return _Number(-value if text.startswith("-") else value, digits)


def _significant(decimal: str) -> int:
    """Significant digits of a decimal with a point."""
    return len(decimal.replace(".", "").lstrip("0"))


def _close(a: _Number, b: _Number, tolerance: Fraction) -> bool:
    """Whether two numbers are equal, or one is a non-terminating fraction and the other a decimal
    with at least six significant digits that approximates it."""
    difference = abs(a.value - b.value)
    exact, decimal = sorted((a, b), key=lambda number: -number.digits)
    rounded = decimal.digits >= 6 and exact.digits == math.inf and not _ends(exact.value)
    return difference <= tolerance or (rounded and difference <= SAME * abs(exact.value))


def _ends(value: Any) -> bool:
    """Whether a fraction has a terminating decimal."""
    return 10 ** value.denominator.bit_length() % value.denominator == 0


def _parts(text: str) -> list[str]:
    r"""Split a list at commas, semicolons, `and` and `or` outside brackets; a part with one `\pm`
    gives two. The text itself if it is not a list."""
    text = re.sub(r",?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-z])\s*", ",", text)
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\?[(\[{]|\\?[)\]}]|(?<!\\)[,;]", text):
        if match[0] not in ",;":
            depth += 1 if match[0][-1] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    values = []
    for part in (*parts, text[start:]):
        if part.count(r"\pm") == 1:
            values += [part.replace(r"\pm", sign) for sign in "+-"]
        else:
            values.append(part)
    values = [value.strip().removeprefix("+").strip() for value in values]
    return [value for value in values if value]


def _equal_lists(golds: list[str], answers: list[str], ordered: bool, tolerance: Fraction) -> bool:
    left = list(answers)
    for gold in golds:
        for candidate in left[:1] if ordered else left:
            if _equal(gold, candidate, True, tolerance):
                left.remove(candidate)
                break
        else:
            return False
    return True


def _symbolic(gold: str, answer: str, units: bool, tolerance: Fraction) -> bool:
    """Whether two answers are equal as math-verify and sympy compare them."""
    words = re.search("[a-zA-Z]{4}", re.sub(r"\\[a-zA-Z]+", "", gold))
    confused = _CONFUSED.search(gold) or _CONFUSED.search(answer)
    renamed = bool(confused) and not units and not words
    a, b = _parse(gold, units, renamed), _parse(answer, units, renamed)
    if a is None or b is None:
        return False
    try:
        numbers = getattr(a, "is_number", False) and getattr(b, "is_number", False)
        if not numbers or not (tolerance or a.has(Float) or b.has(Float)):
            return bool(verify(a, b, allow_set_relation_comp=True, timeout_seconds=None))
        # math-verify rounds to six decimals, which makes all small numbers equal.
        a, b = a.doit(), b.doit()
        exact = a.is_Rational or b.is_Rational
        decimals = re.findall(r"\d*\.\d+", f"{gold} {answer}")
        rounded = not exact and any(_significant(decimal) >= 6 for decimal in decimals)
        relative = float(SAME) if rounded else 1e-12
        difference = abs((a - b).evalf(30))
        return bool(difference <= max(float(tolerance), relative * abs(a.evalf(30))))
    except Exception:  # sympy raises errors of any type
        return False


@lru_cache(maxsize=4096)
def _parse(text: str, units: bool, renamed: bool) -> Any:
    """The sympy expression of an answer, or of what follows its last `=`; None if it has none.

    Args:
        units: remove units at its end.
        renamed: rename symbols that math-verify would confuse.
    """
    if units:  # the parser would drop everything after the first \text
        if len(_parts(text)) == 1:
            text = _UNIT.sub("", text)
        units = r"\text" not in text
    normal = NormalizationConfig(
        basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="none"
    )
    if renamed:
        text = normalize_latex(text.replace("'", r"^{\prime}"), normal)
        text = _SYMBOL.sub(_rename, rewrite(text, _DERIVATIVES))
    boxed = replace(normal, boxed="all")
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=boxed)
    for part in (text, *text.rsplit("=", 1)[1:]):
        box = f"\\boxed{{{part}}}"
        found = parse(box, [config], fallback_mode="no_fallback", parsing_timeout=None)
        if found:
            return _with_real_symbols(found[0]) if renamed else found[0]
    return None


def _with_real_symbols(expression: Any) -> Any:
    """An expression with real symbols, and `i` as the imaginary unit."""
    names = {}
    for symbol in getattr(expression, "free_symbols", ()):
        names[symbol] = I if symbol.name == "i" else Symbol(symbol.name, real=True)
    return expression.xreplace(names) if names else expression


def _rename(match: re.Match[str]) -> str:
    r"""Give a symbol a name that the parser keeps apart from others: `E_{1}` -> `q_{ue1}`,
    `\gamma` -> `q_{gamma}`."""
    if match["as_is"] or match["command"]:
        return match[0]
    letters = re.sub(r"\\text(?![a-zA-Z])|[^a-zA-Z0-9]", "", match[0])
    name = re.sub("([A-Z])", r"u\1", letters).lower() + "prime" * match[0].count("'")
    return f" q_{{{name}}} "
