r"""Final answers: finding one in a response, and whether two are equal.

`final_answer` takes the last \boxed{}, else what math-verify finds stated last. `equivalent` reads numbers, lists,
tuples and labels itself and leaves expressions to math-verify, keeping clear of its traps: it reads `4.5e33` as a
product with Euler's number, makes sets of lists, loses the base of `52_8`, rounds to six decimals, and its parser takes
capitals for small letters, `E_1` for nothing, `\gamma` for a function and `dx/dt` for zero. The rules are in
docs/grading.md. Time limits are the caller's.
"""

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

SIX_DIGITS = Fraction(5, 10**6)  # a decimal equals the exact value that it gives to six significant digits
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
LONGEST = 1000  # characters of an answer; a longer one is compared as it is
TAIL = 4000  # characters at the end of a response in which an answer without a box is looked for

_SYMBOLS = str.maketrans(
    {"−": "-", "–": "-", "÷": "/", "，": ",", "$": " ", "€": " ", "£": " ", "\u00a0": " ", "\n": " "}  # noqa: RUF001
    | {"×": r"\times ", "·": r"\cdot ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "√": r"\sqrt "}  # noqa: RUF001
    | {"≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "°": " "}  # noqa: RUF001
    | {"α": r"\alpha ", "β": r"\beta ", "θ": r"\theta ", "λ": r"\lambda ", "π": r"\pi ", "ω": r"\omega "}  # noqa: RUF001
)
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺₀₁₂₃₄₅₆₇₈₉", "0123456789-+0123456789")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\[[^\]]*\]", r"\\\\"),  # the height of a matrix's row
        (r",\s*\\!\s*|\s*\{\s*,\s*\}\s*", ","),  # thousands: 12,\!345 and 12{,}345
        (r"\\(?:left|right|[bB]ig+[lr]?)(?![a-zA-Z])\s*\.?|\\displaystyle(?![a-zA-Z])|\\!", ""),
        (r"(?<!\\)\\(?:q?quad(?![a-zA-Z])|[,;: ])|~|\\$|\\\$|\\[()\[\]]", " "),
        (r"\s+", " "),
        (r"\*\*", "^"),
        (r",?\s*(?:\\text\{\s*)?(?:for (?:all|every|any|each)\b|\\forall).*$|,\s*[a-zA-Z]\s*\\in\s*\\mathbb.*$", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|boldsymbol|mbox|operatorname)\s*\{", r"\\text{"),
        (r"\\text\{(e|i|d)\}", r"\1"),
        (r"\\text\{\s*(and|or)\s*\}", r" \1 "),
        (r",?\s*(?:(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|(?<=[\d)])or(?=[a-zA-Z(]))\s*", " and "),
        (r"\\leq(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\ne(?![a-zA-Z])|!=", r"\\neq "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", " "),
        (r"\\text\{\s*(?:\\?%|percent(?:age)?|pct)\s*\}|\\?%|(?<![a-zA-Z])(?:percent(?:age)?|pct)(?![a-zA-Z])", "%"),
        (r"(?<![a-zA-Z\\])(?:np\.|(?=(?:(?:arc)?(?:sin|cos|tan)|sqrt|ln|log|exp)(?![a-zA-Z])))", r"\\"),  # np.arcsin
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\frac\s*([0-9a-zA-Z])", r"\\frac{\1}"),
        (r"(\\frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"(?<![\w.^{(])(\d+)/(\d+)(?=\s*\\(?:pi|sqrt)|\s+[a-zA-Z(])", r"\\frac{\1}{\2} "),  # 1/2 x, not 1/(2 x)
        (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?!\w|\.\d)", r"\1\\times 10^{\2}"),  # 4.5e33
        (r"(?<=[\d.])\s*(?:\\cdot|\*|x)\s*10\s*\^", r"\\times 10^"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    )
]
_UNIT = re.compile(  # \text{ cm}^2, / \mathrm{s^{2}}
    r"(?<=[^\s=,^_({\[+\-])(?:\s*(?:(?:/|\\cdot|\\mu)\s*)?\\text\{(?:[^{}]|\{[^{}]*\})*\}(?:\s*\^\{?-?\d+\}?)?)+$"
)
_PLAIN_UNIT = re.compile(  # 45 minutes, 3 m/s, 5eV
    r"(?<=[\d}])\s+(?!and\b)(?:[a-zA-Z]{3,}|[a-zA-Z]+/)[a-zA-Z\s/]*(?:\^\{?-?\d\}?)?$"
    r"|(?<=[\d}])\s*(?:[ckmnp]?m|k?g|[kM]?pc|[kMG]?eV|[kM]?Hz|[km]?[JKNWVACTLs]|Pa|mol|ft|in|hr?s?|mph|\\Omega)(?:\^\{?-?\d\}?)?$"
)
_WORDY_UNIT = re.compile(r"(?<=\d) +[a-z]{4,}$")  # of a gold, where letters may be variables
_INTEGER = r"(?:[1-9]\d{0,2}(?:[ ,]\d{3})+|\d+)"
_DECIMAL = re.compile(  # 1,234.5 and 4.5\times10^{33} and 10^{3}
    rf"(?P<sign>[+-]?)(?:(?P<mantissa>{_INTEGER}(?:\.\d*)?|\.\d+)(?:\\times10\^(?P<e>\{{[+-]?\d{{1,3}}\}}|[+-]?\d{{1,3}}))?"
    r"|10\^(?P<power>\{[+-]?\d{1,3}\}|\d))"
)
_FRACTION = re.compile(  # \frac{1}{2}, 1\frac{1}{2}, 1/2, -3./2, (1)/(2)
    r"(?P<sign>[+-]?)(?:(?P<whole>\d*)\\frac\{(?P<a>[+-]?[\d.]+)\}\{(?P<b>[\d.]+)\}"
    r"|(?:(?P<w>\d+) )?\(?(?P<c>[\d.]+)\)?/\(?(?P<d>[\d.]+)\)?)"
)
_LABEL = re.compile(  # x, x_1, f(x), \frac{NO}{BO}, |AB|, A:B, (p,q)
    r"[A-Za-z](?:_\w|_\{[^{}]*\})?'*(?:\([^()=]*\))?|[^\d\s\-+][^+\-=]*[\\|:(][^+\-=]*|\\[^+\-=]*|\([^=]*\)"
)
_PROSE = re.compile(r"\\boxed|[\n\u3040-\u9fff]|(?<![\\a-zA-Z])[^\W\d_]{4,}|[^\W\d_]{2,}\s+[^\W\d_]{2,}")
_WORD = re.compile(r"[A-Za-z][A-Za-z' ]{2,}")
_CHOICE = re.compile(r"\([A-Z]\)(?!.*\([A-Z]\))(?:\s|$)|[A-Z][.:)]|[A-Z]$")  # (C), C. 12
_BASE = re.compile(r"[0-9A-Z]+_\{?\d+\}?")
_GREEK = (
    "alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|"
    "psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega"
)
_SUBSCRIPT = r"(?:_(?:\w|\\[a-zA-Z]+|\{[^{}]*\}))?'*"
_MISREAD = re.compile(
    r"(?P<as_is>\\(?:begin|end|mathbb)\{[^{}]*\})"
    r"|\\frac\{d(?:\^\{?\d\}?)?\s*[^{}]*(?:\{[^{}]*\}[^{}]*)?\}\{d\s*[^{}]*(?:\{[^{}]*\})?\}"
    rf"|\\d{{1,4}}ot\s*(?:\{{[^{{}}]*\}}|\\?[a-zA-Z]+){_SUBSCRIPT}"
    rf"|\\(?:{_GREEK})(?![a-zA-Z]){_SUBSCRIPT}"
    rf"|(?P<command>\\[a-zA-Z]+)|[A-Z]{_SUBSCRIPT}|[a-z](?=_|'){_SUBSCRIPT}"
)


def final_answer(response: str, finished: bool = True) -> str | None:
    r"""The final answer of a response, as written; None where there is none.

    What is inside <think> does not count. Of boxes that make up one list (`\boxed{1} and \boxed{2}`) all are taken.

    Args:
        finished: False for a response that was cut off: it may have a box, but states no answer otherwise.
    """
    response = response.rpartition("</think>")[2].partition("<think>")[0]
    boxes = list(_boxes(response))
    if boxes:
        start, _, answer = boxes.pop()
        while boxes and (joint := _joint(response[boxes[-1][1] : start])):
            start, _, content = boxes.pop()
            answer = answer if canonical(content) == canonical(answer) else f"{content}{joint}{answer}"
        return answer.strip()
    if not finished:
        return None
    if len(response) < 200 and not _PROSE.search(response.strip()):
        return response.strip(" #*\n") or None  # nothing but an answer
    return _stated_last(response[-TAIL:])


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    r"""(start, end, content) of each complete \boxed{...} or \fbox{...} with content; the innermost of nested ones."""
    open_braces: list[tuple[int, int] | None] = []  # start and content of a box
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{|(?<!\\)\\[{}]|[{}]", text):
        if "box" in match[0] or match[0] == "{":
            open_braces.append((match.start(), match.end()) if "box" in match[0] else None)
        elif match[0] == "}" and open_braces and (box := open_braces.pop()):
            content = text[box[1] : match.start()]
            if content.strip() and not re.search(r"\\(?:boxed|fbox)\s*\{", content):
                yield box[0], match.end(), content


def _joint(gap: str) -> str | None:
    """How the boxes on both sides of the gap make up a list: `, ` or ` and `; None where they do not."""
    if not gap:
        return ", "
    gap = re.sub(r"\\(?:text\s*\{([^{}]*)\}|q?quad|[()\[\],;: ])|\$", lambda match: f" {match[1] or ''} ", gap)
    match = re.fullmatch(r"\s*(?:[,;]|[^.!?:\n]{,40}?\b(and|or)\b)\s*(?:[A-Za-z](?:_\{?\w+\}?)?\s*=)?\s*", gap)
    return match and (" and " if match[1] else ", ")


def _stated_last(text: str) -> str | None:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    *before, anchored = re.split(r"(?i)answer(?:\s+is|\s*:)[\s:*]*", text)
    if before and (answer := re.match(r"\$([^$\n]+)\$|\\\((.+?)\\\)|([^\n]+?)\.?(?=\s+I hope|\s*$|\.\s|\n)", anchored)):
        stated = next(group for group in answer.groups() if group).strip(" *.")
        if re.search(r"\w", stated) and not _PROSE.search(stated):
            return stated
    as_written = NormalizationConfig(False, False, False, False, boxed="none")
    text = re.sub(r"([\u3040-\u9fff\uff00-\uffef])", r" \1 ", text)  # no spaces around numbers in these scripts
    text = re.sub(r"(?<!\$)\$[ \t]*\n[^$]*\n[ \t]*\$(?!\$)", " ", text)  # as in Markdown, $ $ within a line only
    found = parse(
        text,
        [LatexExtractionConfig(normalization_config=as_written), ExprExtractionConfig()],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return str(found[-1]).strip(" *.") or None if found else None


def canonical(answer: str) -> str:
    r"""An answer in one spelling, for counting votes: `\dfrac12`, `1/2` and `0.5` are all `1/2`."""
    if len(answer) > LONGEST:
        return _key(answer)
    text = _clean(answer, _PLAIN_UNIT)
    number = _number(text, decimal_comma=False)
    return str(number.value) if number else _key(text)


def equivalent(gold: Any, answer: str, *, ordered: bool = True, tolerance: float = 0.0) -> bool:
    r"""Whether an answer equals the gold.

    Args:
        gold: text or number; a whole solution with a \boxed{} will do, or one that ends as GSM8K's, `#### 72`.
        answer: as `final_answer` returns it.
        ordered: whether the order of a plain list counts (`1, 2`). It never does in `\{1, 2\}`, `1 or 2`,
            `\pm 1`, in lists of tuples and of equations; it always does in tuples.
        tolerance: absolute difference up to which numbers are equal.
    """
    gold = str(gold).rpartition("####")[2]
    if "\\boxed{" in gold and not any(_boxes(gold)):
        gold = gold.rpartition("\\boxed{")[2]  # cut off
    elif "\\boxed" in gold or "answer is" in gold:
        gold = final_answer(gold) or gold
    if max(len(gold), len(answer)) > LONGEST:
        return _key(gold) == _key(answer)
    gold = _clean(gold, _WORDY_UNIT)
    answer = _clean(answer, _WORDY_UNIT if _has_letters(gold) else _PLAIN_UNIT)
    return _equal(gold, answer, ordered, Fraction(tolerance))


@lru_cache(maxsize=4096)  # a gold comes with every sample, an answer to be judged and to be counted
def _clean(text: str, unit: re.Pattern) -> str:
    r"""One spelling of what can be written in many ways; without units in \text{}, and without a plain `unit`."""
    text = text.strip().translate(_SYMBOLS)
    text = re.sub("[⁰¹²³⁴-⁹⁻⁺]+", lambda match: f"^{{{match[0].translate(_SCRIPTS)}}}", text)
    text = re.sub("[₀-₉]+", lambda match: f"_{{{match[0].translate(_SCRIPTS)}}}", text)
    if "matrix" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)  # escaped once too often
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(" .,;:")
    for pattern in (_UNIT, unit):
        text = pattern.sub("", text).strip() or text
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    text = re.sub(r"(?i)^(?:the )?(?:final )?answer(?: is)?\s*:?\s+|^[A-Za-z]\s*\\in(?![a-z])", "", text).strip()
    if "(" not in text and "[" not in text:
        text = text.rstrip(")")  # (so it is 5)
    while text.startswith("{") and _closing(text) == len(text) - 1:
        text = text[1:-1].strip()
    return str(WORDS.index(text.lower())) if text.lower() in WORDS else text.removeprefix("+")


def _key(text: str) -> str:
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))


def _equal(gold: str, answer: str, ordered: bool, tolerance: Fraction) -> bool:
    """Of two clean texts: the first reading that both have decides."""
    if not gold or not answer:
        return False
    if _key(gold) == _key(answer):
        return True
    numbers = _equal_numbers(gold, answer, ordered, tolerance)
    if numbers or (numbers is False and "," not in gold + answer):  # 1,2 may be 1.2 or a list
        return bool(numbers)
    (golds, gold_free), (answers, free) = _items(gold), _items(answer)
    if len(golds) != len(answers):
        return _equal_tuples(golds, answers, tolerance)
    if len(golds) > 1:
        return _equal_lists(golds, answers, ordered and not gold_free and not free, tolerance)
    return _equal_single(gold, answer, ordered, tolerance)


class _Number(NamedTuple):
    """A plain number, with its decimal places as written: infinity for a fraction whose decimals do not end."""

    value: Fraction
    places: float
    percent: bool


def _equal_numbers(gold: str, answer: str, decimal_comma: bool, tolerance: Fraction) -> bool | None:
    """None unless both are plain numbers."""
    a, b = _number(gold, decimal_comma), _number(answer, decimal_comma)
    if a is None or b is None:
        return None
    if a.percent != b.percent:  # 28 % is 28, and also 0.28
        shares = [_Number(n.value / 100, n.places + 2, False) if n.percent else n for n in (a, b)]
        if _close(shares[0], shares[1], tolerance):
            return True
    return _close(a, b, tolerance)


def _close(a: _Number, b: _Number, tolerance: Fraction) -> bool:
    """Equal, or one is the other rounded to at least five significant digits."""
    difference = abs(a.value - b.value)
    coarse, fine = sorted((a, b), key=lambda number: number.places)
    if difference <= tolerance or coarse.places == fine.places:
        return difference <= tolerance
    if fine.places == math.inf:
        return coarse.places > 0 and difference <= SIX_DIGITS * abs(fine.value)
    unit = Fraction(10) ** -int(coarse.places)
    return coarse.places > 0 and difference <= unit / 2 and abs(coarse.value) >= 10_000 * unit


def _number(text: str, decimal_comma: bool) -> _Number | None:
    percent = text.endswith("%")
    text = re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", text.rstrip("% "))
    if re.fullmatch(r"\([^(),]*\)", text):
        text = text[1:-1]
    if decimal_comma and re.fullmatch(r"[+-]?\d+,\d+", text) and not _DECIMAL.fullmatch(text):
        text = text.replace(",", ".")
    places: float
    if match := _DECIMAL.fullmatch(text):
        mantissa = re.sub("[ ,]", "", match["mantissa"] or "1")
        exponent = int((match["e"] or match["power"] or "0").strip("{}"))
        value = Fraction(mantissa) * Fraction(10) ** exponent
        places = len(mantissa.partition(".")[2]) - exponent
    elif match := _FRACTION.fullmatch(text):
        try:
            value = Fraction(match["a"] or match["c"]) / Fraction(match["b"] or match["d"])
        except (ValueError, ZeroDivisionError):  # 1.2.3/4, 1/0
            return None
        value += int(match["whole"] or match["w"] or 0)
        bottom = value.denominator
        places = next((k for k in range(bottom.bit_length()) if 10**k % bottom == 0), math.inf)
    else:
        return None
    return _Number(-value if match["sign"] == "-" else value, places, percent)


def _items(text: str) -> tuple[list[str], bool]:
    r"""The parts of a list, and whether their order is free. A text that is no list is its own only part.

    Free are \{sets\}, `or` and `and`, \pm, tuples, equations.
    """
    free = False
    if text.startswith("\\{") and text.endswith("\\}"):
        text, free = text[2:-2].strip(), True
    for separator in (" and ", ";", ","):
        parts = _split(text, separator)
        if len(parts) > 1:
            free |= separator == " and "
            if separator == " and ":  # 1, 2 and 3
                parts = [part for piece in parts for part in _split(piece, ",")]
            break
    expanded = []
    for part in parts:
        if part.count("\\pm") == 1 and "\\mp" not in part:
            expanded += [part.replace("\\pm", "+").lstrip("+ "), part.replace("\\pm", "-")]
            free = True
        else:
            expanded.append(part)
    free |= all(part.startswith("(") or "=" in part for part in expanded)
    return expanded, free


def _split(text: str, separator: str) -> list[str]:
    """At the separators outside of brackets; empty parts are left out."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"\\?[(\[{{]|\\?[)\]}}]|{re.escape(separator)}", text):
        if match[0] == separator:
            if depth == 0:
                parts.append(text[start : match.start()].strip())
                start = match.end()
        else:
            depth += 1 if match[0][-1] in "([{" else -1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _equal_lists(golds: Sequence[str], answers: Sequence[str], ordered: bool, tolerance: Fraction) -> bool:
    if len(golds) != len(answers):
        return False
    if ordered:
        return all(_equal(g, a, True, tolerance) for g, a in zip(golds, answers, strict=True))
    left = list(answers)
    for gold in golds:
        match = next((a for a in left if _equal(gold, a, True, tolerance)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _equal_tuples(golds: Sequence[str], answers: Sequence[str], tolerance: Fraction) -> bool:
    """`(1, 2)` against `1, 2`."""

    def parts(side: Sequence[str]) -> Sequence[str]:
        return _tuple(side[0]) if len(side) == 1 and side[0][0] + side[0][-1] == "()" else side

    sides = [parts(golds), parts(answers)]
    return all(len(side) > 1 for side in sides) and _equal_lists(sides[0], sides[1], True, tolerance)


def _tuple(text: str) -> list[str]:
    """The parts of a tuple or interval; none if it is neither."""
    if text[0] in "([" and text[-1] in ")]" and _closing(text) == len(text) - 1:
        parts = _split(text[1:-1], ";")
        return parts if len(parts) > 1 else _split(text[1:-1], ",")
    return []


def _closing(text: str) -> int:
    """Where the bracket closes that the text begins with."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position
    return -1


def _equal_single(gold: str, answer: str, ordered: bool, tolerance: Fraction) -> bool:
    """Neither is a list."""
    golds, answers = _tuple(gold), _tuple(answer)
    if len(golds) > 1 and len(answers) > 1:
        same_brackets = gold[0] + gold[-1] == answer[0] + answer[-1]
        return same_brackets and _equal_lists(golds, answers, True, tolerance)
    (gold_label, gold_values), (label, values) = _labelled(gold), _labelled(answer)
    if gold_label and label and gold_label != label:
        renamed = gold_label.partition("(")[0] == label.partition("(")[0]  # W(n) = 1, W(x) = 1
        if not renamed or re.search("[a-zA-Z]", "".join(gold_values + values)):
            return _symbolic(gold, answer, tolerance)
    elif not gold_label and not label and len(gold_values) == len(values) == 1:
        if _WORD.fullmatch(gold) or _WORD.fullmatch(answer):
            return gold.casefold() == answer.casefold()
        if re.fullmatch(r"\(?[A-Z]\)?", gold) and _CHOICE.match(answer):
            return gold.strip("()") == answer.lstrip("(")[0]
        if _BASE.fullmatch(gold) or _BASE.fullmatch(answer):
            return False  # other digits, or another base
        return _symbolic(gold, answer, tolerance)
    if any(_equal(g, a, ordered, tolerance) for g in gold_values for a in values):
        return True
    return gold_label != label and "=" in gold and "=" in answer and _symbolic(gold, answer, tolerance)


def _labelled(text: str) -> tuple[str, list[str]]:
    r"""`x = 1/3 \approx 0.33` -> ("x", ["1/3", "0.33"]). A text without label has the label ""."""
    *exact, rest = _split(text, "=") or [text]
    values = [value.strip() for value in rest.split("\\approx")]
    if not exact:
        label = len(values) > 1 and _LABEL.fullmatch(values[0]) and _has_letters(values[0])
        return (_key(values[0]), values[1:]) if label else ("", values)
    if (_LABEL.fullmatch(exact[0]) or not _has_letters(exact[0])) and not re.search(r"[<>]|\\[lg]e|\\neq", text):
        return _key(exact[0]), values
    return ("", [text])


def _has_letters(text: str) -> bool:
    return re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)) is not None


def _symbolic(gold: str, answer: str, tolerance: Fraction) -> bool:
    from math_verify import verify

    a, b = _parse(gold), _parse(answer)
    if a is None or b is None:
        return False
    try:
        if getattr(a, "is_number", False) and getattr(b, "is_number", False):
            return _equal_values(a, b, tolerance)
        return bool(verify(a, b, allow_set_relation_comp=True, timeout_seconds=None))
    except Exception:  # sympy raises what it likes
        return False


def _equal_values(a: Any, b: Any, tolerance: Fraction) -> bool:
    """Of two sympy expressions without symbols."""
    from sympy import Float, nan, zoo

    inexact = a.has(Float) or b.has(Float)
    a, b = a.doit(), b.doit()
    if a.has(nan, zoo) or b.has(nan, zoo):
        return False
    if a == b or not (a.is_finite and b.is_finite) or (a.is_Rational and b.is_Rational):
        return bool(a == b)
    relative = float(SIX_DIGITS) if inexact else 1e-20
    return bool(abs((a - b).evalf(30)) <= max(float(tolerance), relative * abs(a.evalf(30))))


@lru_cache(maxsize=4096)
def _parse(text: str) -> Any:
    """The sympy expression of a clean text; None where it has none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import FiniteSet, I, Symbol

    text = re.sub(r"\[([^\[\]]*)\]\s*\^", r"(\1)^", text)
    text = re.sub(r"\^\s*(?:\{((?:\\prime\s*)+)\}|\\prime(?![a-zA-Z]))", lambda m: "'" * m[0].count("prime"), text)
    text = _MISREAD.sub(lambda match: match["as_is"] or match["command"] or _symbol(match[0]), text)
    # units=False: what it takes for units may be variables
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)
    found = parse(f"\\boxed{{{text}}}", [config], parsing_timeout=None)
    if not found or isinstance(found[0], str | FiniteSet):  # what is a list has been read as one
        return None
    symbols = getattr(found[0], "free_symbols", ())  # real ones, whether the imaginary unit occurs or not
    return found[0].xreplace({s: I if s.name == "i" else Symbol(s.name, real=True) for s in symbols})


def _symbol(latex: str) -> str:
    r"""A symbol that the parser keeps apart from others: `E_{1}` -> `q_{ue1}`, `\gamma` -> `q_{gamma}`."""
    name = re.sub("([A-Z])", r"u\1", re.sub(r"[^a-zA-Z0-9]", "", latex.replace("'", "prime"))).lower()
    return f" q_{{{name}}} "
