"""Training with tools, from a model that multiplies by a tool, or guesses."""

import itertools
import random
from functools import partial
from statistics import fmean

import pytest
import torch
from random_model import VOCABULARY, build
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from stapo_lite import Trainer
from stapo_lite.extras.turns.tools import schemas_of

pytest.importorskip("vllm", reason="vLLM is not installed, whose parsers read the calls")

TEMPLATE = (  # a short one: each byte is a token
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
STEPS, CALLS = 300, 0.4
"""Of pre-training, and the share of its answers that call the tool; the others guess."""


def times(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def conversation(generator: random.Random) -> list[dict]:
    a, b = generator.randint(2, 9), generator.randint(2, 9)
    user = {"role": "user", "content": f"{a}*{b}"}
    if generator.random() > CALLS:
        return [user, {"role": "assistant", "content": str(generator.randint(4, 81))}]
    calls = [{"type": "function", "function": {"name": "times", "arguments": {"a": a, "b": b}}}]
    answers = [{"role": role, "content": str(a * b)} for role in ("tool", "assistant")]
    return [user, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


def pretrain(folder) -> None:
    """Write a model to the folder that multiplies by the tool, or guesses."""
    torch.manual_seed(0)
    size = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    config = Qwen3Config(vocab_size=VOCABULARY, eos_token_id=1, **size, **heads)
    tokenizer = AutoTokenizer.from_pretrained(build(folder, config))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    render = partial(tokenizer.apply_chat_template, tools=schemas_of([times]), tokenize=False)
    model, generator = AutoModelForCausalLM.from_pretrained(folder), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pad = torch.nn.utils.rnn.pad_sequence
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * min((step + 1) / 20, 1, 2 * (1 - step / STEPS))
        texts = [render(conversation(generator)) for _ in range(32)]
        rows = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
        labels = pad(rows, batch_first=True, padding_value=-100)
        model(pad(rows, batch_first=True), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.mark.slow
def test_a_model_that_sometimes_calls_a_tool_learns_to_call_it(tmp_path):
    pretrain(tmp_path / "model")

    def right(completions, product, **_):
        found = [completion[-1]["content"] for completion in completions]
        return [float(text == str(p)) for text, p in zip(found, product, strict=True)]

    rows = [
        {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "product": a * b}
        for a, b in itertools.product(range(2, 10), repeat=2)
    ]
    keys = {"engine": "transformers", "dtype": "float32", "output_dir": tmp_path / "run"}
    keys |= {"max_prompt_length": 64, "max_completion_length": 120, "max_steps": 10}
    keys |= {"batch_size": 8, "mini_batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 2}
    keys |= {"gradient_checkpointing": False}
    trainer = Trainer(tmp_path / "model", right, train_dataset=rows, tools=[times], **keys)
    history = trainer.train()
    for name in "reward", "tools/call_frequency":
        values = [metrics[name] for metrics in history]
        assert fmean(values[-3:]) > fmean(values[:2]) + 0.25
