r"""Rules that bring answers to one spelling, for `answers.py`.

An answer passes through up to three lists:

    SPELLINGS   the whole answer                  `$\dfrac12$ or 50 \%.` -> `\frac{1}{2} ¦ 50%`
    NUMBERS     each of its parts, as a number    `\frac{1}{2}` -> `1/2`
    SYMBOLS     parts that are no numbers, for    `\dot{x}` -> `x_{dt}`
                math-verify's parser

The order of rules counts: a rule may rely on the spelling that those above it leave. `Rule.example`
shows each rule alone; `tests/extras/test_answers.py` checks all examples.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 500
"""Characters of an answer that are compared; more are a proof, or endless repetition."""


class Rule(NamedTuple):
    """A regular expression, and what replaces each of its matches."""

    example: str
    """`before -> after`, by this rule alone."""
    pattern: str
    replacement: str = ""


def rewrite(text: str, rules: Sequence[Rule]) -> str:
    """Apply rules, from the first to the last."""
    for rule in rules:
        text = re.sub(rule.pattern, rule.replacement, text)
    return text


def normalise(answer: str) -> str:
    """An answer in normal spelling. `¦` separates alternatives. A line break separates two readings
    of one answer: the choice `(C) 12` is C, and it is 12."""
    text = re.sub("([⁻⁰¹²³⁴-⁹]+)", r"^{\1}", answer[:LONGEST])
    return rewrite(text.translate(SIGNS), SPELLINGS)


# Signs that are no TeX, and that math-verify does not read. Superscripts are in braces already.
SIGNS = str.maketrans(
    dict(zip("−–⁄，、（⟨）⟩⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "--/,,(())-0123456789", strict=True))  # noqa: RUF001
    | {
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "°": r"^\circ",
        "√": r"\sqrt ",
        "∞": r"\infty ",
        "±": r"\pm ",
        "·": r"\cdot ",
        "×": r"\times ",  # noqa: RUF001
        "≤": r"\le ",
        "≥": r"\ge ",
        "≈": r"\approx ",
        "∈": r"\in ",
    }
)

_SIGN = Rule(
    r"\pm\sqrt{3\pm1} -> \pm\sqrt{3+1},\pm\sqrt{3-1}",
    r"([^,;¦()\[\]]*)\\pm(?![a-z])([^,;¦()\[\]]*)",
    r"\1+\2,\1-\2",
)
_SIGN_IN_A_TUPLE = Rule(
    r"(\pm3,\pm2) -> (\pm3,+2),(\pm3,-2)",
    r"(?<![\w}])\((?=[^()]*,)([^()]*)\\pm(?![a-z])([^()]*)\)",
    r"(\1+\2),(\1-\2)",
)
SPELLINGS = [
    # Looks. An answer is one line, without spacing, delimiters, fonts, currency and Markdown.
    Rule(r"5\,000~km -> 5 000 km", r"\s*\n\s*|(?<!\\)\\[,;: >]|~", " "),
    Rule(
        r"**\$5** -> 5",
        r"(?<!\\)\\[()\[\]]|\\?[$€£¥₹¢]|\\(?:pounds|euro|cents?)(?![a-z])|\u200b|\*\*|`",
    ),
    Rule(
        r"\left(1,\!5\right) \\[4pt] -> (1,5) \\",
        r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|bf|it|rm|[lL]arge)(?![a-z])"
        r"|\\!\s*|\\color\s*\{\w+\}|(?<=\\\\)\[\w+\]",
    ),
    Rule(r"1\quad 2 -> 1, 2", r"\\q?quad(?![a-z])", ","),
    Rule(r"\langle1,2) -> (1,2)", r"\\langle", "("),
    Rule(r"(1,2\rangle -> (1,2)", r"\\rangle", ")"),
    Rule(r"90\degree -> 90^\circ", r"\\degree(?![a-z])", r"^\\circ"),
    # Text. All macros for text become \text, which stays around units and other words, but not
    # around a whole answer, lists and choices. `J` after a number is a unit, not a choice.
    Rule(r"5\mbox{ cm} -> 5\text{ cm}", r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf))\s*\{", r"\\text{"),
    Rule(r"50 \mu\text{m} -> 50\text{m}", r"(?<=[\d}])\s*(?:\\mu|[μµ])\s*(?=\\text)"),
    Rule(
        r"\text{Yes} -> Yes",
        r"^\s*\\text\{([^{}]*)\}|\\text\{([^{}]*\b(?:and|or)\b[^{}]*)\}",
        r"\1\2",
    ),
    Rule(
        r"(\text{C}) 5 \text{J} -> (C) 5 \text{J}",
        r"(?<!\d)(?<!\d[\s}])(?<!\d\}\s)\\text\{([A-J])\}|\\text\{([A-J])\}(?=_)",
        r"\1\2",
    ),
    Rule("12. -> 12", r"[\s.,;:\\]+$|(?<=[a-zA-Z]{2})!$"),
    Rule(
        r"12^{\text{th}} -> 12",
        r"(?<=\d)\s*\^?\s*(?:\{?\s*\\text)?\s*\{?\s*(?:st|nd|rd|th)\b(?:\s*\}){0,2}",
    ),
    # Words before an answer. Without them it can be read as mathematics.
    Rule("= 7 -> 7", r"(?i)^(?:.*\b(?:answer|result)\s+is:?|\s*=(?!=))\s*"),
    Rule(
        "approximately 3.14 -> 3.14",
        r"(?i)\b(?:about|approximately|exactly|only|simply|equal to)\s+(?=[-\d\\(])",
    ),
    Rule(
        "The total is 12 -> 12",
        r"(?i)^[^\d$\\]*(?:\b(?:is|are|option|choice)\b:?|[a-z]{4}:)\s*(?=[-\d$\\(]|(?-i:[A-J])\b)",
    ),
    # Conditions after an answer. References seldom have them.
    Rule(
        "x for all x, 2x -> x , 2x",
        r",?\s*(?:\\text\{\s*)?(?:\bfor (?:all|every|any|each)\b|\\forall)"
        r"[^,;=]*?(?=$|,|\band\b|\bor\b)",
        " ",
    ),
    Rule(
        r"1/s, \text{Re}(s)>0 -> 1/s",
        r"[\s,]+(?:\\text\{\s*(?:for|where)\s*\}\s*)?"
        r"\\(?:text\{\s*Re\s*\}|operatorname\{Re\}|Re)\s*\(.*$",
    ),
    Rule(
        r"2/s, \text{for }s>0 -> 2/s",
        r"[\s,]+\(?\\text\{\s*\(?(?:for|where)\b(?:(?!\b(?:and|or)\b)[^,;])*$",
    ),
    Rule(
        r"2\pi k, k\in\mathbb{Z} -> 2\pi k",
        r",\s*[a-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?(?:[_^]\S+)?\s*$",
    ),
    # Lists: `and` is a comma. `or` may also say one thing twice, so that it gets a sign of its own.
    Rule("1, 2, and 3 -> 1, 2, 3", r",?\s*(?<![a-zA-Z])and(?![a-z])", ","),
    Rule("1 or 2 -> 1 ¦ 2", r"(?<![a-zA-Z\\])or(?![a-z])|\\lor|\\vee", "¦"),
    # Macros that have several spellings, or that are written as plain text: np.arcsin, sqrt(x).
    Rule(r"x\leq 5 -> x\le 5", r"\\(le|ge|ne)q(?:slant)?(?![a-z])", r"\\\1"),
    Rule(r"\lg 2 -> \log_{10} 2", r"\\lg(?![a-z])", r"\\log_{10}"),
    Rule(r"\{\} -> \emptyset", r"\\varnothing|^\s*\\\{\s*\\\}\s*$", r"\\emptyset"),
    Rule(r"-infinity -> -\infty", r"(?<![a-zA-Z\\])inf(?:inity)?(?![a-z])", r"\\infty"),
    Rule(
        r"np.sin(2pi) -> \sin(2\pi)",
        r"(?<![a-zA-Z\\])(?<!np\.)(?:np\.)?(?=(?:arc)?(?:sqrt|pi|infty|sin|cos|tan|ln|log)(?![a-z]))",
        r"\\",
    ),
    # Fractions and roots get braces. `-3./2` is Python's, in Minerva.
    Rule(r"\dfrac{1}{2} -> \frac{1}{2}", r"\\[dtc]frac", r"\\frac"),
    Rule(
        r"\frac\pi4 -> \frac{\pi}{4}",
        r"\\frac\s*(?:\{([^{}]*)\}|(\w|\\[a-z]+))\s*(?:\{([^{}]*)\}|(\w|\\[a-z]+))",
        r"\\frac{\1\2}{\3\4}",
    ),
    Rule(
        r"\sqrt(x) + \sqrt[3]6 -> \sqrt{x} + \sqrt[3]{6}",
        r"\\sqrt\s*(\[\w+\])?\s*(?:\(([^()]*)\)|(\d+))",
        r"\\sqrt\1{\2\3}",
    ),
    Rule(r"-3./2 -> -\frac{3}{2}", r"(?<![\w.^])(\d+)\.?\s*/\s*(\d+)(?![\d.])", r"\\frac{\1}{\2}"),
    # Subscripts, superscripts, and the base of a number, which is not written if it is ten.
    Rule("(1001)_2 -> 1001_2", r"^\((\w+)\)(?=_)|(?<=\d_\{)\((\d+)\)(?=\}$)", r"\1\2"),
    Rule(r"M_\odot^6 -> M_{\odot}^6", r"_\s*(\\text\{[^{}]*\}|\\(?!text)[a-zA-Z]+)", r"_{\1}"),
    Rule("x^{2} -> x^2", r"([_^])\{(\w)\}", r"\1\2"),
    Rule("7_{10} -> 7", r"(?<=\d)_\{?\(?(?:10|\\text\{\s*(?:ten|base (?:ten|10))\s*\})\)?\}?$"),
    # Numbers: powers of ten, repeating decimals, a decimal comma, per cent.
    Rule("2E+3 -> 2e+3", r"(?<=[\d.])E(?=[+-]?\d)", "e"),
    Rule(r"5 thousand -> 5\times10^3", r"(?<=\d)\s*(\\text\{)?\s*thousand\b", r"\\times10^3\1"),
    Rule(
        r"7\text{ million years} -> 7\times10^6\text{ years}",
        r"(?<=\d)\s*(\\text\{)?\s*million\b",
        r"\\times10^6\1",
    ),
    Rule(r"5 billion -> 5\times10^9", r"(?<=\d)\s*(\\text\{)?\s*billion\b", r"\\times10^9\1"),
    Rule(
        r"6 x 10^-3 -> 6\times10^{-3}",
        r"(?<=[\d.])\s*(?:\\times|\\cdot|[*x])\s*10\s*\^\s*\{?\s*([+-]?\s*\d+)(?:\s*\})?",
        r"\\times10^{\1}",
    ),
    Rule(
        r"0.1\overline{6} -> 0.16666666",
        r"(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}",
        r"\1.\2\3\3\3\3\3\3\3",
    ),
    Rule("1000,99 -> 1000.99", r"^\s*(?:(\d{4,}),(\d{1,2})|(0),(\d{3,}))\s*$", r"\1\3.\2\4"),
    Rule(
        r"28 \% -> 28%", r"\s*(?:\\?%|\\text\{\s*percent\w*\s*\}|\bpercent(?:age)?\b|\bpct\b)", "%"
    ),
    # Names before a value, and a rounded value after it. References have the exact value alone.
    Rule("(x,y) = (1,2) -> (1,2)", r"(?<![\w)}])\([^()=]*,[^()=]*\)\s*=\s*(?=[(\[])"),
    Rule(
        r"d_1\approx1.6 -> 1.6",
        r"(?:^|(?<=[,;]))(?:[^\d=,;]*|\s*\\?[a-zA-Z]+_(?:\w|\{[^{}]*\})\s*)\\approx",
    ),
    Rule(r"2\pi\text{ m} \approx 6.3 -> 2\pi\text{ m}", r"(?<=\S)\s*\\approx[^,;]*$"),
    Rule(r"f(x)=\pm x -> \pm x", r"^\s*[a-z]\([a-z]\)\s*=\s*(?=\\pm)"),
    # Sets and intervals. A set is a list of its elements. math-verify cannot read `f(x)\in`.
    Rule(r"f(x)\in(0,1] -> x\in(0,1]", r"^\s*[a-zA-Z]+\([^()]*\)\s*(?=\\in(?![a-z]))", "x"),
    Rule(
        r"x\in\{1,2\} -> 1,2",
        r"^\s*(?:[a-z]\s*\\in\s*)?(?:\\\{((?:(?!\\\}).)*)\\\}|\{([^{}]*)\})\s*$",
        r"\1\2",
    ),
    # Choices. A choice with its value has two readings, but `(C) (D)` names two choices. `e` is a
    # number.
    Rule(
        "(A), (C) -> A, C",
        r"^\s*([A-Ja-df-h])\)$|(?<![^,\s])\(\s*([A-Ja-df-h])\s*\)(?=\s*(?:[,¦]|$))",
        r"\1\2",
    ),
    Rule("(C) Paris -> C\nParis", r"^\s*\(?([A-Ja-df-h])[).:]\s*(?!.*\b[A-J]\b)(\S.*)", r"\1\n\2"),
    # Several signs: a list of all values, since references write either. An answer may have two.
    Rule(
        r"(2\pm1,2\mp1) -> (2+1,2-1),(2-1,2+1)",
        r"(?<![\w}])\((?=[^()]*,)([^()]*)\\pm([^()]*)\\mp([^()]*)\)",
        r"(\1+\2-\3),(\1-\2+\3)",
    ),
    _SIGN_IN_A_TUPLE,
    _SIGN_IN_A_TUPLE,
    _SIGN,
    _SIGN,
]

# Units are dropped, not converted. A letter alone is one only in \text{}: `4h^2` is an expression.
UNITS = [
    Rule(
        r"300\frac{\text{km}}{\text{s}} -> 300",
        r"(?<=[\d})])\s*\\frac(?:\{(?:(?:\\text\{[^{}\d]*\}|(?<=\{)[A-J])(?:\^\d)?[\s/]*)+\}){2}$",
    ),
    Rule(
        r"9 \text{g} \cdot \text{cm}^{-3} -> 9",
        r"(?:(?<=[\d})])|(?<=\\pi))\s*/?\s*(?:(?:\\cdot\s*)?"
        r"\\text\{(?:[^{}\d]|[_^]\{?-?\d\}?)*\}(?:[_^](?:\w|\{[^{}]*\}))?[\s/]*)+$",
    ),
    Rule(
        r"\frac{1}{2} square feet -> \frac{1}{2}", r"(?<=[\d}])\s+[a-zA-Z]{4,}(?:[a-zA-Z\s]|\^\d)*$"
    ),
    Rule(r"25^\circ C -> 25", r"\s*\^\s*\{?\\circ\s*\}?\s*(?:[CF]|\\text\{[^{}]*\})?$"),
]

NUMBERS = [
    *UNITS,
    Rule("- 1,234 -> -1234", r"(?<=\d)(?<!\d{4})(?:,|\{,\}|\s)(?=\d{3}(?!\d))|(?<=^[+-])\s+"),
    Rule(r"4\times10^{33} -> 4e33", r"\s*\\times10\^\{([+-]?\d+)\}", r"e\1"),
    # Units without \text, which only a number shows to be units.
    Rule(
        "10 m/s^2 -> 10",
        r"(?<=\d)\s*(?:(?:[kMG]?(?:eV|Hz|Pa)|[kcmn][mgs]|erg|Å|\\AA|(?<=[\s/])[mgsKJNWVACTL])"
        r"(?:\^\{?-?\d\}?)?[\s/]*)+$",
    ),
    Rule("12 per day -> 12", r"(?<=\d)\s+(?:ft|in|oz|lb|hr|km/h|[a-z]{3}[a-z\s]*)(?:\^\d)?$"),
    Rule(r"15 L_{\odot} -> 15", r"(?<=\d)\s*(?:[LMR]_\{?\\odot\}?|\^?\{?(?:\\prime\s*|')+\}?)$"),
    # What Python's fractions can read; of a mixed number, the sum of two.
    Rule("75% -> 75e-2", r"%$", "e-2"),
    Rule(r"-1\frac{1}{2} -> -1 -1/2", r"^(-?)(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"\1\2 \1\3/\4"),
    Rule(r"-\frac{1}{2} -> -1/2", r"^([+-]?)\\frac\{([+-]?\d+)\}\{(\d+)\}", r"\1\2/\3"),
]

SYMBOLS = [
    *UNITS,
    # math-verify takes one digit after a brace for the denominator of a fraction before it.
    Rule(r"\frac{3}{2} 10^5 -> \frac{3}{2}{10}^5", r"\}\s*(\d[\d.]*\d)", r"}{\1}"),
    # A derivative is a symbol of its own, however it is written: math-verify drops the dots.
    Rule(
        r"\frac{d^2 x}{d t^2} -> x_{ddt}",
        r"\\frac\{d\^2\s*(\\[a-z]+|\w)(?:_(\w))?\s*\}\{d\s*(\w)\^2\}",
        r"\1_{dd\3\2}",
    ),
    Rule(r"y^{\prime} -> y'", r"\^\s*\{?\\prime\s*\}?", "'"),
    Rule(
        r"\ddot{x}_0 + y'' -> x_{ddt0} + y_{ddt}",
        r"\\ddot\s*\{?\s*(\\[a-z]+|\w)\s*\}?(?:_(\w))?|([a-zA-Z])''(?!')",
        r"\1\3_{ddt\2}",
    ),
    Rule(r"\frac{d v}{d t} -> v_{dt}", r"\\frac\{d\s*(\\[a-z]+|\w)\}\{d\s*(\w)\}", r"\1_{d\2}"),
    Rule(
        r"\dot{x}_0 + y' -> x_{dt0} + y_{dt}",
        r"\\dot\s*\{?\s*(\\[a-z]+|\w)\s*\}?(?:_(\w))?|([a-zA-Z])'",
        r"\1\3_{dt\2}",
    ),
    # The constant of integration has no case.
    Rule(
        "C e^{-2t} -> c e^{-2t}",
        r"(?<![\\a-zA-Z_])C(?=(?:_\d|_\{\d\})?\s*(?:e\s*\^|\\(?:cos|sin)|x\s*\^|\}\{x\s*\^))",
        "c",
    ),
    # The parser makes capitals small, so that `E` would be Euler's number. They get new names.
    Rule(
        r"M_{\odot} E_{\text{max}} -> M_{odot} E_{max}",
        r"_\s*\{\\text\{\s*(\w+)\s*\}\}|_\s*\{\\(\w+)\}",
        r"_{\1\2}",
    ),
    Rule(
        r"E_1 + \Omega -> q_{uE1} + q_{uOmega}",
        r"(?:\\([A-Z][a-z]+)|(?<!bb\{)(?<![\\_])(?<!_\{)([A-Z]))(?:_\{(\w+)\}|_(\w))?",
        r"q_{u\1\2\3\4}",
    ),
    # The imaginary unit.
    Rule("1+2i -> 1+2{I}", r"(?<![\\_])(?<!\\[a-zA-Z])(?<![a-zA-Z]{2})i(?![a-zA-Z]{2})", "{I}"),
]
