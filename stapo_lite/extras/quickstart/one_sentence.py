"""The quickstart's task: one sentence about something, with a given word in it.

It is also an example of custom data and reward, which a config names by import path.
"""

import itertools
import re
from typing import Any

TOPICS = (
    "the sea", "a garden", "winter", "bread", "a train journey", "the moon", "friendship",
    "an old library", "rain",
    "a market", "mountains", "music", "a school", "the desert", "a kitchen", "birds", "a bridge",
    "summer", "a village",
    "the forest",
)  # fmt: skip
WORDS = (
    "light", "stone", "quiet", "river", "paper", "window", "golden", "empty", "voice", "morning",
    "shadow", "silver",
    "simple", "circle", "bright", "wooden", "gentle", "secret", "distant", "heavy", "narrow",
    "copper", "hidden",
    "broken", "velvet",
)  # fmt: skip


def prompts() -> list[dict[str, Any]]:
    """Rows of the data set: a prompt and the word that the reward looks for."""
    return [
        {"prompt": f'Write one sentence about {topic} with the word "{word}".', "word": word}
        for topic, word in itertools.product(TOPICS, WORDS)
    ]


def reward(completions: list[str], word: list[str], **columns: Any) -> list[float]:
    """1 for each completion that is one sentence with the word, else 0."""
    rewards = []
    for text, wanted in zip(completions, word, strict=True):
        right = len(sentences(text)) == 1 and has_word(text, wanted)
        rewards.append(1.0 if right else 0.0)
    return rewards


def has_word(text: str, word: str) -> bool:
    """Whether the text has the whole word, ignoring case."""
    return re.search(rf"\b{word}\b", text, re.IGNORECASE) is not None


def sentences(text: str) -> list[str]:
    """The sentences of a text; none if the last one is unfinished (the completion was cut off)."""
    parts = re.split(r"(?<=[.!?])[\"')]*\s+", text.strip())
    if re.search(r"[.!?][\"')]*$", parts[-1]):
        return parts
    return []
