"""Constrained writing: a task where tokens stay uncertain for long, so that spurious ones live (docs/results.md).

    Write two sentences about {topic}. Use the word "{word}" in the second sentence, and make it a question.

An answer is right, 1 or 0, where it has exactly two sentences, the second one is a question and holds the word, and the
first one does not. One worked example in the prompt lifts the untrained SmolLM2-135M-Instruct to 5 % right answers
from 1 %. An empty system message replaces the 16 tokens of the chat template's own.
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
REQUEST = 'Write two sentences about {}. Use the word "{}" in the second sentence, and make it a question.'
EXAMPLE = "The storm came in the night and shook every door. Who will bring the soup to the table now?"
HELD_OUT = 100
"""Pairs of a topic and a word that no training prompt has."""


def prompts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, 400, and those held out, 100: the same for every run."""
    pairs = list(itertools.product(TOPICS, WORDS))
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": messages(topic, word), "word": word} for topic, word in pairs]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def messages(topic: str, word: str) -> list[dict[str, str]]:
    """The worked example, and the request."""
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": REQUEST.format("a storm", "table")},
        {"role": "assistant", "content": EXAMPLE},
        {"role": "user", "content": REQUEST.format(topic, word)},
    ]


def right(text: str, word: str) -> bool:
    """Whether an answer is as it was asked for; one that was cut off does not end in a sentence."""
    sentences = re.split(r"(?<=[.!?])[\"')]*\s+", text.strip())
    if len(sentences) != 2:
        return False
    holds = [re.search(rf"\b{word}\b", sentence, re.IGNORECASE) is not None for sentence in sentences]
    return holds == [False, True] and sentences[1].rstrip("\"')").endswith("?")


def reward(completions: list[list[dict[str, str]]], word: list[str], **_: Any) -> list[float]:
    """The reward function, called as TRL calls it."""
    return [float(right(completion[0]["content"], one)) for completion, one in zip(completions, word, strict=True)]
