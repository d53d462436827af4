"""The second task of the experiments: an answer is right or wrong, as in the paper
(docs/results.md).

    Write one sentence about {topic} with three words that begin with the letter {letter}.

An answer earns 1 if it is one sentence in which at least three different words begin with the
letter, and 0 otherwise. The untrained SmolLM2-135M-Instruct earns 1 with 16 % of its answers.
"""

import itertools
import random
import string
from typing import Any

import writing

from stapo_lite.extras.quickstart.one_sentence import TOPICS, sentences

LETTERS = "abcdefghijklmnoprstw"
REQUEST = "Write one sentence about {topic} with three words that begin with the letter {letter}."


def prompts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return 300 training rows and 100 held-out rows, the same for every run."""
    pairs = list(itertools.product(TOPICS, LETTERS))
    random.Random(0).shuffle(pairs)
    rows = []
    for topic, letter in pairs:
        request = REQUEST.format(topic=topic, letter=letter.upper())
        rows.append(writing.row(request, {"letter": letter}))
    return rows[writing.HELD_OUT :], rows[: writing.HELD_OUT]


def reward(completions: list[list[dict[str, str]]], letter: list[str], **_: Any) -> list[float]:
    """The reward function, called as TRL calls it."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(right(*one)) for one in zip(texts, letter, strict=True)]


def right(text: str, letter: str) -> bool:
    """Whether an answer is one sentence with three words that begin with the letter."""
    words = {word.strip(string.punctuation) for word in text.lower().split()}
    fitting = [word for word in words if word.startswith(letter)]
    return len(sentences(text)) == 1 and len(fitting) >= 3
