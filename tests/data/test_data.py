import datetime
import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers import command, shared_data
from transformers import AutoTokenizer

from stapo_lite.config import Data
from stapo_lite.data.prompts import Prompts, load_rows, prompt_text, stop_token_ids
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.benchmarks import Problem
from stapo_lite.extras.evaluation.contamination import find_overlaps, load_problems
from stapo_lite.extras.math.answers import final_answer
from stapo_lite.files import read_lines, write_lines
from stapo_lite.training.run import prompt_order
from stapo_lite.types import Completion

SYSTEM = "<|im_start|>system\nShort.<|im_end|>\n"
ASKED = "<|im_start|>user\n2+2? Go.<|im_end|>\n<|im_start|>assistant\n"
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "2+2 ="}]
TURNS = [
    {"role": "system", "content": "Own."},
    {"role": "user", "content": "1?"},
    {"role": "user", "content": "2+2?"},
]
BEFORE = "<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def render(tokenizer, *prompts, graded=True, **data):
    """Prompts of rows with the answers 0, 1, ..."""
    rows = [{"prompt": prompt, "answer": str(i), "level": i} for i, prompt in enumerate(prompts)]
    return Prompts(
        rows, tokenizer, Data(**{"source": "a.jsonl", "max_prompt_length": 200} | data), graded
    )


@pytest.mark.parametrize(
    ("prompt", "prompting", "text"),
    [
        ("2+2?", {"system_prompt": "Short.", "prompt_suffix": " Go."}, SYSTEM + ASKED),
        (CHAT, {"prompt_suffix": " Go."}, ASKED + "2+2 ="),
        (TURNS, {"system_prompt": "Short.", "prompt_suffix": " Go."}, BEFORE + ASKED),
        ("2+2=", {"apply_chat_template": False}, "2+2="),
    ],
    ids=[
        "text becomes a user turn",
        "an assistant message is continued",
        "its own system message",
        "no template",
    ],
)
def test_prompts_as_the_model_reads_them(tokenizer, prompt, prompting, text):
    (rendered,) = render(tokenizer, prompt, **prompting)
    assert tokenizer.decode(rendered.token_ids) == text
    assert rendered.prompt == prompt
    assert [one.token_ids for one in render(tokenizer, prompt, "no", **prompting)[:1]] == [
        rendered.token_ids
    ]
    assert rendered.columns == {"answer": "0", "level": 0}
    assert CHAT[0]["content"] == "2+2?"  # the user's row is as it was


def test_a_template_that_opens_the_models_thoughts(tokenizer):
    """What a completion says before `</think>` is no answer, though the opening tag is in the
    prompt."""
    tokenizer.chat_template += "<think>\n"
    (prompt,) = render(tokenizer, "2+2?")
    assert prompt.opens_thinking
    cut, done = (
        Completion(prompt, [5], [0.0], False, 0, text=t)
        for t in (r"is it \boxed{4}?", r"</think>\boxed{4}")
    )
    assert [final_answer(completion.whole_text) for completion in (cut, done)] == [None, "4"]
    assert not render(AutoTokenizer.from_pretrained(tokenizer.name_or_path), "2+2?")[
        0
    ].opens_thinking


def test_other_fields_of_messages_reach_the_chat_template(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}={{ m.content }}{{ m.calls }}{{ m.x is defined }}{% endfor %}"  # noqa: E501
    chat = [
        {"role": "assistant", "content": "a", "calls": "b", "x": None},
        {"role": "user", "content": "c"},
    ]
    assert tokenizer.decode(render(tokenizer, chat)[0].token_ids) == "assistant=abFalseuser=cFalse"
    # As a data set has them: every call with the arguments of all.
    tokenizer.chat_template = "{% for m in messages %}{{ m.tool_calls }}{{ m.content }}{% endfor %}"
    calls = [
        {"role": "assistant", "content": None, "tool_calls": [{"a": {"b": 1, "c": None}}]},
        CHAT[0],
    ]
    assert tokenizer.decode(render(tokenizer, calls)[0].token_ids) == "[{'a': {'b': 1}}]2+2?"
    assert prompt_text(calls) == "\n2+2?"


def test_text_that_has_been_through_a_template_is_noticed_once(tokenizer, caplog):
    done = "<|im_start|>user\n2+2?<|im_end|>\n"
    render(tokenizer, "2+2?", done, done)
    assert caplog.text.count("gets the chat template; if it has been") == 1
    assert "row 2: the text holds <|im_" in caplog.text
    caplog.clear()
    render(tokenizer, done, apply_chat_template=False)
    render(tokenizer, [{"role": "user", "content": done}])
    assert not caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": [{"role": "assistant", "content": None}]}],
            "row 1: message 1 .*: content must be text, got None",
        ),
        (
            [{"prompt": [CHAT[0], {"value": "2"}]}],
            "row 1: message 2 of the prompt: role must be text, got None",
        ),
        ([{"prompt": []}], r"row 1: the prompt must be text or a list .*, got \[\]"),
        ([{"prompt": np.array([CHAT[0]])}], "row 1: the prompt must be text or a list"),
        (
            [{"prompt": "a"}, {"prompt": "what?", "images": ["a.png"]}],
            "row 2: images are not supported",
        ),
        ([{"prompt": "what?", "image": np.zeros((2, 2))}], "row 1: images are not supported"),
    ],
)
def test_rows_that_are_no_prompts(tokenizer, rows, message):
    with pytest.raises(InputError, match=message):
        Prompts(rows, tokenizer, Data(source="a"), graded=False)
    text = {"prompt": "a", "images": [], "image": "of a docker container"}
    assert Prompts([text], tokenizer, Data(source="a"), graded=False)


def test_overlong_prompts_are_an_error_or_dropped_and_missing_answers_an_error_where_one_is_needed(
    tokenizer,
):
    with pytest.raises(
        InputError, match=r"a.jsonl, row 2: the prompt has \d+ tokens, data.max_prompt_length is 40"
    ):
        render(tokenizer, "a", "b" * 60, max_prompt_length=40)
    kept = render(tokenizer, "a", "b" * 60, "c", max_prompt_length=40, filter_overlong_prompts=True)
    assert [p.answer for p in kept] == ["0", "2"]
    with pytest.raises(InputError, match="every prompt is longer"):
        render(tokenizer, "a" * 60, max_prompt_length=40, filter_overlong_prompts=True)
    with pytest.raises(InputError, match="row 1: data.answer_column=gold is empty"):
        render(tokenizer, "p", "q", answer_column="gold")
    assert [p.answer for p in render(tokenizer, "p", "q", graded=False)] == [None, None]


def test_chat_templates_that_are_missing_or_refuse(tokenizer):
    with pytest.raises(InputError, match="row 1: the prompt is empty"):
        render(tokenizer, " ")
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template; set it to false"):
        render(tokenizer, "2+2?")
    assert render(tokenizer, "2+2?", apply_chat_template=False)
    for prompt, message in [
        ("", "row 1: the prompt is empty"),
        (3, "row 1: the prompt must be text, got 3"),
    ]:
        with pytest.raises(InputError, match=message):
            render(tokenizer, prompt, apply_chat_template=False)
    tokenizer.chat_template = "{{ raise_exception('only\\nusers') }}"
    with pytest.raises(
        InputError, match="row 1: the model's chat template refuses the prompt .only users."
    ):
        render(tokenizer, "2+2?")


def test_rows_of_every_kind_of_source(tmp_path):
    rows = [
        {"prompt": "when?", "answer": "2024-01-01", "x": 2},
        {"prompt": "q", "answer": "3", "x": 4},
    ]
    write_lines(tmp_path / "a.JSONL", rows)
    assert (
        load_rows(Data(source=str(tmp_path / "a.JSONL"))) == rows
    )  # what looks like a date stays text
    parquet, like_the_hub = tmp_path / "a.parquet", tmp_path / "data-set"
    datasets.Dataset.from_list(rows).to_parquet(parquet)
    assert load_rows(Data(source=str(parquet))) == rows
    like_the_hub.mkdir()
    parquet.rename(like_the_hub / "test.parquet")
    assert list(load_rows(Data(source=str(like_the_hub), split="test"))) == rows
    parquet.write_bytes(b"PAR1 not really")
    for source in (like_the_hub, parquet, "no-user/no-data-set", "json:no", "none:dumps"):
        with pytest.raises(InputError, match="neither a readable") as error:
            load_rows(Data(source=str(source)))
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="data.source=builtins:globals: rows must be dictionaries"):
        load_rows(Data(source="builtins:globals"))
    generated = load_rows(Data(source="stapo_lite.extras.quickstart.one_sentence:prompts"))
    assert (len(generated), generated[26]["word"]) == (500, "stone")
    assert generated[26]["prompt"] == 'Write one sentence about a garden with the word "stone".'


def test_rows_on_the_disk_stay_there(tokenizer):
    """Of 2,000 rows of 5 kB nothing but numbers is kept, and each prompt is read when it is asked
    for."""
    rows = datasets.Dataset.from_list(
        [{"prompt": f"{i}+2?", "answer": i, "more": "x" * 5000} for i in range(2000)]
    )
    tracemalloc.start()
    prompts = Prompts(rows, tokenizer, Data(source="a"), graded=True, left_out={1, 3})
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] < 500_000
    tracemalloc.stop()
    assert len(prompts) == 1998
    assert (prompts[1].prompt, prompts[1].answer, prompts[-1].columns["more"]) == (
        "2+2?",
        2,
        "x" * 5000,
    )
    some = [rows[0], rows[2]]
    other = [rows[0], rows[2] | {"answer": 7}]
    digests = {
        Prompts(given, tokenizer, Data(source="b"), graded=True).digest
        for given in (some, rows, other)
    }
    assert len(digests) == 3
    ungraded = Prompts(some, tokenizer, Data(source="b"), graded=False)
    assert [p.token_ids for p in ungraded] == [p.token_ids for p in (prompts[0], prompts[1])]


def test_order_is_a_permutation_of_each_epoch_and_resumes_anywhere():
    whole = prompt_order(10, seed=1, position=0, count=35)
    for epoch in range(3):
        assert sorted(whole[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert whole[:10] != whole[10:20]
    assert whole[:10] != prompt_order(10, seed=2, position=0, count=10)
    for position in (0, 7, 10, 19):
        assert (
            prompt_order(10, seed=1, position=position, count=13) == whole[position : position + 13]
        )


def test_stop_tokens_include_the_end_of_an_assistant_turn(tokenizer):
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert stop_token_ids(tokenizer, 7, apply_chat_template=True) == tuple(
        sorted((7, end_of_text, end_of_turn))
    )
    assert stop_token_ids(tokenizer, [7, 8], apply_chat_template=False) == (end_of_text, 7, 8)
    assert stop_token_ids(tokenizer, None, apply_chat_template=False) == (end_of_text,)


def test_overlaps_by_hand():
    """A problem of 10 words has three 8-grams."""
    ten = Problem("b", "0", "One two three, four five six $seven$ eight nine TEN?", "1", False, 0.0)
    texts = [
        "zero one two three four five six seven eight nine ten eleven",  # all three
        "one two three four five six seven eight nine 10",  # two
        "two three four five six seven eight nine",  # one
        *("ten nine eight seven six five four three two one", ""),
    ]
    found = find_overlaps(texts, [ten])
    assert [(o.row, o.problem, round(o.share, 3)) for o in found] == [
        (0, ten, 1.0),
        (1, ten, 0.667),
    ]
    assert [o.row for o in find_overlaps(texts, [ten], share=0.3)] == [0, 1, 2]
    assert [o.row for o in find_overlaps(texts, [ten], n=3)] == [0, 1, 2]
    short = Problem("b", "0", "What is 7 + 8?", "1", False, 0.0)
    assert [
        o.row for o in find_overlaps(["tell me: what is 7 + 8, please", "what is 7 + 9"], [short])
    ] == [0]
    shorter = Problem("b", "1", "7?", "1", False, 0.0)
    wordless = Problem("b", "2", "$$", "1", False, 0.0)
    both = find_overlaps(["7", ""], [shorter, Problem("b", "3", "1 2", "1", False, 0.0), wordless])
    assert [(o.row, o.problem, o.share) for o in both] == [(0, shorter, 1.0)]


def test_the_contamination_report(tmp_path, capsys):
    words = "the quick brown fox jumps over the lazy dog and runs away from it"
    write_lines(
        tmp_path / "amc23.jsonl",
        [{"problem": words, "answer": 1}, {"problem": words[::-1], "answer": 1}],
    )
    write_lines(tmp_path / "mine.jsonl", [{"problem": f"{words} again and again", "answer": 1}])
    messages = [{"role": "user", "content": f"Solve: {words}"}]
    rows = [{"prompt": "something else", "solution": "é"}, {"prompt": messages, "solution": 2}]
    write_lines(tmp_path / "train.jsonl", rows)
    arguments = ["contamination", tmp_path / "train.jsonl", "--out", tmp_path / "clean.jsonl"]
    arguments += ["--benchmarks", tmp_path / "amc23.jsonl", tmp_path / "mine.jsonl"]
    assert command(*arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "amc23             1 of    2 problems (50.0 %)",
        "mine              1 of    1 problems (100.0 %)",
        f"  amc23 0: 100 % in row 2: Solve: {words}",
        f"  mine 0: 70 % in row 2: Solve: {words}",
        "1 of 2 rows overlap a benchmark",
        f"1 rows: {tmp_path / 'clean.jsonl'}",
    ]
    assert read_lines(tmp_path / "clean.jsonl") == rows[:1]
    dated = [{"prompt": "new", "on": datetime.date(2026, 1, 2)}, {"prompt": words, "on": None}]
    datasets.Dataset.from_list(dated).to_parquet(tmp_path / "train.parquet")
    assert command("contamination", tmp_path / "train.parquet", *arguments[2:]) == 0
    assert read_lines(tmp_path / "clean.jsonl") == [{"prompt": "new", "on": "2026-01-02"}]
    write_lines(tmp_path / "train.jsonl", [{"prompt": {"from": "human", "value": words}}])
    assert command(*arguments) == 0
    assert "1 rows were not compared: no text in prompt" in capsys.readouterr().out
    write_lines(tmp_path / "train.jsonl", [{"text": words}])
    assert command(*arguments) == 2
    assert "--prompt-column:" in capsys.readouterr().err
    assert (
        command(
            *arguments[:3],
            tmp_path / "nowhere" / "clean.jsonl",
            "--prompt-column",
            "text",
            *arguments[4:],
        )
        == 2
    )
    assert "clean.jsonl: cannot be written" in capsys.readouterr().err


def test_the_command_finds_modules_where_it_is_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rows():\n    return [{'prompt': 'one two three'}]\n", encoding="utf-8"
    )
    write_lines(tmp_path / "tests.jsonl", [{"problem": "one two three", "answer": 1}])
    stapo = Path(sys.executable).with_name("stapo")
    arguments = ["contamination", "mine:rows", "--benchmarks", "tests.jsonl"]
    done = subprocess.run(
        [stapo, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 of 1 rows overlap a benchmark"


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_the_cleaned_training_set_holds_no_benchmark(every):
    names = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench_674")
    problems = load_problems([str(shared_data(name)) for name in names])
    rows = read_lines(shared_data("train_math_clean"))[::every]
    assert find_overlaps([row["problem"] for row in rows], problems) == []
    again = find_overlaps([f"Solve this. {p.text} Think." for p in problems[:100]], problems[:100])
    assert {o.row for o in again} == set(range(100))
