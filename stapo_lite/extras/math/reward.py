"""The reward `math`."""

from collections.abc import Sequence
from typing import Any

from stapo_lite.config import Reward
from stapo_lite.extras.math.grading import MathGrader, Question
from stapo_lite.types import Completion


def math_reward(
    grader: MathGrader, settings: Reward, completions: Sequence[Completion], *_: Any
) -> list[float | None]:
    """`settings.correct` for a right final answer, else `settings.incorrect`."""
    questions = []
    for c in completions:
        # Wrong by default: otherwise all text after an early box would be reinforced. An empty
        # response is wrong without parsing.
        refused = c.truncated and settings.truncated_is_incorrect
        response = "" if refused else c.whole_text
        questions.append(Question(c.prompt.answer, response, finished=not c.truncated))
    return [
        settings.correct if right else settings.incorrect for right, _ in grader.grade(questions)
    ]
