"""Chats with tools: a scripted engine plays the model, in the chat templates of real ones."""

import asyncio
import functools
import json
import logging
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trl
from helpers import ROOT, SAMPLING
from transformers import AutoModelForCausalLM, AutoTokenizer

from stapo_lite.config import Prompting
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.evaluation.tasks import make_tasks
from stapo_lite.extras.turns.episodes import chat_with, play
from stapo_lite.extras.turns.tools import Chat, ToolCall, run_tool, schema_of, schemas_of
from stapo_lite.files import write_lines
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.types import Completion, Prompt

pytest.importorskip("vllm", reason="vLLM is not installed, whose parsers read the calls")

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
EMPTY = "<think>\n\n</think>\n\n"
ROW = Prompt("What is 3 * 4?", [1], None, {"answer": 12})
SETTINGS = replace(SAMPLING, num_generations=1, max_completion_length=900, max_model_len=3400)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


async def search(word: str) -> dict:
    """Search for a word.

    Args:
        word: what to look for
    """
    await asyncio.sleep(0)
    return {"found": word.upper()}


def make_chat(folder, template: str, **prompting) -> Chat:
    """A chat with one of TRL's templates; its special tokens join a byte-level tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    special = re.findall(r"<\|\w+\|>|</?tool_(?:call|response)>", tokenizer.chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*set(special), "<|python_tag|>"]})
    return Chat(tokenizer, Prompting(**prompting))


def talk(chat: Chat, function, *script: str) -> tuple[Completion, list[str]]:
    """Run one episode whose turns are those of the script; return it, and what the model read
    before each turn."""
    turns, read = iter(script), []

    class Scripted(TransformersEngine):
        def stream(self, prompts, seeds, decodings):
            read.extend(map(chat.tokenizer.decode, (p.token_ids for p in prompts)))
            ids = chat.tokenizer(next(turns), add_special_tokens=False).input_ids
            yield 0, Completion(prompts[0], ids, [-0.5] * len(ids), False, 1)

    ((completion,),) = play(Scripted(SETTINGS, 1), SETTINGS, chat, function, [ROW], [7])
    assert next(turns, None) is None
    return completion, read


def called(name: str, **arguments) -> dict:
    function = {"name": name, "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    "template", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "lfm2_v2"]
)
def test_an_episode_is_the_conversation_as_the_template_writes_it(tiny_model, template):
    chat = make_chat(tiny_model, template, system_prompt="Be brief.", prompt_suffix=" Think.")
    tools, schemas = [multiply, search], schemas_of([multiply, search])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 3 * 4? Think."},
        called("multiply", a=3, b=4),
        {"role": "tool", "name": "multiply", "tool_call_id": "call00000", "content": "12"},
        called("search", word="twelve"),
        {
            "role": "tool",
            "name": "search",
            "tool_call_id": "call00000",
            "content": '{"found": "TWELVE"}',
        },
        {"role": "assistant", "content": "It is 12."},
    ]

    def render(count: int, prompt: bool) -> str:
        return chat.tokenizer.apply_chat_template(
            messages[:count], tools=schemas, tokenize=False, add_generation_prompt=prompt
        )

    script = []
    for turn in (2, 4, 6):
        before, after = render(turn, prompt=True), render(turn + 1, prompt=False)
        assert after.startswith(before)
        script.append(after.removeprefix(before).rstrip())
    completion, read = talk(chat, chat_with(tools), *script)
    texts = [render(2, prompt=True), render(4, prompt=True), render(6, prompt=True)]
    # Qwen3's template takes the empty thoughts out of earlier turns; what was sampled stays.
    assert [text.replace(EMPTY, "") for text in read] == [t.replace(EMPTY, "") for t in texts]
    token_ids = completion.prompt.token_ids + completion.token_ids
    assert chat.tokenizer.decode(token_ids) == read[-1] + script[-1]
    own = [
        token for token, own in zip(completion.token_ids, completion.loss_mask, strict=True) if own
    ]
    assert chat.tokenizer.decode(own) == "".join(script)
    assert completion.prompt.columns == ROW.columns
    assert not completion.truncated


def test_benchmarks_are_asked_without_tools(tiny_model, tmp_path):
    """Nobody would run them there."""
    write_lines(tmp_path / "mine.jsonl", [{"problem": "1 + 1?", "answer": "2"}])
    tokenizer = make_chat(tiny_model, "qwen2_5").tokenizer
    given = [{}, {"tools": schemas_of([multiply])}]
    without, asked = (
        make_tasks([str(tmp_path / "mine.jsonl")], 1, None, tokenizer, Prompting(**keys))
        for keys in ({"chat_template_kwargs": kwargs} for kwargs in given)
    )
    assert asked[0].prompt.token_ids == without[0].prompt.token_ids


@pytest.fixture
def chat(tiny_model):
    return make_chat(tiny_model, "qwen2_5")


def call(name: str, **arguments) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


def results(text: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)


def test_errors_are_results(chat, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])
    _, read = talk(
        chat,
        chat_with([multiply]),
        call("divide", a=1, b=2),
        call("multiply", a=1),
        call("multiply", a=1, b=[]),
        "<tool_call>\nno JSON\n</tool_call><|im_end|>",  # cannot be read: an answer
    )
    unknown, missing, product = results(read[-1])
    assert unknown == "error: LookupError: there is no tool 'divide', only multiply"
    assert missing.startswith("error: TypeError: multiply() missing 1 required")
    assert product == "[]"
    assert not caplog.records  # vLLM logs a call that it cannot read with a traceback


def test_a_result_of_any_kind_is_text():
    def nothing_found():
        return next(word for word in ())

    @functools.wraps(search)
    def wrapped(word):
        return search(word)

    def city():
        return ["Zürich"]

    tools = [nothing_found, wrapped, city]
    calls = [ToolCall("nothing_found", {}), ToolCall("search", {"word": "x"}), ToolCall("city", {})]

    async def run_all():
        return [await asyncio.wait_for(run_tool(tools, call), 60) for call in calls]

    assert asyncio.run(run_all()) == [
        "error: RuntimeError: StopIteration",
        '{"found": "X"}',
        '["Zürich"]',
    ]


def test_several_calls_in_one_turn_and_a_limit_of_turns(chat):
    both = call("multiply", a=2, b=3).removesuffix("<|im_end|>") + call("search", word="x")
    texts = []

    async def limited(episode):
        texts.append(await episode.chat(episode.messages, [multiply, search], max_turns=2))

    completion, read = talk(chat, limited, both, both)
    assert results(read[-1]) == ["6", '{"found": "X"}']
    assert completion.token_ids[-1] == chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert texts[0].count('{"name"') == 2


def test_a_user_may_go_on_also_where_a_turn_ended_by_a_stop_string(chat):
    async def two_questions(episode):
        await episode.chat([{"role": "user", "content": "One?"}], stop=["."])
        await episode.chat([{"role": "user", "content": "Two?"}])

    completion, read = talk(chat, two_questions, "1.", "2.<|im_end|>")
    assert read[0].endswith("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n")
    assert read[1] == (
        read[0] + "1.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sum(completion.loss_mask) == len(chat.tokenizer("1.2.<|im_end|>").input_ids)


def test_what_a_model_or_a_tool_may_write(chat):
    """None of it ends the run: half a character, the program's end, a value that is no JSON, calls
    within thoughts."""

    def echo(word: str) -> str:
        """Return a word.

        Args:
            word: the word
        """
        if word == "exit":
            raise SystemExit(3)
        return Path("a/b") if word == "path" else f"nothing found for {word}"

    thought = call("echo", word="a").removesuffix("<|im_end|>")
    script = [
        '<tool_call>\n{"name": "echo", "arguments": {"word": "\\ud83d"}}\n</tool_call><|im_end|>',
        call("echo", word="exit"),
        call("echo", word="path"),
        f"<think>{thought}</think>" + call("echo", word="b"),
        "Done.<|im_end|>",
    ]
    _, read = talk(chat, chat_with([echo]), *script)
    found = results(read[-1])
    assert found == ["nothing found for ?", "error: SystemExit: 3", '"a/b"', "nothing found for b"]


def test_what_json_cannot_hold_is_an_error_of_the_tool(chat):
    def table(word: str) -> dict:
        """Return a table.

        Args:
            word: the word
        """
        return {(word, 1): 2}

    _, read = talk(chat, chat_with([table]), call("table", word="a"), "Done.<|im_end|>")
    (found,) = results(read[-1])
    assert found.startswith("error: TypeError: keys must be str")


def test_tools_that_episodes_define_are_forgotten():
    def make(episode):
        def look(word: str) -> str:
            """Return a word.

            Args:
                word: the word
            """
            return word + episode

        return look

    for number in range(200):
        schemas_of([make(str(number))])
    assert schema_of.cache_info().currsize < 100


def test_tools_of_a_turn_wait_side_by_side(chat):
    meeting = threading.Barrier(2)

    def wait(who: str) -> int:
        """Wait for the other.

        Args:
            who: it is
        """
        return meeting.wait(30)

    both = call("wait", who="a").removesuffix("<|im_end|>") + call("wait", who="b")
    _, read = talk(chat, chat_with([wait]), both, "Done.<|im_end|>")
    assert sorted(results(read[-1])) == ["0", "1"]


def test_what_cannot_be_done_is_said(chat, tiny_model):
    def undescribed(a: int) -> int:
        return a

    with pytest.raises(InputError, match="^tools: a list of functions with type hints"):
        schemas_of([undescribed])
    with pytest.raises(InputError, match="tools: two of multiply, multiply have the same name"):
        schemas_of([multiply, multiply])

    async def again(episode):
        await episode.chat([{"role": "user", "content": "One?"}])
        await episode.chat([{"role": "user", "content": "Two?"}])

    with pytest.raises(InputError, match="does not end each turn alike"):
        talk(make_chat(tiny_model, "gptoss"), again, "1<|return|>")
    with pytest.raises(InputError, match="vLLM cannot read the calls of the model's chat template"):
        talk(make_chat(tiny_model, "phi3"), chat_with([multiply]), "Hello<|end|>")
    with pytest.raises(RunError, match="max_prompt_length is 2500: raise it"):
        talk(chat, lambda episode: episode.chat([{"role": "user", "content": "x" * 3000}]))
    with pytest.raises(InputError, match="^chat: the model's chat template refuses the messages"):
        talk(make_chat(tiny_model, "gemma3"), lambda e: e.chat([{"role": "tool", "content": "x"}]))


def test_the_page_about_tools(tiny_model, tmp_path, monkeypatch, trained):
    """With the tiny model in place of Qwen3; what it writes is scripted, since it cannot call."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.max_position_embeddings = 4096
    tokenizer = make_chat(tiny_model, "qwen3").tokenizer
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def answer(self, prompts, seeds, decodings):
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            question, *results = re.split("<tool_response>\n", tokenizer.decode(prompt.token_ids))
            n, river = re.findall(r"are (\d) times the (\w+)", question)[0]
            if not results:
                text = call("search", query=river)
            elif len(results) == 1:
                km = int(re.findall("is ([0-9,]+) km", results[0])[0].replace(",", ""))
                text = call("multiply", a=int(n), b=km)
            else:
                text = f"{results[1].split()[0]} km, {'right' if seed % 2 else '1'}<|im_end|>"
            ids = tokenizer(text, add_special_tokens=False).input_ids
            yield index, Completion(prompt, ids, [-5.0] * len(ids), False, 1)

    monkeypatch.setattr(TransformersEngine, "stream", answer)
    monkeypatch.chdir(tmp_path)
    smaller = "max_steps=1, engine='transformers', max_completion_length=600, self_check=False, "
    page = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8")
    lines = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace(
        "Qwen/Qwen3-1.7B", str(tmp_path / "model")
    )
    names: dict = {}
    exec(lines.replace("max_steps=20", smaller + "max_prompt_length=3000"), names)
    assert len(trained) == 32
    assert {completion.reward for completion in trained} == {0.0, 1.0}
    results = [
        "".join(
            tokenizer.decode([i])
            for i, own in zip(c.token_ids, c.loss_mask, strict=True)
            if not own
        )
        for c in trained
    ]
    assert all(
        str(c.prompt.columns["number"]) in text for c, text in zip(trained, results, strict=True)
    )
