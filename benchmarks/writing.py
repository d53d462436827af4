"""Constrained writing: a task where tokens stay uncertain for long, so that spurious ones live (docs/results.md).

    Write two sentences about {topic} in the same number of words. Use the word "{word}" in the second one, and make it
    a question.

An answer that is not exactly two sentences earns 0; one that is earns a quarter, and a quarter for each of the others:
the word stands in the second sentence and not in the first, the second is a question, both have as many words. The
untrained SmolLM2-135M-Instruct writes two sentences in 20 % of its answers, of which a fifth have the word where it
belongs, an eighth are questions and one in 25 counts right. The first three are learned soon; counting is not, so that
rewards still differ when a run ends. An empty system message replaces the 16 tokens of the chat template's own.
"""

import itertools
import random
import re
from typing import Any

TOPICS = (
    "the sea", "a garden", "winter", "bread", "a train journey", "the moon", "friendship", "an old library", "rain",
    "a market", "mountains", "music", "a school", "the desert", "a kitchen", "birds", "a bridge", "summer", "a village",
    "the forest",
)  # fmt: skip
WORDS = (
    "light", "stone", "quiet", "river", "paper", "window", "golden", "empty", "voice", "morning", "shadow", "silver",
    "simple", "circle", "bright", "wooden", "gentle", "secret", "distant", "heavy", "narrow", "copper", "hidden",
    "broken", "velvet",
)  # fmt: skip
REQUEST = (
    "Write two sentences about {} in the same number of words. "
    'Use the word "{}" in the second one, and make it a question.'
)
HELD_OUT = 100
"""Pairs of a topic and a word that no training prompt has."""


def prompts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, 400, and those held out, 100: the same for every run."""
    pairs = list(itertools.product(TOPICS, WORDS))
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": messages(topic, word), "word": word} for topic, word in pairs]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def messages(topic: str, word: str) -> list[dict[str, str]]:
    """The request."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": REQUEST.format(topic, word)}]


def score(text: str, word: str) -> float:
    """Quarters for what an answer has of what it was asked for; one that was cut off does not end in a sentence."""
    sentences = re.split(r"(?<=[.!?])[\"')]*\s+", text.strip())
    if len(sentences) != 2 or not re.search(r"[.!?][\"')]*$", sentences[1]):
        return 0.0
    holds = [re.search(rf"\b{word}\b", sentence, re.IGNORECASE) is not None for sentence in sentences]
    asks = sentences[1].rstrip("\"')").endswith("?")
    first, second = (len(sentence.split()) for sentence in sentences)
    return (1 + (holds == [False, True]) + asks + (first == second)) / 4


def reward(completions: list[list[dict[str, str]]], word: list[str], **_: Any) -> list[float]:
    """The reward function, called as TRL calls it."""
    return [score(completion[0]["content"], one) for completion, one in zip(completions, word, strict=True)]
