r"""Final answers: find one in a response, and compare two. A thin layer over math-verify.

Added to math-verify, for answers of real benchmarks that it misjudges (docs/grading.md):

- the answer is the last box or `<answer>`, and nothing inside <think>;
- plain numbers are compared as fractions, and exact values exactly: math-verify reads e-notation
  (Minerva) as a product with Euler's number, and rounds to six decimals;
- lists are compared part by part, in order if the benchmark says so;
- words, choices and numbers with a base (`52_8`, MATH500) are compared literally;
- capitals and derivatives are symbols of their own, and only words after a number are units.

Time limits are up to the caller (`grading.py`): sympy may never finish.
"""

import logging
import re
from itertools import product
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Rational, nsimplify, sympify

LONGEST = 500
"""Characters of an answer that are compared; more are a proof, or endless repetition."""
TAIL = 4000
"""Characters at the end of a response that are searched for an answer without a box."""
# Without its `units`, which takes the `t` of `2t` for tonnes.
BOXED = LatexExtractionConfig(True, 0, NormalizationConfig(malformed_operators=True, nits=True))


def _nested(plain: str, opening: str, closing: str) -> str:
    """A pattern of text in which brackets are closed, up to ten levels deep."""
    pattern = f"(?:{plain})*+"
    for _ in range(10):
        pattern = f"(?:{plain}|{opening}{pattern}{closing})*+"
    return pattern


_THOUGHT = re.compile(
    r"(?is)^.*[<\[]/(?:think|reason|thought)\w*[>\]]|[<\[](?:think|reason|thought)\w*[>\]].*"
)
_TAGGED = re.compile(r"(?is)<((?:final_?)?answer|solution)>\s*(\S.*?)\s*</\1>")
_BRACES = _nested(r"[^{}\\]|\\[\s\S]", r"\{", r"\}")
_BOX = re.compile(rf"(?:\\?\b(?:boxed|fbox)\s*\{{\s*)++(?!\}})({_BRACES})\}}")
_GAP = re.compile(  # what may stand between two boxes of one list
    r"(?:[^.!?:\n]{0,40}?\b(?:and|or)\b)?(?:\\q?quad|\\text\s*\{|[\s$,;&()\[\]{}\\])*"
    r"(?:[a-zA-Z]\w*(?:_\{\w+\})?\s*=\s*)?"
)
_NUMERAL = (
    r"[-+]?(?:\\frac\{[^{}]*\}\{[^{}]*\}|[$€£]?(?:\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|"
    r"\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?:\ *(?:\\?%|percent|pct))?)"
)
_FORMULA = rf"""(?:
    \$\$.+?\$\$ | \\\[.+?\\\] | \\\(.+?\\\) | \$(?!\d[\d,.]*\ [a-z]{{2}})[^$\n]+\$
    | (?<![a-zA-Z])[(\[][^()\[\]\n]*,[^()\[\]\n]*[)\]] | \([A-J]\)
    | (?<![a-zA-Z\d.]){_NUMERAL}(?:\ *[-+*/^×÷=≈]\ *{_NUMERAL})*
)"""  # noqa: RUF001
_VALUES = rf"{_FORMULA}(?:\ *(?:,\ *(?:and|or)?|and|or)\ *(?:[a-zA-Z]\w{{,3}}\ *=\ *)?{_FORMULA})*"
"""A formula, number, tuple or choice in a text, or a list of them."""
_STATED = re.compile(
    rf"""(?sx).*(?:
        \b(?i:answer|(?:correct|right|best)\ (?:option|choice))s?\b
        (?:[a-z\ ]{{0,40}}?\b(?:is|are)\b|\W*:):?
        | <(?i:answer|solution)> | \#{{4}}(?!\s*\d+[.)]\s)
    )(?!.*\bWait\b)(?!\s*(?:indeed\s)?(?:correct|helpful|wrong)\b)
    [\s*]*(?:(?:indeed|definitely|therefore|thus)\s+)?(?:
        (\$\$.+?\$\$|\\\[.+?\\\]|\S(?:(?!\b[a-zA-Z]{{2,}}(?:\s+[a-zA-Z]{{2,}}){{2}})[^\n])*?)
        (?=\.?\s*(?:\n|$)|\.\s|I\ hope|<[|/]|\s\((?:[a-z]{{3}}|\d+\\?%)
            |,?\s(?:not|since|because|as|so|which|where)\b)
        | (?:[^\n]{{0,100}}(?:\bis|\bare|=)\s+)?({_VALUES})
    )"""
)
"""The last statement of an answer, `The answer is`, `**Answer:**`, `<answer>` or `####` (GSM8K), in
few words or with a value in a longer sentence."""

_SPELLINGS = r"""
# One line, without marks of style and currency
\s*\n\s* → \t
(?<!\\)\\[()\[\]]|\\?[$€£¥₹¢]|\\(?:pounds|euro|cents?)(?![a-z])|\u200b|\*\*|` →
\\(?:left|right|[bB]igg?[lr]?|displaystyle|bf|it|rm|[lL]arge)(?![a-z])|\\!\s*|\\color\s*\{\w+\} →
(?<!\\)\\[,;: >]|~ → \t
\\\\\[\w+\] → \\\\
# Signs that are no LaTeX
，|、|\\q?quad(?![a-z]) → ,
（|⟨|\\langle → (
）|⟩|\\rangle → )
[−–] → -
½ → \\frac{1}{2}
¼ → \\frac{1}{4}
¾ → \\frac{3}{4}
°|\\degree(?![a-z]) → ^\\circ
\\AA(?![a-z]) → Å
(?<=[\d}])\s*(?:\\mu|[μµ])\s*(?=\\(?:text|math)) →
√\s*(.?) → \\sqrt \1
∞\s*(.?) → \\infty \1
±\s*(.?) → \\pm \1
·\s*(.?) → \\cdot \1
≤\s*(.?) → \\le \1
≥\s*(.?) → \\ge \1
≠\s*(.?) → \\ne \1
≈\s*(.?) → \\approx \1
∈\s*(.?) → \\in \1
# Words: \textbf{(C)}, 12^{th}, `The answer is 12`, `f(n) = n for all n`, `k \in \mathbb{Z}`
\\(?:text\w*|mbox|math(?:rm|bf|it|sf))\s*\{ → \\text{
(?<=\d)(\}?\s*)\\text\{(?=[A-J]\}(?!_)) → \1\\text{\t
^\s*\\text\{([^{}]*)\}|\\text\{([^{}]*\b(?:and|or)\b[^{}]*|[A-J])\} → \1\2
[\s.,;:\\]+$|(?<=[a-zA-Z]{2})!$ →
(?<=\d)\s*\^?\s*(?:\{?\s*\\text)?\s*\{?\s*(?:st|nd|rd|th)\b(?:\s*\}){0,2} →
(?i)^(?:.*\b(?:answer|result)\s+is:?|\s*=(?!=))\s* →
(?i)\b(?:about|approximately|exactly|only|simply|equal to)\s+(?=[-\d\\(]) →
(?i)^[^\d$\\]*(?:\b(?:is|are|option|choice)\b:?|[a-z]{4}:)\s*(?=[-\d$\\(]|(?-i:[A-J])\b) →
,?\s*(?:\\text\{\s*)?(?:\bfor (?:all|every|any|each)\b|\\forall)[^,;=]*?(?=$|,|\band\b|\bor\b) → \t
[\s,]+(?:\\text\{\s*(?:for|where)\s*\}\s*)?\\(?:text\{\s*Re\s*\}|operatorname\{Re\}|Re)\s*\(.*$ →
[\s,]+\(?\\text\{\s*\(?(?:for|where)\b(?:(?!\b(?:and|or)\b)[^,;])*$ →
,\s*[a-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?(?:[_^]\S+)?\s*$ →
,?\s*(?<![a-zA-Z])and(?![a-z]) → ,
(?<![a-zA-Z\\])or(?![a-z])|\\lor|\\vee → \tor\t
# Commands: -3./2 and np.arcsin (Minerva), \frac\pi4, sqrt(x)
\\(le|ge|ne)q(?:slant)?(?![a-z]) → \\\1
\\lg(?![a-z]) → \\log_{10}
\\varnothing|^\s*\\\{\s*\\\}\s*$ → \\emptyset
(?<![a-zA-Z\\])inf(?:inity)?(?![a-z]) → \\infty
(?<=\d)\.(?=/) →
\\[dtc]frac → \\frac
\\frac\s*(?:\{([^{}]*)\}|(\w|\\[a-z]+))\s*(?:\{([^{}]*)\}|(\w|\\[a-z]+)) → \\frac{\1\2}{\3\4}
(?<![a-zA-Z\\])(?:np\.)?(?=(?:arc)?(?:sqrt|pi|infty|sin|cos|tan|ln|log)(?![a-z])) → \\
\\sqrt\s*(\[\w+\])?\s*(?:\(([^()]*)\)|(\d+)) → \\sqrt\1{\2\3}
(?<![\w.^])(\d+)\s*[/⁄]\s*(\d+)(?![\d.]) → \\frac{\1}{\2}
^\((\w+)\)_ → \1_
(?<=\d)_\{\((\d+)\)\}$ → _{\1}
_\s*(\\text\{[^{}]*\}|\\(?!text)[a-zA-Z]+) → _{\1}
([_^])\{(\w)\} → \1\2
(?<=\d)_\{?\(?(?:10|\\text\{\s*(?:ten|base (?:ten|10))\s*\})\)?\}?$ →
# Numbers: 5 million, 1.04 x 10^-3, 0.\overline{3}, 1000,99 and 0,111, 28 percent
(?<=[\d.])E(?=[+-]?\d) → e
(?<=\d)\s*\\text\{\s*(thousand|million|billion)\s+(?=[a-z]) → \1\\text{\t
(?<=\d)\s*(?:\\text\{\s*)?thousand\b(?:\s*\})? → \\times10^3
(?<=\d)\s*(?:\\text\{\s*)?million\b(?:\s*\})? → \\times10^6
(?<=\d)\s*(?:\\text\{\s*)?billion\b(?:\s*\})? → \\times10^9
(?<=[\d.])\s*(?:\\times|\\cdot|[*x×])\s*10\s*\^\s*\{?\s*([+-]?\s*\d+)(?:\s*\})? → \\times10^{\1}
(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\} → \1.\2\3\3\3\3\3\3\3
^\s*(?:(\d{4,}),(\d{1,2})|(0),(\d{3,}))\s*$ → \1\3.\2\4
\s*(?:\\?%|\\text\{\s*percent\w*\s*\}|\bpercent(?:age)?\b|\bpct\b) → %
# (x, y) = (1, 2), \frac{1}{3} \approx 0.33, \{1, 2\}, (C), C. 12, 1 \pm 2
(?<![\w)}])\([^()=]*,[^()=]*\)\s*=\s*(?=[(\[]) →
(?:^|(?<=[,;]))(?:[^\d=,;]*|\s*\\?[a-zA-Z]+_(?:\w|\{[^{}]*\})\s*)\\approx →
(?<=\S)\s*\\approx[^,;]*$ →
^\s*[a-zA-Z]+\([^()]*\)\s*(?=\\in(?![a-z])) → x
^\s*(?:[a-z]\s*\\in\s*)?(?:\\\{((?:(?!\\\}).)*)\\\}|\{([^{}]*)\})\s*$ → \1\2
^\s*([A-Ja-df-h])\)$|(?<![^,\s])\(\s*([A-Ja-df-h])\s*\)(?=\s*(?:,|$|\tor)) → \1\2
^\s*\(?([A-Ja-df-h])[).:]\s*(?!.*\b[A-J]\b)(\S.*) → \1\n\2
^(?=.*\\pm)(.*?)\tor\t → \1,
^\s*[a-z]\([a-z]\)\s*=\s*(?=\\pm) →
(?<![\w}])\((?=[^()]*,)([^()]*)\\pm([^()]*)\\mp([^()]*)\) → (\1+\2-\3),(\1-\2+\3)
(?<![\w}])\((?=[^()]*,)([^()]*)\\pm(?![a-z])([^()]*)\) → (\1+\2),(\1-\2)
(?<![\w}])\((?=[^()]*,)([^()]*)\\pm(?![a-z])([^()]*)\) → (\1+\2),(\1-\2)
([^,;()\[\]]*)\\pm(?![a-z])([^,;()\[\]]*) → \1+\2,\1-\2
([^,;()\[\]]*)\\pm(?![a-z])([^,;()\[\]]*) → \1+\2,\1-\2
"""  # noqa: RUF001
"""Rules that bring an answer to one spelling: a pattern and its replacement on each line, from top
to bottom. A choice with its value becomes two lines, which are two readings of the answer."""
_UNITS = r"""
# \text{ cm}^2, minutes, ^\circ, ^\circ C
\\cdot\s*(?=\\text\{) →
(?<=\\pi)\s*\\text\{[^{}\d]*\}(?:\^\d)?$ →
(?<=[\d})])\s*\\frac(?:\{(?:(?:\\text\{[^{}\d]*\}|(?<=\{)[A-J])(?:\^\d)?[\s/]*)+\}){2}$ →
(?<=[\d})])\s*/?\s*(?:\\text\{(?:[^{}\d]|[_^]\{?-?\d\}?)*\}(?:[_^](?:\w|\{[^{}]*\}))?[\s/]*)+$ →
(?<=[\d}])\s+[a-zA-Z]{4,}(?:[a-zA-Z\s]|\^\d)*$ →
\s*\^\s*\{?\\circ\s*\}?\s*(?:[CF]|\\text\{[^{}]*\})?$ →
"""
_NUMBERS = (
    _UNITS
    + r"""
(?<=\d)(?<!\d{4})(?:,|\{,\}|\s)(?=\d{3}(?!\d)) →
\s*\\times10\^\{([+-]?\d+)\} → e\1
# 1.6cm, 10 m/s^2, 310 K, 2 cm^{-1}, 5 ft, 12 per day
\^\{(-\d)\} → ^\1
(?<=\d)\s*(?:(?:[kMG]?(?:eV|Hz|Pa)|[kcmn][mgs]|erg|Å|(?<=[\s/])[mgsKJNWVACTL])(?:\^-?\d)?[\s/]*)+$ →
(?<=\d)\s+(?:ft|in|oz|lb|hr|km/h|[a-z]{3}[a-z\s]*)(?:\^\d)?$ →
(?<=\d)\s*[LMR]_\{?\\odot\}?$ →
(?<=\d)\s*\^?\{?(?:\\prime\s*|')+\}?$ →
# 75 %, 1 4/5, -1 -4/5
%$ → e-2
^([+-])\s+ → \1
^(-?\d+)\s*\\frac\{(\d+)\}\{(\d+)\} → \1 \2/\3
^([+-]?)\\frac\{([+-]?\d+)\}\{(\d+)\} → \1\2/\3
^-(\d+) (?=\d) → -\1 -
"""
)
_SYMBOLS = (
    _UNITS
    + r"""
# math-verify takes one digit after a brace for the denominator of a fraction before it
\}\s*(\d[\d.]*\d) → }{\1}
# x^{\prime}, \frac{dx}{dt}, \dot{x} and x' become x_{dt}
\\frac\{d\^2\s*(\\[a-z]+|\w)(?:_(\w))?\s*\}\{d\s*(\w)\^2\} → \1_{dd\3\2}
\\ddot\s*\{?\s*(\\[a-z]+|\w)\s*\}?(?:_(\w))? → \1_{ddt\2}
\^\s*\{?\\prime\s*\}? → '
([a-zA-Z])''(?!') → \1_{ddt}
\\frac\{d\s*(\\[a-z]+|\w)\}\{d\s*(\w)\} → \1_{d\2}
\\dot\s*\{?\s*(\\[a-z]+|\w)\s*\}?(?:_(\w))?|([a-zA-Z])' → \1\3_{dt\2}
# The constant of integration: C e^{-2t}, C_1 \cos t and c e^{-2t}
(?<![\\a-zA-Z_])C(?=(?:_\d|_\{\d\})?\s*(?:e\s*\^|\\(?:cos|sin)|x\s*\^|\}\{x\s*\^)) → c
# The parser makes capitals small: E_1, \Omega and L_{\odot} become q_{uE1}, q_{uOmega}, q_{uLodot}
_\s*\{\\text\{\s*(\w+)\s*\}\}|_\s*\{\\(\w+)\} → _{\1\2}
(?:\\([A-Z][a-z]+)|(?<!bb\{)(?<![\\_])(?<!_\{)([A-Z]))(?:_\{(\w+)\}|_(\w))? → q_{u\1\2\3\4}
# The imaginary unit
(?<![\\_])(?<!\\[a-zA-Z])(?<![a-zA-Z]{2})i(?![a-zA-Z]{2}) → {I}
"""
)
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\s+-?)?\d+/0*[1-9]\d*|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)")
_DECIMAL = re.compile(r"[^.]*?(?<![\d.])(?=[0.]*[1-9](?:\.?\d){5})\d*\.(\d+)[^.]*")
_LITERAL = re.compile(
    r"(?![ei])[a-zA-Z]|[A-Z][A-Za-z]{2,}|(?i:yes|no|[a-z]{4,})|-?[0-9A-Z]+_(?:\d|\{\d+\})"
)
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}[\s,]+[a-zA-Z]{2,}|(?<![_^\d])\d+\s+\d")
_TUPLES = re.compile(r"([(\[])([^()\[\]\n]*;[^()\[\]\n]*)([)\]])\n\1(.*)\3")
_BRACKETS = _nested(r"[^()\[\]{}]", r"[(\[{]", r"[)\]}]")
_PART = re.compile(
    rf"""(?x)(?=\S)(?:
        (?<![\d,])\d{{1,3}}(?:,\d{{3}})+(?!,?\d)  # 1,234
        | [^,;()\[\]{{}}] | [(\[{{]{_BRACKETS}[)\]}}] | [()\[\]{{}}]
    )+(?<=\S)"""
)

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs what it cannot parse


def grade(
    gold: Any, response: str, finished: bool, ordered: bool, tolerance: float
) -> tuple[bool, str | None]:
    """Whether a response is right, and its final answer in canonical form (None if it has none).
    The arguments are those of `final_answer` and `equivalent`."""
    answer = final_answer(response, finished)
    if answer is None:
        return False, None
    spelled = _rewrite(answer)
    return equivalent(gold, answer, ordered, tolerance), str(_number(spelled) or _bare(spelled))


def final_answer(response: str, finished: bool = True) -> str | None:
    r"""The final answer of a response, as written; None if there is none.

    Args:
        finished: False for a response that was cut off: only a box or `<answer>` counts.
    """
    text = _THOUGHT.sub("", response)
    for tag in _TAGGED.finditer(text):  # the last one counts
        text = f"Answer: {tag[2]}"
        finished = True
    box = _last_box(text)
    if box or not finished:
        return box
    tail = text[-TAIL:]
    if stated := _STATED.match(tail):
        return stated[1] or stated[2]
    values = re.findall(f"(?sx){_VALUES}", tail)
    return values[-1] if values else None


def _last_box(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, the innermost of nested ones;
    boxes that form a list (`\boxed{1} and \boxed{2}`) are joined."""
    contents: list[str] = []
    end = 0
    for box in _BOX.finditer(text):
        if not _GAP.fullmatch(text, end, box.start()):
            contents = []
        contents.append(box[1])
        end = box.end()
    return ", ".join(dict.fromkeys(contents)) or None


def equivalent(gold: Any, answer: str, ordered: bool = False, tolerance: float = 0.0) -> bool:
    r"""Whether an answer equals the gold.

    Args:
        gold: text or number; may be a whole solution, with a \boxed{} or ending in `#### 72` as in
            GSM8K, or in tags.
        answer: as `final_answer` returns it.
        ordered: whether the order of a plain list counts (`1, 2`). It always does in tuples.
        tolerance: absolute difference up to which numbers are equal.
    """
    return _equal(_reference(gold), _rewrite(answer), ordered, Rational(tolerance))


def readable(gold: Any) -> bool:
    """Whether a gold is a word, or mathematics that can be compared as such."""
    return all(
        _LITERAL.fullmatch(part) or _value(part) is not None for part in _parts(_reference(gold))
    )


def _reference(gold: Any) -> str:
    """The answer of a gold in normal spelling."""
    text = str(gold)
    if _TAGGED.search(text) or re.search(r"\\f?box|####|answer is", text):
        text = final_answer(text) or text
    return _rewrite(text)


def _rewrite(text: str, table: str = _SPELLINGS) -> str:
    """Apply the rules of a table, from top to bottom."""
    text = re.sub("[⁻⁰¹²³⁴-⁹]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text[:LONGEST])
    for pattern, replacement in re.findall(r"(.+) →(.*)", table):
        text = re.sub(pattern, replacement.strip(), text)
    return text


def _bare(text: str) -> str:
    """Remove markup that shows nothing, for a literal comparison; `1 1/2` is not `11/2`."""
    return re.sub(r"\\text\{([^{}]*)\}|(?<!\d)\s+|\s+(?!\d)|^\+", r"\1", text)


def _equal(gold: str, answer: str, ordered: bool, tolerance: Rational) -> bool:
    """Whether two answers in normal spelling are equal. `ordered` and `tolerance` as for
    `equivalent`."""
    golds, answers = _parts(gold), _parts(answer)
    if len(golds) == 1 and "\tor\t" in answer:
        # 3/4, or 75 %; but x < 2 or x > 3 has a part for each one of a union
        golds = _parts(gold.replace("\\cup", ",")) if "\\cup" in gold else golds * len(answers)
    if len(golds) != len(answers):
        inner = gold.strip("()"), answer.strip("()")
        return "(" in (gold[:1], answer[:1]) and _equal(*inner, True, tolerance)  # (1, 2) for 1, 2
    for part in golds:
        candidates = answers[:1] if ordered else answers
        match = next((one for one in candidates if _same(part, one, tolerance)), None)
        if match is None:
            return False
        answers.remove(match)
    return True


def _parts(text: str) -> list[str]:
    """Split a list at commas, semicolons and `or` outside brackets."""
    return _PART.findall(text.replace("\tor\t", ","))


def _same(gold: str, answer: str, tolerance: Rational) -> bool:
    """Whether two answers that are no lists are equal."""
    if pair := _TUPLES.fullmatch(f"{gold}\n{answer}".replace(",", ";")):
        return _equal(pair[2], pair[4], True, tolerance)
    if "=" not in gold:
        answer = re.split(r"(?<![<>!])=|\\equiv", answer)[-1]
    elif "=" not in answer:
        gold = re.sub(r"^\s*[a-zA-Z](?:_\w|_\{[^{}]*\})?(?:\([^()=]*\))?\s*=(?=[^=]*$)", "", gold)
    if "mod" not in gold:
        answer = re.sub(r"\s*(?:\\text\{\s*)?\(?\\?[pb]?mod\b.*", "", answer)
    if "\n" in gold + answer:
        return any(
            _same(*reading, tolerance) for reading in product(gold.split("\n"), answer.split("\n"))
        )
    a, b = _bare(gold), _bare(answer)
    if a == b or _LITERAL.fullmatch(a) or _LITERAL.fullmatch(b):
        return a == b if re.fullmatch("[eEk-zK-Z]", a) else a.casefold() == b.casefold()
    if "%" in (a[-1:], b[-1:]) and _same(gold.rstrip("% "), answer.rstrip("% "), tolerance):
        return True  # 17.5 % is 17.5 here, and 0.175 below
    x, y = _value(gold), _value(answer)
    if None in (x, y):
        return False
    if not (x.is_number and y.is_number):
        return verify(x, y, allow_set_relation_comp=True, timeout_seconds=None)
    difference = (x - y).doit()
    if decimal := _DECIMAL.fullmatch(f"{gold} {answer}"):
        tolerance = max(tolerance, Rational(f"99e-{len(decimal[1]) + 2}"))
    if not difference.is_Rational:
        difference = difference.evalf(60)
        tolerance = max(tolerance, abs(x.evalf()) / 10**50)
    return bool(difference.is_finite and abs(difference) <= tolerance)


def _number(text: str) -> Rational | None:
    """Read a plain number; None if it is anything else."""
    text = _rewrite(text, _NUMBERS)
    return sum(map(Rational, text.split())) if _NUMBER.fullmatch(text) else None


def _value(text: str) -> Any:
    """The sympy expression of an answer, with decimals as fractions; None if it has none."""
    number = _number(text)
    latex = _rewrite(text, _SYMBOLS)
    if number is not None or _PROSE.search(latex):
        return number
    found = parse(f"\\boxed{{{latex}}}", [BOXED], "no_fallback", parsing_timeout=None)
    if not found:
        return None
    value = sympify(found[0])  # matrices have no `is_number`
    return nsimplify(value, rational=True) if value.is_number else value
