"""Chats with tools: a scripted engine plays the model, in the chat templates of real ones."""

import asyncio
import functools
import inspect
import json
import logging
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import MINIMAL, ROOT, SAMPLING, with_template
from transformers import AutoModelForCausalLM

from stapo_lite import Trainer
from stapo_lite.config import Prompting, load_config
from stapo_lite.data.texts import set_text
from stapo_lite.errors import InputError, RunError, Terminated
from stapo_lite.extras.evaluation.samples import benchmark_tasks
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.extras.turns.episodes import chat_with, run_episodes
from stapo_lite.extras.turns.frequencies import tool_metrics
from stapo_lite.extras.turns.tools import CALL_ID, Chat, schemas_of
from stapo_lite.files import write_lines
from stapo_lite.training.lifecycle import ENDINGS, end_on_sigterm
from stapo_lite.types import Completion, Prompt, Rollouts

pytest.importorskip("vllm", reason="vLLM is not installed, whose parsers read the calls")


def tool(function):
    """A tool; arguments without a type are words."""
    names = inspect.signature(function).parameters
    function.__annotations__ = dict.fromkeys(names, str) | function.__annotations__
    function.__doc__ = "A tool.\n\nArgs:\n" + "".join(f"    {name}: it\n" for name in names)
    return function


@tool
def multiply(a: int, b: int):
    return a * b


@tool
async def search(word):
    return {"found": word.upper()}


CALLING = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_nothink", "llama3_1", "lfm2_v2"]
EMPTY = "<think>\n\n</think>\n\n"
SCHEMAS = schemas_of([multiply, search])
ROW = Prompt("What is 3 * 4?", [1], None, {"answer": 12})
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>")
SETTINGS = replace(SAMPLING, num_generations=1, max_completion_length=2000, max_model_len=4500)


def make_chat(folder, template="qwen2_5", **prompting) -> Chat:
    return Chat(with_template(folder, template), Prompting(**prompting))


def talk(chat: Chat, function, *script: str) -> tuple[Completion, list[str]]:
    """Run one episode of these turns; return it, and what the model read before each turn."""
    turns, read = iter(script), []

    class Scripted(TransformersEngine):
        def add(self, *request):
            self.request = request

        def step(self):
            index, prompt, _, _ = self.request
            read.append(chat.tokenizer.decode(prompt.token_ids))
            ids = chat.tokenizer(next(turns), add_special_tokens=False).input_ids
            return [(index, Completion(prompt, ids, [-0.5] * len(ids), False, 1))]

    engine = Scripted(SETTINGS, 1)
    ((completion,),) = run_episodes(engine, SETTINGS, chat, function, [ROW], [7])
    assert next(turns, None) is None
    return completion, read


def tokens_of_the_model(completion):
    pairs = zip(completion.token_ids, completion.loss_mask, strict=True)
    return [token for token, own in pairs if own]


def call(name: str, **arguments) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


@pytest.mark.parametrize("template", CALLING)
def test_an_episode_is_the_conversation_as_the_template_writes_it(tiny_model, template):
    chat = make_chat(tiny_model, template, system_prompt="Be brief.", prompt_suffix=" Think.")
    messages = [{"role": "system", "content": "Be brief."}]
    messages.append({"role": "user", "content": "What is 3 * 4? Think."})
    for name, arguments, result in (
        ("multiply", {"a": 3, "b": 4}, "12"),
        ("search", {"word": "twelve"}, '{"found": "TWELVE"}'),
    ):
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "name": name, "content": result})
    messages.append({"role": "assistant", "content": "It is 12."})
    render = functools.partial(chat.tokenizer.apply_chat_template, tools=SCHEMAS, tokenize=False)
    befores = [render(messages[:count], add_generation_prompt=True) for count in (2, 4, 6)]
    afters = [render(messages[:count]) for count in (3, 5, 7)]
    script = [a.removeprefix(b).rstrip() for a, b in zip(afters, befores, strict=True)]
    completion, read = talk(chat, chat_with([multiply, search]), *script)
    # Qwen3's template takes the empty thoughts out of earlier turns; what was sampled stays.
    assert [text.replace(EMPTY, "") for text in read] == [t.replace(EMPTY, "") for t in befores]
    token_ids = completion.prompt.token_ids + completion.token_ids
    assert chat.tokenizer.decode(token_ids) == read[-1] + script[-1]
    assert chat.tokenizer.decode(tokens_of_the_model(completion)) == "".join(script)
    assert (completion.prompt.columns, completion.truncated) == (ROW.columns, False)
    for turn in messages[2:]:
        for one in turn.get("tool_calls", []):
            one["id"] = CALL_ID
    said = [{k: v for k, v in turn.items() if k != "tool_call_id"} for turn in completion.messages]
    said[-1]["content"] = said[-1]["content"].replace(EMPTY, "")
    assert said == messages[2:]  # what rewards get, as from TRL


def test_what_a_tool_returned_is_not_the_models_answer(tiny_model):
    chat = make_chat(tiny_model)
    called = call("multiply", a=3, b=4)
    completion, _ = talk(chat, chat_with([multiply]), called, "Done.<|im_end|>")
    set_text(completion, chat.tokenizer, None)
    assert completion.whole_text == f"{called}Done."
    assert "<tool_response>\n12\n</tool_response>" in completion.text


async def answer_and_check(episode):
    await episode.generate()
    await says("user", "Sure?")(episode)


def test_rewards_get_no_messages_if_a_turn_is_missing_in_them(tiny_model):
    completion, _ = talk(make_chat(tiny_model), answer_and_check, "12<|im_end|>", "Yes.<|im_end|>")
    assert completion.messages is None


def test_frequencies_of_calls_and_failures_are_trls():
    """Calls per completion, and failures per call."""

    def chat(*results):
        answers = [{"role": "tool", "name": "t", "content": result} for result in results]
        turns = [{"role": "assistant", "content": ""}, *answers]
        return Completion(ROW, [1], [0.0], False, 1, messages=turns)

    group = [chat("1", "error: LookupError: no"), chat("2"), chat(), chat()]
    means = tool_metrics(Rollouts(sampled=[group]))
    assert means["tools/call_frequency"].value == 3 / 4
    assert means["tools/failure_frequency"].value == 1 / 3


def test_benchmarks_are_asked_without_tools(tiny_model, tmp_path):
    chat = make_chat(tiny_model)
    write_lines(tmp_path / "mine.jsonl", [{"problem": "1 + 1?", "answer": "2"}])
    asked = []
    for keys in {}, {"data.chat_template_kwargs.tools": SCHEMAS}:
        mine = (chat.tokenizer, [str(tmp_path / "mine.jsonl")], 1, None)
        asked += benchmark_tasks(load_config(MINIMAL, keys), *mine)
    assert asked[0].prompt.token_ids == asked[1].prompt.token_ids


def test_nothing_that_a_model_or_a_tool_writes_ends_the_run(tiny_model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])

    @tool
    def echo(word):
        if word == "exit":
            raise SystemExit(3)
        if word == "close":
            raise GeneratorExit
        if word == "next":
            return next(iter(()))
        others = {"path": Path("a/b"), "table": {(word, 1): 2}, "city": ["Zürich"]}
        return others.get(word, f"nothing found for {word}")

    @functools.wraps(search)
    def wrapped(word):
        return search(word)

    script = {
        call("divide", a=1, b=2): "error: LookupError: there is no tool 'divide', only echo, sea",
        call("multiply", a=1): "error: TypeError: multiply() missing 1 required",
        call("multiply", a=1, b=[]): "[]",
        call("search", word="x"): '{"found": "X"}',
        call("echo", word="\ud83d"): "nothing found for ?",
        call("echo", word="exit"): "error: SystemExit: 3",
        call("echo", word="close"): "error: GeneratorExit: ",
        call("echo", word="next"): "error: StopIteration: ",
        call("echo", word="path"): '"a/b"',
        call("echo", word="city"): '["Zürich"]',
        call("echo", word="table"): "error: TypeError: keys must be str",
        f"<think>{call('echo', word='a')}</think>" + call("echo", word="b"): "nothing found for b",
        "<tool_call>\nno JSON\n</tool_call><|im_end|>": "",  # cannot be read: an answer
    }
    chat, tools = make_chat(tiny_model), [echo, wrapped, multiply]
    _, read = talk(chat, lambda e: e.chat(e.messages, tools, max_turns=20), *script)
    for found, expected in zip([*RESULT.findall(read[-1]), ""], script.values(), strict=True):
        assert found.startswith(expected)
    assert not caplog.records  # vLLM logs a call that it cannot read with a traceback


def test_coroutines_of_one_turn_run_side_by_side_plain_tools_in_the_main_thread(tiny_model):
    """A plain tool may use signals, or a connection that belongs to its thread."""
    chat, meeting = make_chat(tiny_model), asyncio.Barrier(2)

    @tool
    async def wait(word):
        return await meeting.wait()

    @tool
    def alarm(word):
        signal.alarm(0)
        return signal.signal(signal.SIGALRM, signal.SIG_DFL).name

    script = "".join(call(name, word="a") for name in ("wait", "wait", "alarm"))
    script = script.replace("<|im_end|>", "") + "<|im_end|>"
    tools = [wait, alarm]
    completion, read = talk(chat, lambda e: e.chat(e.messages, tools, max_turns=2), script, script)
    *numbers, name = RESULT.findall(read[-1])
    assert (sorted(numbers), name) == (["0", "1"], "SIG_DFL")
    assert chat.tokenizer.decode(tokens_of_the_model(completion)) == script + script


@pytest.mark.parametrize("blocks", ["tool", "coroutine"])
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, Terminated),
        (signal.SIGUSR1, Terminated),
        (signal.SIGHUP, Terminated),
    ],
)
def test_a_tool_that_hangs_can_be_interrupted(tiny_model, blocks, number, error):
    before = {ending: signal.getsignal(ending) for ending in ENDINGS}
    end_on_sigterm()

    @tool
    def hang(word):
        signal.raise_signal(number)

    @tool
    async def wait(word):
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    chosen = hang if blocks == "tool" else wait
    try:
        with pytest.raises(error):
            talk(make_chat(tiny_model), chat_with([chosen]), call(chosen.__name__, word="a"))
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)


def says(role, content, **options):
    return lambda episode: episode.chat([{"role": role, "content": content}], **options)


async def two_questions(episode):
    await says("user", "One?", stop=["."])(episode)
    await says("user", "Two?")(episode)


def test_a_user_may_go_on_also_where_a_turn_ended_by_a_stop_string(tiny_model):
    chat = make_chat(tiny_model)
    completion, (first, second) = talk(chat, two_questions, "1.", "2.<|im_end|>")
    assert first.endswith("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n")
    more = "1.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    assert second == first + more
    assert chat.tokenizer.decode(tokens_of_the_model(completion)) == "1.2.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "function", "error", "message"),
    [
        ("qwen2_5", chat_with([len]), InputError, "^tools: a list of functions with type hints"),
        ("qwen2_5", chat_with([multiply, multiply]), InputError, "two of multiply, multiply have"),
        ("gptoss", two_questions, InputError, "does not end each turn alike"),
        ("phi3", chat_with([multiply]), InputError, "template has none, or vLLM cannot read"),
        ("gemma3", says("tool", "x"), InputError, "^chat: the model's chat template refuses the"),
        ("qwen2_5", says("user", "x" * 3000), RunError, "max_prompt_length is 2500: raise it"),
    ],
)
def test_chats_that_cannot_be(tiny_model, template, function, error, message):
    with pytest.raises(error, match=message):
        talk(make_chat(tiny_model, template), function, "1<|return|><|end|>")


def test_a_model_without_tools_is_refused_before_an_engine_starts(
    tiny_model, tmp_path, monkeypatch
):
    make_chat(tiny_model, "phi3").tokenizer.save_pretrained(tmp_path / "model")
    shutil.copy(tiny_model / "config.json", tmp_path / "model")
    monkeypatch.setattr("stapo_lite.assemble.open_engine", Mock(side_effect=AssertionError))
    rows = [{"prompt": "What is 3 * 4?"}]
    trainer = Trainer(
        tmp_path / "model",
        lambda completions, **_: [1.0] * len(completions),
        train_dataset=rows,
        tools=[multiply],
        output_dir=tmp_path / "run",
        batch_size=1,
        mini_batch_size=1,
    )
    with pytest.raises(InputError, match="template has none"):
        trainer.train()


def save_with_template(tiny_model, folder):
    """Save the tiny model with Qwen3's template; return its tokenizer."""
    tokenizer = make_chat(tiny_model, "qwen3").tokenizer
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.resize_token_embeddings(len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return tokenizer


def test_the_page_about_tools(tiny_model, tmp_path, monkeypatch, trained):
    """With the tiny model in place of Qwen3; what it writes is scripted, since it cannot call."""
    tokenizer = save_with_template(tiny_model, tmp_path / "model")

    def answer(self):
        finished = []
        for index, (prompt, seed, _) in self._asked.items():
            question, *found = tokenizer.decode(prompt.token_ids).split("<tool_response>\n")
            n, river = re.findall(r"are (\d) times the (\w+)", question)[0]
            text = call("length", river=river)
            if found:
                km = int(n) * int(found[0].split()[0])
                text = f"{km} km, {'right' if seed % 2 else '1'}<|im_end|>"
            ids = tokenizer(text, add_special_tokens=False).input_ids
            finished.append((index, Completion(prompt, ids, [-5.0] * len(ids), False, 1)))
        self._asked.clear()
        return finished

    monkeypatch.setattr(TransformersEngine, "step", answer)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8")
    lines = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    lines = lines.replace("Qwen/Qwen3-1.7B", str(tmp_path / "model"))
    smaller = "max_steps=1, engine='transformers', self_check=False, max_completion_length=600"
    exec(lines.replace("max_steps=20", f"{smaller}, max_prompt_length=3000"), {})
    assert len(trained) == 32
    assert {completion.reward for completion in trained} == {0.0, 1.0}  # 1.0: as the tools say
