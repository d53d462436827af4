r"""Rules that normalise the spelling of answers before they are compared.

Each rule is a pattern and a replacement for `re.sub`. The rules of a table apply from top to
bottom. Those of `SPELLINGS` come with an example and its result under that rule alone.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|"
    r"sigma|tau|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)"
    r"(?![a-zA-Z])"
)
TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mbox|math(?:rm|bf|it))\s*\{"
STYLES = r"\\(?:small|large|Large|LARGE|huge|Huge|bf|it|rm|underline)(?![a-zA-Z])"
TEN_TO = r"(?:\\times|\\cdot|\*|x|×|·)\s*10\s*\^"  # noqa: RUF001
ANOTHER = r"\b(?:and|or)\b|[;=]|,(?!\s*[a-z]\s*(?:,|\\in|\\text|[<>]|$))"
"""Text after `for all n` that may begin another answer."""

OTHERS = {
    "、": ",",
    "–": "-",  # noqa: RUF001
    "\N{NO-BREAK SPACE}": " ",
    "\N{NARROW NO-BREAK SPACE}": " ",
    "\N{ZERO WIDTH SPACE}": "",
    "∞": r"\infty ",
    "²": "^{2}",
    "³": "^{3}",
    "½": r"\frac{1}{2}",
}
PLAIN = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | str.maketrans(OTHERS)
"""Maps full-width characters, and others that models write, to ASCII and LaTeX."""

SPELLINGS = [
    # pattern, what it becomes, an example, its result
    (r"(?<!\\)\$|\\displaystyle(?![a-zA-Z])", "", r"\displaystyle $5$", " 5"),
    (r"√\s*(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt{\1\2}", "√(x+1)", r"\sqrt{x+1}"),
    # row spacing of a matrix
    (r"\\\\\[[^\]]*\]", r"\\\\", r"1\\[4pt]2", r"1\\2"),
    # doubly escaped backslashes
    (r"\\\\(?=[a-zA-Z])(?!.*matrix)", r"\\", r"\\frac12", r"\frac12"),
    (TEXT, r"\\text{", r"5 \mathrm{cm}", r"5 \text{cm}"),
    (r"\\text\{\s*(and|or)\b([^{}]*)\}", r" \1 \2 ", r"5 \text{ or 6}", "5  or  6 "),
    (r"\\(?:lor|vee)(?![a-zA-Z])", " or ", r"1 \lor 2", "1  or  2"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset", r"\varnothing", r"\emptyset"),
    (rf"{STYLES}|\\(?:text)?color\s*\{{\w+\}}", "", r"\color{blue}{\bf 12}", "{ 12}"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", r"\frac 59", r"\frac{5}{9}"),
    (rf"\\frac\s*(\\pi(?![a-zA-Z])|{GREEK})\s*", r"\\frac{\1}", r"\frac\pi 4", r"\frac{\pi}4"),
    (
        rf"(\\frac\s*(?:\{{[^{{}}]*\}}|\w))\s*(\\pi(?![a-zA-Z])|{GREEK})",
        r"\1{\2}",
        r"\frac{2}\omega",
        r"\frac{2}{\omega}",
    ),
    # e-notation (Minerva)
    (
        r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?!\w|\.\d)",
        r"\1\\times 10^{\2}",
        "4.5e33",
        r"4.5\times 10^{33}",
    ),
    (
        rf"(?<=[\d.])\s*{TEN_TO}\s*\{{?\s*([+-]?\d+)\s*\}}?",
        r"\\times 10^{\1}",
        "1.04 x 10^-3",
        r"1.04\times 10^{-3}",
    ),
    # numpy functions and points without decimals (Minerva)
    (r"(?<![a-zA-Z\\])np\.", r"\\", "np.arcsin(x)", r"\arcsin(x)"),
    (r"(?<=\d)\.(?=/)", "", "-3./2", "-3/2"),
    # x/2, not 1/(2x)
    (
        r"(?<![\w.^{(])(\d+)/(\d+)(?=\s*\\(?:pi|sqrt)|\s+[a-z](?![a-z]))",
        r"\\frac{\1}{\2} ",
        "1/2 x",
        r"\frac{1}{2}  x",
    ),
    # conditions on variables (OlympiadBench), but nothing that may be another answer
    (
        rf",?\s*(?:\\text\{{\s*)?(?:for (?:all|every|any|each)\b|\\forall)(?:(?!{ANOTHER}).)*",
        " ",
        "f(n)=n for all n, f(n)=0",
        "f(n)=n , f(n)=0",
    ),
    (
        r",\s*[a-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?(?:[_^](?:\{[^{}]*\}|\S))*",
        "",
        r"2\pi k, k \in \mathbb{Z}^+",
        r"2\pi k",
    ),
]

MARKUP = [
    (r"\\text\{([^{}]*)\}", r"\1"),
    (r"\\(?:left|right|[bB]ig+[lr]?)(?![a-zA-Z])|\\!", ""),
    (r"\\[,;: ]|~", " "),
    (r"(?<!\d)\s+|\s+(?!\d)", ""),  # `1 1/2` is not `11/2`
    (r"^\(([A-Z])\)$", r"\1"),  # a choice
    (r"([_^])\{(\w)\}", r"\1\2"),
]
"""Markup that shows nothing."""

NUMBERS = [
    (r"\\!\s*|\{(?=,\})|(?<=,)\}", ""),  # thousands: 12,\!345 and 12{,}345
    (r"\\[,;: ]|~", " "),
    (r"^\s*\\\$", ""),
    (r"(?<![\d,])\s+|\s+(?!\d)", ""),
    (r"\\frac\{([+-]?\d+)\}\{(\d+)\}", r" \1/\2 "),  # mixed numbers, too: 1\frac{1}{2}
    (r"^([+-]?) ", r"\1"),
    (r"\s+$", ""),
]
"""Spellings of plain numbers."""


def rewrite(text: str, rules: Iterable[tuple[str, ...]]) -> str:
    """Apply a table of rules."""
    for pattern, replacement, *_ in rules:
        text = re.sub(pattern, replacement, text)
    return text


@lru_cache(maxsize=4096)  # every sample repeats the same gold
def respell(answer: str) -> str:
    """Normalise an answer to the spelling that comparisons expect."""
    return rewrite(answer.translate(PLAIN), SPELLINGS).strip().rstrip(" .,;:\\")


def plain_key(text: str) -> str:
    """Remove markup that shows nothing, for a literal comparison."""
    return rewrite(text, MARKUP)
