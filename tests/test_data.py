import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from stapo_lite import data
from stapo_lite.benchmarks import Problem, load_benchmark
from stapo_lite.config import InputError, Prompting
from stapo_lite.files import read_lines, write_lines

DATA = Path(__file__).parent.parent.parent / "shared" / "data"

COLUMNS = {"prompt_column": "prompt", "answer_column": "answer"}


def settings(answer_column="answer", filter_overlong=False, **prompting):
    """Arguments of `render_prompts` after rows and tokenizer."""
    return (
        Prompting(**{"max_prompt_length": 200} | prompting),
        "file.jsonl",
        "prompt",
        answer_column,
        filter_overlong,
    )


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def render(tokenizer, *prompts, **changes):
    rows = [{"prompt": prompt, "answer": str(i), "level": i} for i, prompt in enumerate(prompts)]
    return data.render_prompts(rows, tokenizer, *settings(**changes))


def load(source, **changes):
    return data.load_rows(str(source), **{"subset": None, "split": "train", "max_operand": 3, **COLUMNS} | changes)


def test_text_becomes_a_user_turn_with_system_prompt_and_suffix(tokenizer):
    (prompt,) = render(tokenizer, "2+2?", system_prompt="Short.", prompt_suffix=" Go.")
    assert tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n2+2? Go.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.prompt == "2+2?"
    assert prompt.columns == {"answer": "0", "level": 0}


def test_a_final_assistant_message_is_continued(tokenizer):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "2+2 ="}]
    (prompt,) = render(tokenizer, messages, prompt_suffix=" Go.")
    assert tokenizer.decode(prompt.token_ids).endswith("user\n2+2? Go.<|im_end|>\n<|im_start|>assistant\n2+2 =")
    assert messages[0]["content"] == "2+2?"


def test_without_the_template_the_prompt_is_given_as_it_is(tokenizer):
    (prompt,) = render(tokenizer, "2+2=", apply_chat_template=False)
    assert tokenizer.decode(prompt.token_ids) == "2+2="


def test_overlong_prompts_are_an_error_or_dropped(tokenizer):
    with pytest.raises(InputError, match=r"file.jsonl, row 2: the prompt has \d+ tokens, data.max_prompt_length is 40"):
        render(tokenizer, "a", "b" * 60, max_prompt_length=40)
    kept = render(tokenizer, "a", "b" * 60, "c", max_prompt_length=40, filter_overlong=True)
    assert [p.answer for p in kept] == ["0", "2"]
    with pytest.raises(InputError, match="every prompt is longer"):
        render(tokenizer, "a" * 60, max_prompt_length=40, filter_overlong=True)


@pytest.mark.parametrize("prompt", [None, 3, [], ["x"], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_a_prompt_of_the_wrong_type_names_its_row(tokenizer, prompt):
    with pytest.raises(InputError, match=r"file.jsonl, row 1: the prompt must be text or a list of \{role, content\}"):
        render(tokenizer, prompt)


def test_a_model_without_chat_template(tiny_model):
    bare = AutoTokenizer.from_pretrained(tiny_model)
    bare.chat_template = None
    with pytest.raises(InputError, match="no chat template; set it to false"):
        render(bare, "2+2?")
    assert render(bare, "2+2?", apply_chat_template=False)


def test_files_of_both_formats(tmp_path):
    import datasets

    rows = [{"prompt": "p", "answer": "1", "x": 2}, {"prompt": "q", "answer": "3", "x": 4}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert load(lines) == rows
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet") == rows
    hub_like = tmp_path / "data-set"
    hub_like.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(hub_like / "test.parquet")
    assert load(hub_like, split="test") == rows
    with pytest.raises(InputError, match="neither `arithmetic`"):
        load(hub_like, split="train")


def test_bad_sources(tmp_path):
    path = tmp_path / "a.jsonl"
    with pytest.raises(InputError, match=r"a.jsonl: no such file"):
        load(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"a.jsonl: no rows"):
        load(path)
    path.write_text('{"question": "p", "answer": "1"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="data.prompt_column=prompt: .* has only the columns question, answer"):
        load(path)
    with pytest.raises(InputError, match="data.answer_column=gold: .* has only the columns question, answer"):
        load(path, prompt_column="question", answer_column="gold")
    for text, message in (('{"prompt": \n', "line 1: not JSON"), ("[1]\n", "line 1: must be a JSON object, got list")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=message):
            load(path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    for name in ("a.parquet", "a.csv", "no-user/no-data-set"):
        with pytest.raises(InputError, match="neither `arithmetic` nor a readable") as error:
            load(tmp_path / name)
        assert "\n" not in str(error.value)


def test_text_that_looks_like_a_date_stays_text(tmp_path):
    path = tmp_path / "a.JSONL"
    path.write_text('{"prompt": "when?", "answer": "2024-01-01"}\n\n', encoding="utf-8")
    assert load(path) == [{"prompt": "when?", "answer": "2024-01-01"}]


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_missing_answer_names_its_row_where_one_is_needed(tokenizer, answer):
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": answer}]
    with pytest.raises(InputError, match="row 2: data.answer_column=answer is empty"):
        data.render_prompts(rows, tokenizer, *settings())
    assert [p.answer for p in data.render_prompts(rows, tokenizer, *settings(answer_column=None))] == [
        None,
        None,
    ]


def test_a_template_that_refuses_and_an_empty_prompt(tiny_model):
    strict = AutoTokenizer.from_pretrained(tiny_model)
    strict.chat_template = "{{ raise_exception('only\\nusers') }}"
    with pytest.raises(InputError, match="row 1: the model's chat template refuses the prompt .only users."):
        render(strict, "2+2?")
    with pytest.raises(InputError, match="row 1: the prompt is empty"):
        render(strict, "", apply_chat_template=False)


def test_arithmetic_is_every_sum():
    rows = load("arithmetic")
    assert len(rows) == 9
    assert rows[5]["prompt"][-1] == {"role": "assistant", "content": "2 + 3 ="}
    assert rows[5]["answer"] == "5"


def test_order_is_a_permutation_of_each_epoch_and_resumes_anywhere():
    whole = data.prompt_order(10, seed=1, position=0, count=35)
    for epoch in range(3):
        assert sorted(whole[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert whole[:10] != whole[10:20]
    assert whole[:10] != data.prompt_order(10, seed=2, position=0, count=10)
    for position in (0, 7, 10, 19):
        assert data.prompt_order(10, seed=1, position=position, count=13) == whole[position : position + 13]


def test_stop_tokens_include_the_end_of_an_assistant_turn(tokenizer):
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert data.stop_token_ids(tokenizer, 7, apply_chat_template=True) == tuple(sorted((7, end_of_text, end_of_turn)))
    assert data.stop_token_ids(tokenizer, [7, 8], apply_chat_template=False) == (end_of_text, 7, 8)
    assert data.stop_token_ids(tokenizer, None, apply_chat_template=False) == (end_of_text,)


def problem(text, name="b", number=0):
    return Problem(name, str(number), text, "1", False, 0.0)


def test_overlaps_by_hand():
    """A problem of 10 words has three 8-grams."""
    ten = problem("One two three, four five six $seven$ eight nine TEN?")
    texts = [
        "zero one two three four five six seven eight nine ten eleven",  # all three
        "one two three four five six seven eight nine 10",  # two
        "two three four five six seven eight nine",  # one
        "ten nine eight seven six five four three two one",
        "",
    ]
    found = data.find_overlaps(texts, [ten])
    assert [(o.row, o.problem, round(o.share, 3)) for o in found] == [(0, ten, 1.0), (1, ten, 0.667)]
    assert [o.row for o in data.find_overlaps(texts, [ten], share=0.3)] == [0, 1, 2]
    assert [o.row for o in data.find_overlaps(texts, [ten], n=3)] == [0, 1, 2]
    short = problem("What is 7 + 8?")
    assert [o.row for o in data.find_overlaps(["tell me: what is 7 + 8, please", "what is 7 + 9"], [short])] == [0]


def test_the_contamination_report(tmp_path, capsys, monkeypatch):
    words = "the quick brown fox jumps over the lazy dog and runs away from it"
    write_lines(tmp_path / "amc23.jsonl", [{"problem": words, "answer": 1}, {"problem": words[::-1], "answer": 1}])
    write_lines(tmp_path / "mine.jsonl", [{"problem": f"{words} again and again", "answer": 1}])
    messages = [{"role": "user", "content": f"Solve: {words}"}]
    rows = [{"prompt": "something else", "solution": "é"}, {"prompt": messages, "solution": 2}]
    write_lines(tmp_path / "train.jsonl", rows)
    command = ["data", "contamination", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "clean.jsonl")]
    command += ["--benchmarks", str(tmp_path / "amc23.jsonl"), str(tmp_path / "mine.jsonl")]
    monkeypatch.setattr("sys.argv", command)
    data.main()
    assert capsys.readouterr().out.splitlines() == [
        "amc23             1 of    2 problems (50.0 %)",
        "mine              1 of    1 problems (100.0 %)",
        f"  amc23 0: 100 % in row 2: Solve: {words}",
        f"  mine 0: 70 % in row 2: Solve: {words}",
        "1 of 2 rows overlap a benchmark",
        f"1 rows: {tmp_path / 'clean.jsonl'}",
    ]
    assert read_lines(tmp_path / "clean.jsonl") == rows[:1]
    write_lines(tmp_path / "train.jsonl", [{"text": words}])
    with pytest.raises(SystemExit, match="2"):
        data.main()
    assert "--prompt-column:" in capsys.readouterr().err


def test_the_cleaned_training_set_holds_no_benchmark():
    """Its maker removed overlaps by the same rule."""
    if not DATA.exists():
        pytest.skip("the shared benchmark data is not here")
    names = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench_674")
    problems = [p for name in names for p in load_benchmark(str(DATA / f"{name}.jsonl"))[1]]
    rows = read_lines(DATA / "train_math_clean.jsonl")
    assert data.find_overlaps([row["problem"] for row in rows], problems) == []
    again = data.find_overlaps([f"Solve this. {p.text} Think." for p in problems[:100]], problems[:100])
    assert {o.row for o in again} == set(range(100))
