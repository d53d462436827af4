"""Why a run cannot learn: the countdown miniature after two steps, sabotaged and healthy."""

import hashlib
import itertools
import math
import random

import countdown
import pytest
from helpers import MINIMAL, ROOT, fake_completions

from stapo_lite import Trainer
from stapo_lite.config import load_config
from stapo_lite.extras.audit.report import write_report
from stapo_lite.extras.causes import CAUSES, NOTES, look, reference_answers, write
from stapo_lite.extras.math.answers import final_answer
from stapo_lite.files import read_lines
from stapo_lite.types import Prompt

right = countdown.reward
DRAWS = random.Random(1)


def rows():
    """Training rows with an answer that is right."""
    train, _ = countdown.prompts()
    draws = random.Random(5)
    return [row | {"answer": " ".join(countdown.trace(row, draws, 0.0))} for row in train[:400]]


def with_each_others_answers(given):
    """Numbers, target and answer are those of the row after next; the prompt stays."""
    others = given[2:] + given[:2]
    return [other | {"prompt": row["prompt"]} for row, other in zip(given, others, strict=True)]


def without_answers(given):
    return [{name: row[name] for name in ("prompt", "numbers", "target")} for row in given]


def of_the_prompt(prompts, **columns):
    return [float(int(hashlib.md5(prompt.encode()).hexdigest(), 16) % 2) for prompt in prompts]


def drawn(completions, **columns):
    return [float(DRAWS.random() < 0.5) for _ in completions]


def half_missing(**columns):
    return [reward if number % 2 else None for number, reward in enumerate(right(**columns))]


def noisy(**columns):
    return [reward + DRAWS.gauss(0, 0.3) for reward in right(**columns)]


def constant(completions, **columns):
    return [1.0] * len(completions)


def abstaining(completions, **columns):
    return [None] * len(completions)


def of_the_length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def inverted(**columns):
    return [1.0 - reward for reward in right(**columns)]


def brief(completions, **columns):
    return [-len(text.split()) / 10 for text in completions]


def found(folder, reward, data=None, resume=False, **keys):
    """The symptoms of two steps: names, and the lines of the log."""
    default = {"algorithm": "justrl", "learning_rate": 1.5e-3, "max_steps": 2, "probe": "on"}
    keys = default | {"batch_size": 8, "mini_batch_size": 4} | keys
    trainer = Trainer(
        config=ROOT / "benchmarks/countdown.yaml",
        model=str(ROOT / "benchmarks/countdown_base"),
        reward_funcs=reward,
        train_dataset=rows() if data is None else data,
        output_dir=str(folder),
        self_check=False,
        **keys,
    )
    trainer.train(resume)
    lines = read_lines(folder / "symptoms.jsonl")
    return {line["name"] for line in lines}, [line["text"] for line in lines]


@pytest.mark.parametrize(
    ("reward", "change", "keys", "cause"),
    [
        (constant, None, {}, "ignores_answer"),
        (constant, without_answers, {}, "ignores_answer"),
        (of_the_prompt, None, {}, "reads_prompt"),
        (right, None, {"temperature": 0.01}, "same_answers"),
        (right, with_each_others_answers, {}, "never_right"),
        (abstaining, None, {}, "abstains"),
    ],
)
def test_the_cause_is_named_after_two_steps(tmp_path, reward, change, keys, cause):
    data = change(rows()) if change else rows()
    names, texts = found(tmp_path / "run", reward, data, **keys)
    assert names & CAUSES.keys() == {cause}
    (text,) = [text for text in texts if "prompt: use " in text]  # a row to look at
    assert "reference: " in text


@pytest.mark.parametrize(
    ("reward", "note"),
    [
        (of_the_length, "rewards_length"),
        (inverted, "reference_is_worse"),
        (drawn, "rewards_change"),
    ],
)
def test_a_run_that_learns_something_else_gets_a_note(tmp_path, reward, note):
    names, _ = found(tmp_path / "run", reward)
    assert f"note {note}" in names
    assert not names & CAUSES.keys()


@pytest.fixture(scope="module")
def trained_adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("countdown") / "run"
    names, _ = found(folder, right, max_steps=20)
    assert not names
    return str(folder / "adapter")


@pytest.mark.parametrize(
    ("algorithm", "seed"),
    [("justrl", 0), ("justrl", 1), ("justrl", 2), ("stapo", 0), ("dapo", 0), ("justrl", "trained")],
)
def test_a_healthy_run_has_no_cause(tmp_path, trained_adapter, algorithm, seed):
    start = {"adapter": trained_adapter} if seed == "trained" else {"seed": seed}
    names, _ = found(tmp_path / "run", right, algorithm=algorithm, **start)
    assert not names


@pytest.mark.parametrize(
    ("reward", "keys", "notes"),
    [
        (right, {"max_completion_length": 13}, {"note cut_off"}),
        (right, {"max_completion_length": 33}, {"note cut_off"}),
        (noisy, {}, {"note rewards_change"}),
        (half_missing, {}, set()),
        (brief, {}, {"note rewards_length", "note reference_is_worse"}),
    ],
)
def test_what_makes_learning_slower_is_no_cause(tmp_path, reward, keys, notes):
    names, _ = found(tmp_path / "run", reward, **keys)
    assert names <= notes


def test_a_function_of_the_caller_is_asked_only_if_wanted(tmp_path):
    """It may cost money, or keep a state."""
    calls = itertools.count()

    def counting(completions, **columns):
        next(calls)
        return right(completions, **columns)

    found(tmp_path / "auto", counting, probe="auto")
    assert next(calls) == 2
    found(tmp_path / "on", counting, probe="on")
    assert next(calls) == 3 + 3


@pytest.mark.parametrize("rewards", [[None, None], [1.0, None], [1.0, 1.0], [0.0, 1.0]])
def test_few_completions_raise_nothing(rewards):
    group = fake_completions(0, [0.0, 0.0])
    for completion, reward in zip(group, rewards, strict=True):
        completion.reward = reward
    facts = look([group])
    for rule in (*CAUSES.values(), *NOTES.values()):
        rule.holds(facts)
        rule.text.format(**facts._asdict())
    assert math.isnan(facts.empty)


def test_a_cause_can_end_the_run_and_does_so_again(tmp_path):
    keys = {"stop_on": ["ignores_answer"], "max_steps": 4}
    for resume in (False, True):
        names, _ = found(tmp_path / "run", constant, resume=resume, **keys)
        assert names == {"ignores_answer"}
        assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    assert "step 2, ignores_answer: every answer earns 1, " in write_report(tmp_path / "run")


def failing(completions, **columns):
    """Reads what an empty answer lacks."""
    return [float(len(text.split()[0])) for text in completions]


def test_a_function_that_fails_when_asked_changes_nothing(tmp_path, caplog):
    names, _ = found(tmp_path / "run", failing)
    assert not names & CAUSES.keys()
    assert "reward.probe: the reward functions fail (list index" in caplog.text


def test_a_constant_that_rounds(tmp_path):
    """The mean of 128 times 0.7 is not 0.7."""

    def seven_tenths(completions, **columns):
        return [0.7] * len(completions)

    names, _ = found(tmp_path / "run", seven_tenths)
    assert names == {"ignores_answer"}
    names, _ = found(tmp_path / "unasked", seven_tenths, probe="off")
    assert names == {"equal_rewards"}


def test_a_tokenizer_may_have_no_end_token(tokenizer):
    prompt = Prompt("", [], None)
    assert write(prompt, "ab", tokenizer).token_ids[-1] == tokenizer.eos_token_id
    tokenizer.eos_token = None
    ids = tokenizer("ab", add_special_tokens=False).input_ids
    assert write(prompt, "ab", tokenizer).token_ids == ids


def test_the_reference_of_a_row():
    config = load_config(MINIMAL, {"data.answer_column": "gold.text"})  # of `math`
    prompt = Prompt("", [], None, {"gold": {"text": "so 3 + 4 #### 7"}})
    assert reference_answers(prompt, config) == ["so 3 + 4 #### 7", "\\boxed{so 3 + 4 #### 7}"]
    assert reference_answers(Prompt("", [], None, {"gold": {"text": ""}}), config) == []
    assert reference_answers(Prompt("", [], None, {}), config) == []
    config = load_config(MINIMAL, {"reward.functions": ["mine:reward"]})
    assert reference_answers(Prompt("", [], None, {"answer": 7}), config) == ["7"]


def test_groups_without_rewards_say_nothing_about_the_signal():
    groups = [fake_completions(seed, [0.0, 0.0]) for seed in (0, 1)]
    for completion, reward in zip(groups[1], (0.0, 1.0), strict=True):
        completion.reward = reward
    assert look(groups).signal == 1.0
    assert look(groups).abstained == 0.5


def test_a_made_up_answer_stands_behind_the_thought(tokenizer):
    prompt = Prompt("", [5], None, opens_thinking=True)
    written = write(prompt, r"\boxed{7}", tokenizer)
    assert final_answer(written.whole_text) == "7"


@pytest.mark.parametrize(("by_length", "noted"), [(0.96, True), (-0.96, True), (0.94, False)])
def test_shorter_is_better_is_a_note_too(by_length, noted):
    facts = look([fake_completions(0, [0.0, 0.0])])._replace(by_length=by_length)
    assert NOTES["rewards_length"].holds(facts) == noted


def test_a_run_that_goes_on_is_not_looked_at_again(tmp_path):
    found(tmp_path / "run", constant)
    _, texts = found(tmp_path / "run", constant, resume=True, max_steps=4)
    assert len([text for text in texts if text.startswith("every answer earns 1")]) == 1
