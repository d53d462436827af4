"""The task of the experiments: constrained writing (docs/results.md). Tokens stay uncertain for
long, so spurious tokens keep occurring.

    Write two sentences about {topic}, the first one of {n} words, the second one of {m} words. Use
    the word "{word}" in the second one.

An answer that is not exactly two sentences earns 0. Two sentences earn 1/4, another 1/4 if the word
is in the second sentence and not in the first, and for each sentence 1/4 / (1 + d), if it has d
words too many or too few. The untrained SmolLM2-135M-Instruct writes two sentences in 16 % of its
answers, and a quarter of these have the word in its place.

The numbers of words, 6 to 14, are drawn for each prompt, so that no single phrase earns everything.
An easier pilot task asked for equal numbers and a question, and both methods that were tried ended
in questions such as "What is a bridge? What is a heavy?". Here an answer with the word in its place
that ignores the numbers still earns 0.70 on the held-out prompts if it has 8 and 11 words. An empty
system message replaces the 16 tokens of the chat template's own.
"""

import itertools
import random
from typing import Any

from stapo_lite.extras.quickstart.one_sentence import TOPICS, WORDS, has_word, sentences

REQUEST = (
    "Write two sentences about {topic}, the first one of {first} words, the second one of {second} "
    "words. "
    'Use the word "{word}" in the second one.'
)
HELD_OUT = 100
"""Number of held-out prompts; no training prompt has their pair of topic and word."""


def prompts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return 400 training rows and 100 held-out rows, the same for every run."""
    generator = random.Random(0)
    pairs = list(itertools.product(TOPICS, WORDS))
    generator.shuffle(pairs)
    rows = []
    for topic, word in pairs:
        asked = {
            "word": word,
            "first": generator.randint(6, 14),
            "second": generator.randint(6, 14),
        }
        rows.append(row(REQUEST.format(topic=topic, **asked), asked))
    return rows[HELD_OUT:], rows[:HELD_OUT]


def row(request: str, columns: dict[str, Any]) -> dict[str, Any]:
    """A row of the data: messages, and the columns that the reward function takes."""
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": request}]
    return {"prompt": messages} | columns


def score(text: str, word: str, first: int, second: int) -> float:
    """The reward of an answer, from 0 to 1."""
    found = sentences(text)
    if len(found) != 2:
        return 0.0
    holds = [has_word(sentence, word) for sentence in found]
    off = [abs(len(s.split()) - asked) for s, asked in zip(found, (first, second), strict=True)]
    in_place = holds == [False, True]
    return (1 + in_place + 1 / (1 + off[0]) + 1 / (1 + off[1])) / 4


def reward(
    completions: list[list[dict[str, str]]],
    word: list[str],
    first: list[int],
    second: list[int],
    **_: Any,
) -> list[float]:
    """The reward function, called as TRL calls it."""
    texts = [completion[0]["content"] for completion in completions]
    return [score(*one) for one in zip(texts, word, first, second, strict=True)]
