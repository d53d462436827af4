"""A second task for the experiments, right or wrong as in the paper (docs/results.md).

    Write one sentence about {topic} with three words that begin with the letter {letter}.

An answer earns 1 if it is one sentence, in which at least three different words begin with the letter; else 0. 16 % of
the untrained SmolLM2-135M-Instruct's answers do.
"""

import itertools
import random
import string
from typing import Any

import writing

from stapo_lite.tools.one_sentence import TOPICS, sentences

LETTERS = "abcdefghijklmnoprstw"
REQUEST = "Write one sentence about {topic} with three words that begin with the letter {letter}."


def prompts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, 300, and those held out, 100: the same for every run."""
    pairs = list(itertools.product(TOPICS, LETTERS))
    random.Random(0).shuffle(pairs)
    asked = ((REQUEST.format(topic=topic, letter=letter.upper()), {"letter": letter}) for topic, letter in pairs)
    rows = [writing.row(*one) for one in asked]
    return rows[writing.HELD_OUT :], rows[: writing.HELD_OUT]


def reward(completions: list[list[dict[str, str]]], letter: list[str], **_: Any) -> list[float]:
    """The reward function, called as TRL calls it."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(right(*one)) for one in zip(texts, letter, strict=True)]


def right(text: str, letter: str) -> bool:
    """Whether an answer has all that was asked for."""
    words = {word.strip(string.punctuation) for word in text.lower().split()}
    fitting = [word for word in words if word.startswith(letter)]
    return len(sentences(text)) == 1 and len(fitting) >= 3
