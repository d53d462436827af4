"""Countdown in miniature, a task in the paper's regime: the model is sure and slips are rare.

    use 4 9 6 to make 30 :  try 4 + 9 = 13 then + 6 = 19 no , try 4 * 9 = 36 then - 6 = 30 yes

Three numbers and a target; a number is one token. An answer is a chain of attempts, and is right
if the last one takes the three numbers once each, is true, ends in the target and says so. What an
earlier attempt got wrong does no harm, so that slips occur in rewarded answers, as in the paper.

`trace` draws answers to pre-train on (`countdown_model.py`): some attempts that fail, then one that
succeeds, in varying words, with a small share of tokens replaced at random.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

NUMBERS = range(1, 10)
LARGEST = 60
"""The largest result of an attempt; results are not negative."""
OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
OPENERS = {"try": 0.6, "maybe": 0.15, "take": 0.15, "say": 0.1}
LINKS = {"then": 0.8, "next": 0.2}
FAILED = {"no": 0.6, "nope": 0.2, "bad": 0.1, "wrong": 0.1}
SUCCESS = {"yes": 0.7, "done": 0.3}
"""Words with their probabilities in the traces."""
SPECIAL = ("<pad>", "<eos>")
VOCABULARY = (
    *SPECIAL,
    *("use", "to", "make", ":", "=", ","),
    *OPERATORS,
    *(*OPENERS, *LINKS, *FAILED, *SUCCESS),
    *map(str, range(LARGEST + 1)),
)
NOISE = 0.002
"""Share of the tokens of a trace that are replaced at random."""
HELD_OUT = 300
"""Number of held-out puzzles."""
ATTEMPT = 11
"""Words of an attempt, from its first number to its verdict."""


class Attempt(NamedTuple):
    """((a operator b) second_operator c), and the value of both."""

    a: int
    operator: str
    b: int
    between: int
    second_operator: str
    c: int
    result: int


def attempts(numbers: tuple[int, int, int]) -> list[Attempt]:
    """Every attempt with three numbers, in a fixed order."""
    found = set()
    for a, b, c in itertools.permutations(numbers):
        for first, second in itertools.product(OPERATORS, repeat=2):
            between = OPERATORS[first](a, b)
            result = OPERATORS[second](between, c)
            if 0 <= between <= LARGEST and 0 <= result <= LARGEST:
                found.add(Attempt(a, first, b, between, second, c, result))
    return sorted(found)


def prompts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training rows and the held-out rows, the same for every run."""
    generator, rows = random.Random(0), []
    for numbers in itertools.combinations_with_replacement(NUMBERS, 3):
        for target in sorted({attempt.result for attempt in attempts(numbers)}):
            order = generator.sample(numbers, 3)
            prompt = f"use {order[0]} {order[1]} {order[2]} to make {target} :"
            rows.append({"prompt": prompt, "numbers": order, "target": target})
    generator.shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def trace(row: dict[str, Any], generator: random.Random, noise: float = NOISE) -> list[str]:
    """An answer to pre-train on: up to four attempts that fail, then one that succeeds."""
    right, wrong = [], []
    for attempt in attempts(tuple(row["numbers"])):
        (right if attempt.result == row["target"] else wrong).append(attempt)
    failed = generator.sample(wrong, min(len(wrong), generator.randrange(5)))
    words = []
    for attempt in failed:
        words += [*spell(attempt, generator), choose(FAILED, generator), ","]
    words += [*spell(generator.choice(right), generator), choose(SUCCESS, generator)]
    for place in range(len(words)):
        if generator.random() < noise:
            words[place] = generator.choice(VOCABULARY[len(SPECIAL) :])
    return words


def spell(attempt: Attempt, generator: random.Random) -> Iterator[str]:
    """The words of an attempt, up to its result."""
    a, operator, b, between, second_operator, c, result = map(str, attempt)
    yield from (choose(OPENERS, generator), a, operator, b, "=", between)
    yield from (choose(LINKS, generator), second_operator, c, "=", result)


def choose(words: dict[str, float], generator: random.Random) -> str:
    """One of the words, by their probabilities."""
    return generator.choices(list(words), list(words.values()))[0]


def is_right(text: str, numbers: list[int], target: int) -> bool:
    """Whether the last attempt of an answer uses the numbers, is true and ends in the target."""
    words = text.split()
    if len(words) <= ATTEMPT or words[-1] not in SUCCESS:
        return False
    a, operator, b, equals, between, link, second_operator, c, *end = words[-ATTEMPT:]
    known = {operator, second_operator} <= OPERATORS.keys() and link in LINKS
    if not known or not all(word.isdigit() for word in (a, b, between, c, end[1])):
        return False
    attempt = Attempt(int(a), operator, int(b), int(between), second_operator, int(c), int(end[1]))
    true = attempt in attempts((attempt.a, attempt.b, attempt.c))
    uses = sorted(numbers) == sorted((attempt.a, attempt.b, attempt.c))
    return true and uses and equals == end[0] == "=" and attempt.result == target


def reward(
    completions: list[str], numbers: list[list[int]], target: list[int], **_: Any
) -> list[float]:
    """The reward function, called as TRL calls it."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(is_right(*row)) for row in rows]
