"""Why a run cannot learn: what its first completions show, and what its reward says to answers that
nobody sampled. No model is asked.

A trial update, the noise of the gradient or a probe of the rate say nothing in one batch: for a
random reward they look as they do for a healthy run. So none of them is here.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import pandas as pd

from stapo_lite.config import Config
from stapo_lite.data.messages import prompt_text
from stapo_lite.data.prompts import find_answer, is_answer
from stapo_lite.data.texts import set_text
from stapo_lite.errors import one_line
from stapo_lite.training.log import shorten
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Prompt

logger = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What some groups of completions show. NaN if there is no value: no comparison with it holds.
    Means are rounded, so that equal rewards are equal."""

    abstained: float
    """Share of completions without a reward."""
    distinct: float
    """Different texts of a group, as a share of its completions; mean over the groups."""
    signal: float
    """Share of the groups with different rewards."""
    values: float
    """Number of different rewards."""
    reward: float
    """Their mean."""
    by_length: float
    """Correlation of reward and length within groups."""
    truncated: float
    """Share of completions that were cut off."""
    empty: float = math.nan
    """Mean reward of an empty answer."""
    reference: float = math.nan
    """Mean reward of the reference answer. If it is known, `reward` and `empty` are means over the
    same prompts."""
    below: float = math.nan
    """Share of these prompts whose best answer earns less than the reference."""
    changed: float = math.nan
    """Share of completions that get another reward when they are scored again."""


class Rule(NamedTuple):
    holds: Callable[[Any], bool]
    text: str
    """The likely cause, and the keys to change. In braces are figures of the facts."""


CAUSES = {
    "abstains": Rule(
        lambda f: f.abstained > 0.9,
        "reward.functions give no score to {abstained:.0%} of the answers: see the warnings above, "
        "and check that a function returns numbers",
    ),
    "same_answers": Rule(
        lambda f: f.signal < 0.25 and f.distinct < 0.5,
        "only {distinct:.0%} of a group's answers differ, so that there is nothing to compare: "
        "raise rollout.temperature",
    ),
    "ignores_answer": Rule(
        lambda f: f.values == 1 and f.empty == f.reward and not f.below > 0.5,
        "every answer earns {reward:.3g}, and so does an empty one: reward.functions do not read "
        "the answer, or none is ever right",
    ),
    "never_right": Rule(
        lambda f: f.signal < 0.05 and f.below > 0.5,
        "the answers earn {reward:.3g}, the reference {reference:.3g}: they are too hard "
        "(data.source, rollout.max_completion_length), in a form that reward.functions do not "
        "read (data.prompt_suffix), or the rows have each other's answers (data.answer_column)",
    ),
    "reads_prompt": Rule(
        lambda f: f.signal < 0.05 and f.values > 1,
        "rewards differ between prompts, but all answers to one prompt earn the same: "
        "reward.functions read the prompt alone, or each prompt is too easy or too hard",
    ),
    "equal_rewards": Rule(
        lambda f: f.signal < 0.05,
        "every answer earns {reward:.3g}: too easy, too hard, or reward.functions do not read the "
        "answer (reward.probe=on may tell)",
    ),
}
"""Name -> sign and likely cause of a run that does not learn. The first that holds counts."""

NOTES = {
    "rewards_length": Rule(
        lambda f: abs(f.by_length) > 0.95,
        "within a group, reward and length correlate by {by_length:+.2f}: reward.functions "
        "measure little but length",
    ),
    "reference_is_worse": Rule(
        lambda f: f.reference < f.reward,
        "the reference answer earns {reference:.3g}, the model's answers {reward:.3g}: "
        "reward.functions have the wrong sign, or do not read the form of data.answer_column",
    ),
    "rewards_change": Rule(
        lambda f: f.changed > 0,
        "{changed:.0%} of the answers earn something else when they are scored again: "
        "reward.functions draw at random, keep a state, or compare the answers of a batch",
    ),
    "cut_off": Rule(
        lambda f: f.truncated > 0.5,
        "{truncated:.0%} of the answers are cut off: rollout.max_completion_length is short",
    ),
}
"""Name -> what a run should know that learns all the same, perhaps not what was meant."""


def look(groups: Sequence[Sequence[Completion]]) -> Facts:
    """The facts about sampled groups, without their reward functions."""
    rows = [
        {"group": number, "text": c.text, "truncated": c.truncated, "tokens": len(c.token_ids)}
        for number, group in enumerate(groups)
        for c in group
    ]
    table = pd.DataFrame(rows).assign(reward=rewards_of(chain(*groups)))
    grouped = table.groupby("group")
    values = grouped.reward.nunique()  # 0 in a group without rewards
    numbers = table[["reward", "tokens"]]
    within = numbers - numbers.groupby(table.group).transform("mean")
    return Facts(
        abstained=table.reward.isna().mean(),
        distinct=(grouped.text.nunique() / grouped.size()).mean(),
        signal=(values[values > 0] > 1).mean(),
        values=table.reward.nunique(),
        reward=rounded_mean(table.reward),
        by_length=within.reward.corr(within.tokens),
        truncated=table.truncated.mean(),
    )


def ask(facts: Facts, run: Run, groups: Sequence[Sequence[Completion]]) -> Facts:
    """Add what the reward functions say, in one call, to an empty answer and the reference of each
    prompt, and to all completions once more. If they fail, the facts stay as they are."""
    made = []
    for group in groups:
        prompt = replace(group[0].prompt, live={})
        texts = ["", *reference_answers(prompt, run.config)]
        made.append([write(prompt, text, run.tokenizer) for text in texts])
    before = list(chain(*groups))
    again = [replace(completion) for completion in before]
    step = run.progress.step
    try:
        run.rewards.score([*chain(*made), *again], seed=step, step=step)
    except Exception as error:
        logger.warning("reward.probe: the reward functions fail (%s)", one_line(error))
        return facts
    asked = pd.DataFrame(
        {
            "reward": [rewards_of(group).mean() for group in groups],
            "best": [rewards_of(group).max() for group in groups],
            "empty": [rewards_of(texts[:1]).mean() for texts in made],
            "reference": [rewards_of(texts[1:]).max() for texts in made],
        }
    )
    known = asked.dropna()
    same = known if len(known) else asked
    changed = [
        old.reward != new.reward
        for old, new in zip(before, again, strict=True)
        if old.scores.keys() == new.scores.keys()  # a function failed, or abstained
    ]
    return facts._replace(
        reward=rounded_mean(same.reward),
        empty=rounded_mean(same["empty"]),
        reference=rounded_mean(same.reference),
        below=(known.best < known.reference).mean(),
        changed=pd.Series(changed, dtype=float).mean(),
    )


def rewards_of(completions: Iterable[Completion]) -> pd.Series:
    """Their rewards; NaN where there is none."""
    return pd.Series([completion.reward for completion in completions], dtype=float)


def rounded_mean(values: pd.Series) -> float:
    return float(f"{values.mean():.9g}")


def reference_answers(prompt: Prompt, config: Config) -> list[str]:
    """The row's answer, and for `math`, which reads most references in a box only, also in one;
    empty if the row has none."""
    answer = find_answer(prompt.columns, config.data.answer_column)
    if not is_answer(answer):
        return []
    boxed = [f"\\boxed{{{answer}}}"] if "math" in config.reward.functions else []
    return [str(answer), *boxed]


def write(prompt: Prompt, text: str, tokenizer: Any) -> Completion:
    """A completion that nobody sampled."""
    if prompt.opens_thinking:  # a grader looks behind it
        text = f"</think>\n\n{text}"
    ids = tokenizer(text + (tokenizer.eos_token or ""), add_special_tokens=False).input_ids
    completion = Completion(prompt, ids, [0.0] * len(ids), truncated=False, adapter_version=0)
    set_text(completion, tokenizer, skip_special_tokens=None)
    return completion


def example(group: Sequence[Completion], config: Config) -> str:
    """A row to look at."""
    prompt = group[0].prompt
    parts = {
        "prompt": prompt_text(prompt.prompt),
        "answer": group[0].text,
        "reference": "".join(reference_answers(prompt, config)[:1]),
    }
    return " | ".join(f"{name}: {shorten(text)}" for name, text in parts.items())
