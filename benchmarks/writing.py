"""Constrained writing: a task where tokens stay uncertain for long, so that spurious ones live (docs/results.md).

    Write two sentences about {topic}, the first one of {n} words, the second one of {m} words. Use the word "{word}" in
    the second one.

An answer that is not exactly two sentences earns 0. One that is earns a quarter, a quarter where the word stands in the
second sentence and not in the first, and for each sentence a quarter over one more than the words that it has too many
or too few. The untrained SmolLM2-135M-Instruct writes two sentences in 16 % of its answers, a quarter of them with the
word where it belongs. Numbers of words, 6 to 14, are drawn for each prompt, so that no one phrase earns all: an easier
task, which asked for equal numbers and a question, ended in questions such as "What is a bridge? What is a heavy?" with
both methods that were tried (results/pilot). An answer with the word in its place still earns 0.70 on the held-out
prompts if it ignores the numbers and has 8 and 11 words. An empty system message replaces the 16 tokens of the chat
template's own.
"""

import itertools
import random
from typing import Any

from stapo_lite.tools.one_sentence import TOPICS, WORDS, has_word, sentences

REQUEST = (
    "Write two sentences about {topic}, the first one of {first} words, the second one of {second} words. "
    'Use the word "{word}" in the second one.'
)
HELD_OUT = 100
"""Pairs of a topic and a word that no training prompt has."""


def prompts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, 400, and those held out, 100: the same for every run."""
    generator = random.Random(0)
    pairs = list(itertools.product(TOPICS, WORDS))
    generator.shuffle(pairs)
    rows = []
    for topic, word in pairs:
        asked = {"word": word, "first": generator.randint(6, 14), "second": generator.randint(6, 14)}
        rows.append(row(REQUEST.format(topic=topic, **asked), asked))
    return rows[HELD_OUT:], rows[:HELD_OUT]


def row(request: str, columns: dict[str, Any]) -> dict[str, Any]:
    """A row of the data: messages and what the reward needs."""
    return {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": request}]} | columns


def score(text: str, word: str, first: int, second: int) -> float:
    """The reward of an answer, from 0 to 1."""
    found = sentences(text)
    if len(found) != 2:
        return 0.0
    holds = [has_word(sentence, word) for sentence in found]
    off = [abs(len(s.split()) - asked) for s, asked in zip(found, (first, second), strict=True)]
    return (1 + (holds == [False, True]) + 1 / (1 + off[0]) + 1 / (1 + off[1])) / 4


def reward(
    completions: list[list[dict[str, str]]], word: list[str], first: list[int], second: list[int], **_: Any
) -> list[float]:
    """The reward function, called as TRL calls it."""
    texts = [completion[0]["content"] for completion in completions]
    return [score(*one) for one in zip(texts, word, first, second, strict=True)]
