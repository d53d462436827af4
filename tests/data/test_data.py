import csv
import gzip
import io
import json
import lzma
import timeit
import tracemalloc
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from helpers import MINIMAL
from tokenizers.processors import TemplateProcessing

from stapo_lite.config import Data, load_config
from stapo_lite.data.messages import prompt_text, stop_token_ids
from stapo_lite.data.prompts import make_prompts
from stapo_lite.data.rows import load_rows
from stapo_lite.data.texts import set_text
from stapo_lite.errors import InputError
from stapo_lite.extras.math.answers import equivalent, final_answer
from stapo_lite.files import write_lines
from stapo_lite.training.schedule import prompt_order
from stapo_lite.types import Completion, Prompt

SYSTEM = "<|im_start|>system\nShort.<|im_end|>\n"
ASKED = "<|im_start|>user\n2+2? Go.<|im_end|>\n<|im_start|>assistant\n"
QUESTION = {"role": "user", "content": "2+2?"}
CHAT = [QUESTION, {"role": "assistant", "content": "2+2 ="}]
TURNS = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1?"}, QUESTION]
PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
BEFORE = "<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"


def render(tokenizer, *prompts, graded=True, **data):
    """Prompts of rows with the answers 0, 1, ..."""
    rows = [{"prompt": prompt, "answer": str(i), "level": i} for i, prompt in enumerate(prompts)]
    settings = Data(**{"source": "a.jsonl", "max_prompt_length": 200} | data)
    return make_prompts(rows, tokenizer, settings, graded)


@pytest.mark.parametrize(
    ("prompt", "prompting", "text"),
    [
        ("2+2?", {"system_prompt": "Short.", "prompt_suffix": " Go."}, SYSTEM + ASKED),
        (CHAT, {"prompt_suffix": " Go."}, ASKED + "2+2 ="),
        (TURNS, {"system_prompt": "Short.", "prompt_suffix": " Go."}, BEFORE + ASKED),
        ([QUESTION | {"content": PARTS}], {"prompt_suffix": " Go."}, ASKED),
        ("2+2=", {"apply_chat_template": False}, "2+2="),
    ],
    ids=["a user turn", "an answer is continued", "own system message", "parts", "no template"],
)
def test_prompts_as_the_model_reads_them(tokenizer, prompt, prompting, text):
    (rendered,) = render(tokenizer, prompt, **prompting)
    assert tokenizer.decode(rendered.token_ids) == text
    assert rendered.prompt == prompt
    assert rendered.columns == {"answer": "0", "level": 0}
    assert QUESTION["content"] == "2+2?"  # the user's row is as it was


def test_a_tokenizers_first_token_comes_once(tokenizer):
    """A chat template writes it itself; text without one gets it from the tokenizer."""
    first = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", first)]
    )
    (text,) = render(tokenizer, "2+2=", **TEXT)
    assert tokenizer.decode(text.token_ids) == "<|endoftext|>2+2="
    (chat,) = render(tokenizer, "2+2? Go.")
    assert tokenizer.decode(chat.token_ids) == ASKED


def test_a_template_that_opens_the_models_thoughts(tokenizer):
    """What comes before `</think>` is no answer, though the opening tag is in the prompt."""
    assert not render(tokenizer, "2+2?")[0].opens_thinking
    tokenizer.chat_template += "<think>\n"
    (prompt,) = render(tokenizer, "2+2?")
    assert prompt.opens_thinking
    for text, answer in ((r"is it \boxed{4}?", None), (r"</think>\boxed{4}", "4")):
        completion = Completion(prompt, tokenizer(text).input_ids, [], False, 0)
        set_text(completion, tokenizer, None)
        assert completion.text == text
        assert final_answer(completion.whole_text) == answer


@pytest.mark.parametrize(
    ("tags", "skip", "text"),
    [
        (["</think>"], None, "so</think>4"),
        (["</think>"], True, "so4"),
        (["<|box|>"], None, "so</think>4"),
        (["<|box|>"], False, "so</think><|box|>4"),
    ],
)
def test_tags_that_are_special_tokens_reach_rewards_and_graders(tokenizer, tags, skip, text):
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    whole = "so</think><|box|>4" if "<|box|>" in tags else "so</think>4"
    ids = [*tokenizer(whole, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    completion = Completion(Prompt("", [1], None, opens_thinking=True), ids, [], False, 0)
    set_text(completion, tokenizer, skip)
    assert (completion.text, completion.whole_text) == (text, f"<think>{whole}")


@pytest.mark.parametrize(("messages", "whole"), [(None, "so 7 4"), ([QUESTION], "so 4")])
def test_graders_see_what_the_model_did_not_write_unless_it_is_a_chat(tokenizer, messages, whole):
    """Text that a rollout function adds may belong to the answer; a tool's result does not."""
    parts = [(text, tokenizer(text).input_ids) for text in ("so", " 7", " 4")]
    ids = [token for _, tokens in parts for token in tokens]
    mask = [text != " 7" for text, tokens in parts for _ in tokens]
    prompt = Prompt("", [1], None)
    completion = Completion(prompt, ids, [], False, 0, loss_mask=mask, messages=messages)
    set_text(completion, tokenizer, None)
    assert (completion.text, completion.whole_text) == ("so 7 4", whole)


def test_fields_of_messages_reach_the_chat_template_unless_they_are_null(tokenizer):
    arguments = {"content": ["b"], "c": None}
    call = {"role": "assistant", "content": None, "tool_calls": [{"a": arguments}]}
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.tool_calls }}{{ m.content }}{{ m.x is defined }}{% endfor %}"
    )
    (prompt,) = render(tokenizer, [call, QUESTION | {"x": None}])
    assert tokenizer.decode(prompt.token_ids) == "[{'a': {'content': ['b']}}]False2+2?False"
    assert prompt_text([call, QUESTION | {"content": PARTS}]) == "\n2+2?"


TEXT = {"apply_chat_template": False}
DROPPING = {"max_prompt_length": 40, "filter_overlong_prompts": True}


@pytest.mark.parametrize(
    ("prompts", "data", "message"),
    [
        ([[QUESTION | {"content": None}]], {}, "the prompt must be text or a list"),
        ([[QUESTION, {"value": "2"}]], {}, "the prompt must be text or a list"),
        ([[]], {}, r"row 1: the prompt must be text or a list .*, got \[\]"),
        ([np.array([QUESTION])], {}, "the prompt must be text or a list"),
        ([" "], {}, "row 1: the prompt is empty"),
        ([3], TEXT, r"row 1: the prompt must be text, got 3 \(data.prompt_column\)"),
        (["a", "b" * 60], {"max_prompt_length": 40}, r"row 2: the prompt has \d+ tokens, data.max"),
        (["a" * 60], DROPPING, "no prompt is left"),
        (["p"], {"answer_column": "gold"}, "row 1: data.answer_column=gold is neither text nor"),
        ([json.dumps(CHAT)], {}, "the prompt is messages as JSON text: store them as a list"),
        ([[QUESTION | {"content": [{"type": "image"}]}]], {}, "the prompt must be text or a list"),
    ],
)
def test_rows_that_are_no_prompts(tokenizer, prompts, data, message):
    with pytest.raises(InputError, match=message):
        render(tokenizer, *prompts, **data)


def test_overlong_prompts_may_be_dropped_and_answers_missing_if_nothing_grades_them(tokenizer):
    kept = render(tokenizer, "a", "b" * 60, "c", **DROPPING)
    assert [p.answer for p in kept] == ["0", "2"]
    ungraded = render(tokenizer, "p", "q", graded=False, answer_column="gold")
    assert [p.answer for p in ungraded] == [None, None]


def test_rows_that_are_no_dictionaries(tokenizer):
    data = Data(source="a.json", max_prompt_length=200)
    with pytest.raises(InputError, match="row 2: must be a dictionary, got 'x'"):
        make_prompts([{"prompt": "q"}, "x"], tokenizer, data, graded=False)


def test_images_sound_and_films_are_refused(tokenizer):
    data = Data(source="a.jsonl")
    for name in ("image", "images", "video", "videos", "audio", "audios"):
        for nothing in (None, [], ""):
            make_prompts([{"prompt": "q", name: nothing}], tokenizer, data, graded=False)
        with pytest.raises(InputError, match=f"row 1: column {name}: only text can be trained on"):
            make_prompts([{"prompt": "q", name: b"PNG"}], tokenizer, data, graded=False)


@pytest.mark.parametrize(
    ("prompt", "warning"),
    [
        (CHAT, "a reference answer belongs into data.answer_column"),
        ("<|im_start|>user\nA tree?<|im_end|>\n", "set data.apply_chat_template=false"),
    ],
)
def test_prompts_that_may_not_be_meant_so_are_warned_of_once(tokenizer, caplog, prompt, warning):
    render(tokenizer, "plain", prompt, prompt)
    (record,) = caplog.records
    assert warning in record.getMessage()
    if prompt != CHAT:
        render(tokenizer, prompt, **TEXT)
    # Gemma's tokenizer has added tokens that are line breaks, as has its template.
    tokenizer.add_tokens("\n")
    render(tokenizer, "a < b, <b>bold</b>, <think>\nand |im_start|")
    assert len(caplog.records) == 1


def test_rows_are_read_when_they_are_used(tokenizer):
    class Rows(list):
        read = 0

        def __getitem__(self, number):
            self.read += 1
            return super().__getitem__(number)

    rows = Rows({"prompt": f"q{n}", "answer": "a", "tests": "x" * n} for n in range(4))
    rows[1]["prompt"] *= 200
    data = Data(source="a.jsonl", max_prompt_length=200, filter_overlong_prompts=True)
    prompts = make_prompts(rows, tokenizer, data, graded=True)
    before = rows.read
    assert len(prompts) == 3
    assert (prompts[1].prompt, prompts[1].columns["tests"]) == ("q2", "xx")
    assert rows.read == before + 2
    assert [prompt.prompt for prompt in prompts[1:]] == ["q2", "q3"]
    del prompts, rows[2:]
    big = [{"prompt": "q", "tests": "x" * 10**6} for _ in range(50)]
    tracemalloc.start()
    prompts = make_prompts(Repeated(big), tokenizer, data, graded=False)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(prompts) == 50
    assert held < 10**6


class Repeated:
    """Rows on disk: each access makes a new one."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, number):
        return {name: "".join(list(text)) for name, text in self._rows[number].items()}


def test_text_takes_no_time_for_each_token_that_the_tokenizer_has_added(tokenizer):
    """Gemma has 6,400; making objects of them all took 8 ms a completion."""
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<u{n}>" for n in range(6400)]})
    ids = [*tokenizer("so <u7>4", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    completion = Completion(Prompt("", [1], None), ids, [], False, 0)
    text = timeit.timeit(lambda: set_text(completion, tokenizer, None), number=20)
    objects = timeit.timeit(lambda: tokenizer.added_tokens_decoder, number=20)
    assert text < objects / 2
    assert (completion.text, completion.whole_text) == ("so 4", "so <u7>4")


@pytest.mark.parametrize("answer", [4, Decimal("4"), np.int64(4), np.float32(4), torch.tensor(4)])
def test_answers_may_be_nested_and_any_number(tokenizer, answer):
    rows = [{"prompt": "q", "model": {"truth": answer}, "a.b": answer}]
    for column in ("model.truth", "a.b"):
        data = Data(source="a.jsonl", answer_column=column)
        (prompt,) = make_prompts(rows, tokenizer, data, graded=True)
        assert equivalent(prompt.answer, "4")
    for column in ("model.false", "model", "a.c.d"):
        data = Data(source="a.jsonl", answer_column=column)
        with pytest.raises(InputError, match=f"answer_column={column} is neither text nor a num"):
            make_prompts(rows, tokenizer, data, graded=True)


def test_chat_templates_that_are_missing_or_refuse(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template; set it to false"):
        render(tokenizer, "2+2?")
    assert render(tokenizer, "2+2?", **TEXT)
    tokenizer.chat_template = "{{ raise_exception('only\\nusers') }}"
    refused = "row 1: the model's chat template refuses the prompt .only users."
    with pytest.raises(InputError, match=refused):
        render(tokenizer, "2+2?")


def test_rows_of_every_kind_of_source(tmp_path):
    rows = [{"prompt": "when?", "answer": "2024-01-01", "x": 2}]
    write_lines(tmp_path / "a.JSONL", rows)
    assert load_rows(Data(source=str(tmp_path / "a.JSONL"))) == rows  # with the date as text
    rows = [{"prompt": "when?", "answer": "yes", "x": 2}, {"prompt": "q", "answer": "no", "x": 4}]
    table = datasets.Dataset.from_list(rows)
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "splits")
    like_the_hub, broken = tmp_path / "data-set", tmp_path / "broken.parquet"
    like_the_hub.mkdir()
    table.to_parquet(like_the_hub / "test.parquet")
    assert list(load_rows(Data(source=str(like_the_hub), split="test"))) == rows
    for name in ("a.csv", "a.parquet", "a.json", "a.jsonl.gz", "saved", "splits"):
        assert list(load_rows(Data(source=str(tmp_path / name)))) == rows
    broken.write_bytes(b"PAR1 not really")
    for source in (like_the_hub, broken, "no-user/no-data-set", "json:no", "none:dumps"):
        with pytest.raises(InputError, match="neither a readable") as error:
            load_rows(Data(source=str(source)))
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="data.source=builtins:globals: rows must be dictionaries"):
        load_rows(Data(source="builtins:globals"))
    more = tmp_path / "more.csv"
    more.write_text("prompt,answer\nWhat, then?,1\n", encoding="utf-8")
    with pytest.raises(InputError, match="neither a readable file"):
        load_rows(Data(source=str(more)))  # the comma in the prompt has no quotes
    for source in ("none.jsonl", "no*.jsonl"):
        with pytest.raises(InputError, match="no such file"):
            load_rows(Data(source=str(tmp_path / source)))
    generated = load_rows(Data(source="stapo_lite.extras.quickstart.one_sentence:prompts"))
    assert (len(generated), generated[26]["word"]) == (500, "stone")
    assert generated[26]["prompt"] == 'Write one sentence about a garden with the word "stone".'


def test_the_subset_of_a_data_set_is_the_one_that_was_asked_for(tmp_path):
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in "ab")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    for name in "ab":
        datasets.Dataset.from_list([{"prompt": name}]).to_parquet(tmp_path / f"{name}.parquet")
    for name in "ab":
        rows = load_rows(Data(source=str(tmp_path), subset=name))
        assert list(rows) == [{"prompt": name}]


EXACT = [
    {"prompt": "18446744073709551620 + 1?", "answer": 18446744073709551621, "id": "007"},
    {"prompt": 'Which "day",\nin Rome?', "answer": 70000000000000000000000004, "id": "NA"},
    {"prompt": "2031-05-09", "answer": -3, "id": "0.50"},
]
TEXTS = [{"a": "None", "b": "2031-05-09", "c": ""}, {"a": "null", "b": "2031-05-10", "c": "x"}]
MIXED = [{"a": 18446744073709551621, "b": 0.1, "c": "nan"}, {"a": 0.5, "b": 3, "c": "1e3"}]


@pytest.mark.parametrize("rows", [EXACT, TEXTS, MIXED], ids=["exact", "texts", "mixed"])
@pytest.mark.parametrize(
    "name",
    [
        "a.json",
        "a.jsonl",
        "a.ndjson",
        "a.csv",
        "a.tsv",
        "lines.json",
        "pretty.json",
        "a.json.gz",
        "a.jsonl.xz",
        "a.csv.gz",
        "*.jsonl",
        "[1].jsonl",
        "a.csv.jsonl",
        "A.TSV",
        "a::b.jsonl",
    ],
)
def test_rows_are_the_same_in_every_format(tmp_path, name, rows):
    """With numbers beyond 64 bits, text that looks like a date, a number or a gap, and a mark."""
    path = tmp_path / name.replace("*", "a")
    lines = "\n".join(map(json.dumps, rows))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(
        text, rows[0], delimiter="\t" if name == "A.TSV" or "tsv" in name else ","
    )
    writer.writeheader()
    writer.writerows(rows)
    whole = json.dumps(rows, indent=2 if name == "pretty.json" else None)
    forms = {".json": whole, ".csv": text.getvalue(), ".tsv": text.getvalue()}
    end = Path(name.lower().removesuffix(".gz").removesuffix(".xz")).suffix
    content = lines if name == "lines.json" else forms.get(end, lines)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content.encode("utf-8-sig")))
    assert load_rows(Data(source=str(tmp_path / name))) == rows


def test_files_that_a_pattern_matches_are_one_data_set(tmp_path):
    for name, kind in (("b", "jsonl"), ("a", "jsonl"), ("c", "txt"), ("b", "parquet")):
        datasets.Dataset.from_list([{"prompt": name}]).to_json(tmp_path / f"{name}.{kind}")
    for name in ("a", "b"):
        datasets.Dataset.from_list([{"prompt": name}]).to_parquet(tmp_path / f"{name}.parquet")
    for kind in ("jsonl", "parquet"):
        rows = load_rows(Data(source=str(tmp_path / f"*.{kind}")))
        assert list(rows) == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_list_of_files_is_refused_in_one_line():
    with pytest.raises(InputError, match="key 'data.source': input should be a valid string"):
        load_config(MINIMAL, {"data.source": ["a.jsonl", "b.jsonl"]})


def test_order_is_a_permutation_of_each_epoch_and_resumes_anywhere():
    whole = prompt_order(10, seed=1, position=0, count=35)
    for epoch in range(3):
        assert sorted(whole[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert whole[:10] != whole[10:20]
    assert whole[:10] != prompt_order(10, seed=2, position=0, count=10)
    for position in (0, 7, 10, 19):
        part = prompt_order(10, seed=1, position=position, count=13)
        assert part == whole[position : position + 13]


def test_stop_tokens_include_the_end_of_an_assistant_turn(tokenizer):
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    both = tuple(sorted((7, end_of_text, end_of_turn)))
    assert stop_token_ids(tokenizer, 7, apply_chat_template=True) == both
    assert stop_token_ids(tokenizer, [7, 8], apply_chat_template=False) == (end_of_text, 7, 8)
    assert stop_token_ids(tokenizer, None, apply_chat_template=False) == (end_of_text,)
