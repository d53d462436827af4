r"""Final answers: finding one in a response, and whether two are equal. A thin layer over math-verify.

math-verify parses, compares expressions, sets, intervals, matrices and relations, and finds an answer that stands
outside of a box. What is added here, each for answers of real benchmarks that it misjudges (docs/grading.md):

- what counts as the answer: the last box alone, nothing inside <think>;
- plain numbers, compared as fractions: e-notation (Minerva), which it reads as a product with Euler's number, and
  decimals below 1e-6, which it rounds to zero; the tolerance of OlympiadBench;
- parts of a list one by one: how often each occurs, `\pm`, their order where the benchmark says that it counts;
- words and single letters as they are, bases (`52_8` of MATH500), which it drops;
- symbols of Minerva's formulas, which it confuses: capitals with small letters, `E_1` with `E_2`, derivatives
  with zero;
- units after a number (`\text{...}` of MATH and Minerva), taken off only where the gold has no letters.

Time limits are the caller's (`grading.py`): sympy may never finish with an answer.
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

LONGEST = 1000
"""Characters of an answer; a longer one is compared as it is."""
TAIL = 4000
"""Characters at the end of a response in which an answer without a box is looked for."""
SAME = Fraction(5, 10**6)
"""Relative difference between an exact value and a decimal that gives it: six significant digits."""

_BOX = r"\\(?:boxed|fbox)\s*\{"
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mbox|math(?:rm|bf|it))\s*\{"
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|"
    r"chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)(?![a-zA-Z])"
)
_ANOTHER = r"\b(?:and|or)\b|[;=]|,(?!\s*[a-z]\s*(?:,|\\in|\\text|[<>]|$))"
"""Text that may begin another answer, behind `for all n`."""
_PLAIN = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | str.maketrans("、–", ",-")  # noqa: RUF001
"""Full-width characters, and two more that models write, in ASCII."""
_SPELLINGS = [
    (r"(?<!\\)\$|\\displaystyle(?![a-zA-Z])", ""),
    (r"\\\\\[[^\]]*\]", r"\\\\"),  # the height of a matrix's row
    (r"\\\\(?=[a-zA-Z])(?!.*matrix)", r"\\"),  # escaped twice
    (_TEXT, r"\\text{"),
    (r"\\text\{\s*(and|or)\b([^{}]*)\}", r" \1 \2 "),  # 5 \text{ or 6}
    (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\\(?:small|large|Large|LARGE|huge|Huge|bf|it|rm|underline)(?![a-zA-Z])|\\(?:text)?color\s*\{\w+\}", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (rf"\\frac\s*(\\pi(?![a-zA-Z])|{_GREEK})\s*", r"\\frac{\1}"),
    (rf"(\\frac\s*(?:\{{[^{{}}]*\}}|\w))\s*(\\pi(?![a-zA-Z])|{_GREEK})", r"\1{\2}"),
    (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?!\w|\.\d)", r"\1\\times 10^{\2}"),  # 4.5e33
    (r"(?<=[\d.])\s*(?:\\times|\\cdot|\*|x|×|·)\s*10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?", r"\\times 10^{\1}"),  # noqa: RUF001
    (r"(?<![a-zA-Z\\])np\.", r"\\"),  # np.arcsin (Minerva)
    (r"(?<=\d)\.(?=/)", ""),  # -3./2 (Minerva)
    (r"(?<![\w.^{(])(\d+)/(\d+)(?=\s*\\(?:pi|sqrt)|\s+[a-z](?![a-z]))", r"\\frac{\1}{\2} "),  # 1/2 x, not 1/(2 x)
    # f(n)=n for all n; 2 \pi k, k \in \mathbb{Z} (OlympiadBench), but nothing that may be another answer
    (rf",?\s*(?:\\text\{{\s*)?(?:for (?:all|every|any|each)\b|\\forall)(?:(?!{_ANOTHER}).)*", " "),
    (r",\s*[a-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?(?:[_^](?:\{[^{}]*\}|\S))*", ""),
]
_UNIT = re.compile(  # \text{ cm}^2, \mathrm{~erg} / \mathrm{s}, ^\circ
    r"(?<=[^\s=,^_({\[+\-])(?:(?:\\[,;: ]|[\s~])*(?:(?:/|\\cdot|\\mu)\s*)?\\text\{(?!\d|[^{}]*[\s(,]\d)"
    r"(?:[^{}]|\{[^{}]*\})*\}(?:\s*_\s*\{?\s*(?:\\text\{[^{}]*\}|\\[a-zA-Z]+|\w)\s*\}?)?"
    r"(?:\s*\^\s*\{?-?\d+\}?)?)+$|\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°)$"
)
_UNIT_SYMBOL = "[kcmnpMG]?(?:m|g|s|eV|Hz|J|N|W|Pa|V|A|K|C|T|L|pc|mol)|erg|h|ft|in|mph|dollars?|people"
_PLAIN_UNIT = re.compile(  # 3 m/s^2, 4.5e33 erg/s, 310 K (Minerva)
    rf"(?<=[\d}}])\s+(?:(?:{_UNIT_SYMBOL})(?:\^\{{?-?\d\}}?)?(?:\s*[/·]\s*|\s+|$))+$"
)
_DECIMAL = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>(?:[1-9]\d{0,2}(?:[ ,]\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:\\times10\^\{(?P<e>[+-]?\d{1,3})\})?"
)
_FRACTION = re.compile(  # \frac{1}{2}, 1\frac{1}{2}, 1/2, 1 1/2
    r"(?P<sign>[+-]?)(?:(?P<whole>\d*)\\frac\{(?P<a>[+-]?\d+)\}\{(?P<b>\d+)\}|(?:(?P<w>\d+) )?(?P<c>\d+)/(?P<d>\d+))"
)
_REPEATING = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar)\{(?P<again>\d{1,30})\}")
_CHOICE = re.compile(r"(?:\\text\{\s*)?\(?([A-J])\)(?:\s*\})?(?:\\[,;: ]|[\s~])*(?=[^\s.,}])")  # \textbf{(B)}\ 27
_PROSE = re.compile(r"\\[(\[]|(?<![\\a-zA-Z])[^\W\d_]{4,}|[^\W\d_]{2,}\s+[^\W\d_]{2,}|=")
_LITERAL = re.compile(r"[a-zA-Z]|[a-zA-Z]{4,}|[0-9A-Z]+_(?:\d|\{\d+\})")  # C; ellipse; 52_8
_NAME = r"[A-Za-z](?:_\w|_\{[^{}]*\})?(?:\s*\([^()=]*\))?"
_LABELLED = re.compile(rf"({_NAME})\s*=([^=<>]*)")  # x = 5, f(x) = 2x
_PRIME = r"\s*\^\s*\{?\\prime"
_SUBSCRIPT = r"\s*_\s*(?:\w|\\text\s*\{[^{}]*\}|\\[a-zA-Z]+|\{(?:[^{}]|\{[^{}]*\})*\})"
_MARKS = rf"(?:{_SUBSCRIPT})?(?:{_PRIME}(?:\s*\\prime)*\s*\}}?)?"
_SYMBOL = re.compile(
    r"(?P<as_is>\\(?:begin|end|mathbb|text|operatorname)\s*\{[^{}]*\})"
    r"|\\frac\{d(?:\^\{?\d\}?)?\s*[^{}]*(?:\{[^{}]*\}[^{}]*)?\}\{d\s*[^{}]*(?:\{[^{}]*\})?\}"  # dx/dt
    rf"|\\d{{1,4}}ot\s*(?:\{{[^{{}}]*\}}|\\?[a-zA-Z]+){_MARKS}"
    rf"|{_GREEK}{_MARKS}"
    rf"|(?P<command>\\[a-zA-Z]+)|[A-Z]{_MARKS}|[a-z](?=\s*_|{_PRIME}){_MARKS}"
)
_DERIVATIVE = re.compile(  # by the time, in three notations: d^2x/dt^2, \ddot{x}, x''
    r"\\frac\{d(?:\^\{?(?P<order>\d)\}?)?\s*(?P<of>[^{}]*(?:\{[^{}]*\}[^{}]*)?)\}\{d\s*t(?(order)\^\{?(?P=order)\}?)\}"
    r"|\\(?P<dots>d{1,4})ot\s*(?P<dotted>\{[^{}]*\}.*|\\?[a-zA-Z].*)"
    rf"|(?P<primed>[^^]*?){_PRIME}(?:\s*\\prime)*\s*\}}?"
)
_CONFUSED = re.compile(rf"[A-Z]|_|'|\\prime|\\d+ot|{_GREEK}|\\frac\{{d|(?<![a-zA-Z\\])[a-z]?\s*i(?![a-zA-Z])")


logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each answer that it cannot parse


def grade(gold: Any, response: str, finished: bool, ordered: bool, tolerance: float) -> tuple[bool, str | None]:
    """Whether a response is right, and its final answer in one spelling, None where it has none; arguments as below."""
    answer = final_answer(response, finished)
    if answer is None:
        return False, None
    return equivalent(gold, answer, ordered=ordered, tolerance=tolerance), canonical(answer)


def final_answer(response: str, finished: bool = True) -> str | None:
    r"""The final answer of a response, as written; None where there is none.

    Boxes that make up one list (`\boxed{1} and \boxed{2}`) are taken together.

    Args:
        finished: False for a response that was cut off: only a box counts as its answer.
    """
    response = response.rpartition("</think>")[2].partition("<think>")[0]
    boxes = _boxes(response)
    if boxes:
        start, _, answer = boxes.pop()
        while boxes and _is_list(response[boxes[-1][1] : start]):
            start, _, content = boxes.pop()
            answer = answer if _key(content) == _key(answer) else f"{content}, {answer}"
        return answer.strip()
    if not finished:
        return None
    text = re.sub(r"([\u3040-\u9fff\uff00-\uffef])", r" \1 ", response[-TAIL:])  # Chinese sets no spaces around numbers
    text = re.sub(r"(?<!\$)\$[ \t]*\n[^$]*\n[ \t]*\$(?!\$)", " ", text)  # $ $ is within a line, as in Markdown
    if stated := _stated(text):
        return stated
    as_written = LatexExtractionConfig(normalization_config=NormalizationConfig(False, boxed="none"))
    found = parse(text, [as_written, ExprExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
    answer = str(found[-1]).lstrip(" *").rstrip(" *.") if found else ""
    return (answer if "(" in answer else answer.rstrip(")")) or None


def _stated(text: str) -> str | None:
    """The end of a response after its last "answer is" or "answer:", in plain words (GSM8K, base models)."""
    *_, last = [None, *re.finditer(r"(?i)\banswer(?:\s+is|\s*:)", text)]
    stated = text[last.end() :].strip(" \n:*") if last else ""
    stated = stated.partition("I hope")[0].rstrip(" .*")
    return stated if not re.search(r"[\n$]", stated) and not _PROSE.search(stated) else None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of each complete \boxed{...} or \fbox{...} with content; the innermost of nested ones."""
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
    """Whether the boxes on both sides of a gap make up a list: punctuation, `and`, `or`, a label between them."""
    gap = re.sub(r"\\(?:text\s*\{([^{}]*)\}|q?quad|[()\[\],;: ])|\$", lambda match: f" {match[1] or ''} ", gap)
    gap = " ".join(gap.split())
    pattern = rf"(?:[,;]?|[^.!?:]{{,40}}?\b(?:and|or)\b) ?(?:{_NAME} ?=)?"
    return len(gap) <= 80 and re.fullmatch(pattern, gap) is not None


def canonical(answer: str) -> str:
    r"""An answer in one spelling, for counting votes: `\dfrac12`, `1/2` and `0.5` are all `1/2`."""
    if len(answer) > LONGEST:
        return _key(answer)
    text = _respell(answer)
    number = _number(text, units=True)
    return str(number.value) if number else _key(text)


def equivalent(gold: Any, answer: str, *, ordered: bool = False, tolerance: float = 0.0) -> bool:
    r"""Whether an answer equals the gold.

    Args:
        gold: text or number; a whole solution with a \boxed{} will do, or one that ends as GSM8K's, `#### 72`.
        answer: as `final_answer` returns it.
        ordered: whether the order of a plain list counts (`1, 2`). It always does in tuples.
        tolerance: absolute difference up to which numbers are equal.
    """
    gold = str(gold).rpartition("####")[2]
    if re.search(_BOX, gold) and not _boxes(gold):
        gold = re.split(_BOX, gold)[-1]  # cut off
    elif "\\boxed" in gold or "answer is" in gold:
        gold = final_answer(gold) or gold
    if max(len(gold), len(answer)) > LONGEST:
        return _key(gold) == _key(answer)
    return _equal(_respell(gold), _respell(answer), ordered, Fraction(tolerance))


@lru_cache(maxsize=4096)  # the same gold comes again with every sample
def _respell(text: str) -> str:
    text = text.translate(_PLAIN)
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(" .,;:\\")


def _key(text: str) -> str:
    """A text without the markup that shows nothing, to be compared letter by letter."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|[bB]ig+[lr]?)(?![a-zA-Z])|\\!", "", text)
    text = re.sub(r"\\[,;: ]|~", " ", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # `1 1/2` is not `11/2`
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)  # a choice
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text)


def _equal(gold: str, answer: str, ordered: bool, tolerance: Fraction) -> bool:
    """Equality of two respelled answers."""
    if not gold or not answer:
        return False
    if _key(gold) == _key(answer):
        return True
    gold, answer = _without_labels(_one_value(gold), _one_value(answer))
    answer = _of_choice(answer, re.fullmatch("[A-J]", _key(gold)) is not None)
    a, b = _key(gold), _key(answer)
    if _LITERAL.fullmatch(a) or _LITERAL.fullmatch(b):
        return a == b or (len(a) > 3 and a.casefold() == b.casefold())
    units = not _has_letters(gold)
    numbers = _number(gold, units), _number(answer, units)
    if numbers[0] and numbers[1]:
        return _close(numbers[0], numbers[1], tolerance)
    if gold.endswith("%") or answer.endswith("%"):  # 17.5 per cent is 17.5, or 0.175 below
        shares = [_number(re.sub(r"\s*\\?%$", "", side), units) for side in (gold, answer)]
        if shares[0] and shares[1] and _close(shares[0], shares[1], tolerance):
            return True
    golds, answers = _parts(gold), _parts(answer)
    if numbers[0] and len(answers) > 1:
        return False  # whatever else it says
    names = {match[1] for part in golds if (match := _LABELLED.fullmatch(part))}
    ordered |= len(names) == len(golds) == len(answers) and "=" not in answer  # x = 1, y = 2 against 1, 2
    if len(golds) == len(answers) > 1 and _equal_lists(golds, answers, ordered, tolerance):
        return True
    keys = [sorted(map(_key, side)) for side in (golds, answers)]
    if (ordered and len(golds) > 1) or (keys[0] != keys[1] and set(keys[0]) == set(keys[1])):
        return False  # math-verify makes sets of lists: `7, 7` would be 7
    return _symbolic(gold, answer, units, tolerance)


def _one_value(text: str) -> str:
    r"""The exact side of `\frac{1}{3} \approx 0.33`, and the number in `x \approx 0.33`: an answer of many values must
    not be right for each."""
    first, *others = (side.strip() for side in re.split(r"\\(?:approx|simeq)(?![a-zA-Z])|≈", text))
    if others and any(len(_parts(side)) > 1 and not _number(side, units=True) for side in (first, *others)):
        return text  # a list: each part has its own
    return others[-1] if others and (not first or _has_letters(first.rpartition("=")[2])) else first


def _without_labels(gold: str, answer: str) -> tuple[str, str]:
    """`x = 5` against `5` or `x = 6`: what stands on the right."""
    a, b = _LABELLED.fullmatch(gold), _LABELLED.fullmatch(answer)
    if (a and b and _key(a[1]) == _key(b[1])) or (a and "=" not in answer) or (b and "=" not in gold):
        return (a[2].strip() if a else gold), (b[2].strip() if b else answer)
    return gold, answer


def _of_choice(answer: str, by_letter: bool) -> str:
    """The part of `(B) 27` that counts: the letter where the gold is one, else the value.."""
    if not (choice := _CHOICE.match(answer)):
        return answer
    value = answer[choice.end() :]
    if by_letter:
        return answer if re.search(r"\([A-J]\)", value) else choice[1]
    return value


def _has_letters(text: str) -> bool:
    r"""Whether a text has variables; `\text{cents}`, other commands and words of four letters or more are none."""
    rest = re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|(?<![a-zA-Z])[a-z]{4,}", "", re.sub(_GREEK, "x", text))
    return re.search("[a-zA-Z]", rest) is not None


class _Number(NamedTuple):
    """A plain number; `digits` are the significant ones of a decimal, infinity of an integer or a fraction."""

    value: Fraction
    digits: float


def _number(text: str, units: bool) -> _Number | None:
    text = _PLAIN_UNIT.sub("", _UNIT.sub("", text)) if units else text
    text = re.sub(r"\\!\s*|\{(?=,\})|(?<=,)\}", "", text)  # thousands: 12,\!345 and 12{,}345
    text = re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", re.sub(r"\\[,;: ]|~", " ", text).strip().removeprefix(r"\$"))
    digits = math.inf
    if match := _REPEATING.fullmatch(text):
        once, again = match["whole"] + match["once"], match["again"]
        value = Fraction(int(once + again) - int(once or 0), (10 ** len(again) - 1) * 10 ** len(match["once"]))
    elif match := _DECIMAL.fullmatch(text):
        mantissa = re.sub("[ ,]", "", match["digits"])
        value = Fraction(mantissa) * Fraction(10) ** int(match["e"] or 0)
        if "." in mantissa:
            digits = _significant(mantissa)
    elif (match := _FRACTION.fullmatch(text)) and int(match["b"] or match["d"]):
        value = Fraction(int(match["a"] or match["c"]), int(match["b"] or match["d"]))
        value += int(match["whole"] or match["w"] or 0)
    else:
        return None
    return _Number(-value if match["sign"] == "-" else value, digits)


def _significant(decimal: str) -> int:
    """Significant digits of a decimal with a point."""
    return len(decimal.replace(".", "").lstrip("0"))


def _close(a: _Number, b: _Number, tolerance: Fraction) -> bool:
    """Equal, or a decimal of six significant digits or more that gives a fraction whose decimals do not end."""
    difference = abs(a.value - b.value)
    exact, decimal = sorted((a, b), key=lambda number: -number.digits)
    rounded = decimal.digits >= 6 and exact.digits == math.inf and not _ends(exact.value)
    return difference <= tolerance or (rounded and difference <= SAME * abs(exact.value))


def _ends(value: Any) -> bool:
    """Whether the decimals of a fraction end."""
    return 10 ** value.denominator.bit_length() % value.denominator == 0


def _parts(text: str) -> list[str]:
    """The parts of a list, at commas, semicolons, `and`, `or` outside of brackets; itself where it is none."""
    text = re.sub(r",?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-z])\s*", ",", text)
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\?[(\[{]|\\?[)\]}]|(?<!\\)[,;]", text):
        if match[0] not in ",;":
            depth += 1 if match[0][-1] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts = [part.strip() for part in (*parts, text[start:]) if part.strip()]
    both = [(p.replace(r"\pm", "+"), p.replace(r"\pm", "-")) if p.count(r"\pm") == 1 else (p,) for p in parts]
    return [one.removeprefix("+").strip() for pair in both for one in pair]


def _equal_lists(golds: list[str], answers: list[str], ordered: bool, tolerance: Fraction) -> bool:
    left = list(answers)
    for gold in golds:
        match = next((a for a in left[: 1 if ordered else None] if _equal(gold, a, True, tolerance)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _symbolic(gold: str, answer: str, units: bool, tolerance: Fraction) -> bool:
    words = re.search("[a-zA-Z]{4}", re.sub(r"\\[a-zA-Z]+", "", gold))
    renamed = not units and not words and any(_CONFUSED.search(text) for text in (gold, answer))
    a, b = _parse(gold, units, renamed), _parse(answer, units, renamed)
    if a is None or b is None:
        return False
    try:
        numbers = getattr(a, "is_number", False) and getattr(b, "is_number", False)
        if numbers and (tolerance or a.has(Float) or b.has(Float)):
            a, b = a.doit(), b.doit()  # math-verify rounds to six decimals, so that small numbers are all alike
            exact = [x for x in (a, b) if x.is_Rational and _ends(Fraction(int(x.p), int(x.q)))]
            rounded = any(_significant(number) >= 6 for number in re.findall(r"\d*\.\d+", f"{gold} {answer}"))
            relative = float(SAME) if rounded and not exact else 1e-12
            return bool(abs((a - b).evalf(30)) <= max(float(tolerance), relative * abs(a.evalf(30))))
        return bool(verify(a, b, allow_set_relation_comp=True, timeout_seconds=None))
    except Exception:  # sympy raises what it likes
        return False


@lru_cache(maxsize=4096)
def _parse(text: str, units: bool, renamed: bool) -> Any:
    """The sympy expression of an answer, or of what follows its last `=`; None where it has none.

    Args:
        renamed: give symbols that math-verify confuses names that it keeps apart.
    """
    if units:  # the parser would take off all that follows the first \text
        text = _UNIT.sub("", text) if len(_parts(text)) == 1 else text
        units = r"\text" not in text
    normal = NormalizationConfig(basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="none")
    if renamed:
        text = re.sub("'+", lambda match: "^{" + r"\prime " * len(match[0]) + "}", text)
        text = _SYMBOL.sub(lambda m: m["as_is"] or m["command"] or _symbol(m[0]), normalize_latex(text, normal))
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=replace(normal, boxed="all"))
    for part in (text, *text.rsplit("=", 1)[1:]):
        found = parse(f"\\boxed{{{part}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
        if found:
            break
    else:
        return None
    symbols = getattr(found[0], "free_symbols", ()) if renamed else ()
    names = {symbol: I if symbol.name == "i" else Symbol(symbol.name, real=True) for symbol in symbols}
    return found[0].xreplace(names) if names else found[0]


def _symbol(latex: str) -> str:
    r"""A symbol that the parser keeps apart from others: `E_{1}` -> `q_{ue1}`, `\gamma` -> `q_{gamma}`."""
    if match := _DERIVATIVE.fullmatch(latex.strip()):
        order = int(match["order"] or 1) if match["of"] else len(match["dots"] or re.findall("prime", latex))
        latex = f"{match['of'] or match['dotted'] or match['primed']} derivative {order}"
    name = re.sub("([A-Z])", r"u\1", re.sub(r"\\text(?![a-zA-Z])|[^a-zA-Z0-9]", "", latex)).lower()
    return f" q_{{{name}}} "
