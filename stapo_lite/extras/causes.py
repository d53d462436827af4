"""Why a run cannot learn: what its first completions show, and what its reward says to answers that
nobody sampled. No model is asked.

A trial update, the noise of the gradient or a probe of the rate say nothing in one batch: for a
random reward they look as they do for a healthy run. So none of them is here.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import pandas as pd

from stapo_lite.config import Config
from stapo_lite.data.messages import prompt_text
from stapo_lite.data.texts import set_text
from stapo_lite.training.log import shorten
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Prompt


class Facts(NamedTuple):
    """What some groups of completions show. NaN if there is no value; then no rule holds."""

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
    """Mean reward of the reference answer."""
    changed: float = math.nan
    """Share of completions that get another reward when they are scored again."""


class Rule(NamedTuple):
    holds: Callable[[Facts], bool]
    text: str
    """Its figures are those of the facts."""


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
        lambda f: f.values == 1 and f.empty == f.reward and not f.reference > f.reward,
        "every answer earns {reward:.3g}, and so does an empty one: reward.functions do not read "
        "the answer, or none is ever right",
    ),
    "reads_prompt": Rule(
        lambda f: f.signal < 0.05 and f.values > 1 and not f.reference > f.reward,
        "rewards differ between prompts, but all answers to one prompt earn the same: "
        "reward.functions read the prompt alone, or each prompt is too easy or too hard",
    ),
    "never_right": Rule(
        lambda f: f.signal < 0.05 and f.reference > f.reward,
        "the answers earn {reward:.3g}, the reference {reference:.3g}: they are too hard "
        "(data.source, rollout.max_completion_length), in a form that reward.functions do not "
        "read (data.prompt_suffix), or the rows have each other's answers (data.answer_column)",
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
        reward=table.reward.mean(),
        by_length=within.reward.corr(within.tokens),
        truncated=table.truncated.mean(),
    )


def ask(facts: Facts, run: Run, groups: Sequence[Sequence[Completion]]) -> Facts:
    """Add what the reward functions say, in one call, to an empty answer and the reference of each
    prompt, and to all completions once more."""
    step = run.progress.step
    prompts = [group[0].prompt for group in groups]
    empty = [write(prompt, "", run.tokenizer) for prompt in prompts]
    answers = [(prompt, reference_answer(prompt, run.config)) for prompt in prompts]
    references = [write(prompt, text, run.tokenizer) for prompt, text in answers if text]
    before = list(chain(*groups))
    again = [replace(completion) for completion in before]
    run.rewards.score([*empty, *references, *again], seed=step, step=step)
    return facts._replace(
        empty=rewards_of(empty).mean(),
        reference=rewards_of(references).mean(),
        changed=(rewards_of(before).fillna(0) != rewards_of(again).fillna(0)).mean(),
    )


def rewards_of(completions: Iterable[Completion]) -> pd.Series:
    """Their rewards; NaN where there is none."""
    return pd.Series([completion.reward for completion in completions], dtype=float)


def reference_answer(prompt: Prompt, config: Config) -> str:
    """The text that should earn most; empty if the row has no answer. `math` wants it in a box."""
    if prompt.answer is not None:
        return f"\\boxed{{{prompt.answer}}}"
    answer = prompt.columns.get(config.data.answer_column)
    return "" if answer is None else str(answer)


def write(prompt: Prompt, text: str, tokenizer: Any) -> Completion:
    """A completion that nobody sampled."""
    if prompt.opens_thinking:  # a grader looks behind it
        text = f"</think>\n\n{text}"
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    completion = Completion(prompt, ids, [0.0] * len(ids), truncated=False, adapter_version=0)
    set_text(completion, tokenizer, skip_special_tokens=None)
    return completion


def example(group: Sequence[Completion], config: Config) -> str:
    """A row to look at."""
    prompt = group[0].prompt
    parts = {
        "prompt": prompt_text(prompt.prompt),
        "answer": group[0].text,
        "reference": reference_answer(prompt, config),
    }
    return " | ".join(f"{name}: {shorten(text)}" for name, text in parts.items())
