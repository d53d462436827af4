"""A small model that sometimes calls a tool learns to call it."""

import random
from statistics import fmean

import pytest
import torch
from random_model import VOCABULARY, build
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from stapo_lite import Trainer
from stapo_lite.extras.turns.tools import CALL_ID, schemas_of

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
    function = {"name": "times", "arguments": {"a": a, "b": b}}
    call = {"type": "function", "id": CALL_ID, "function": function}
    answers = [{"role": role, "content": str(a * b)} for role in ("tool", "assistant")]
    return [user, {"role": "assistant", "content": "", "tool_calls": [call]}, *answers]


def pretrain(folder) -> None:
    """Write a model to the folder that multiplies by the tool, or guesses."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    tokenizer = AutoTokenizer.from_pretrained(build(folder, config))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model, generator = AutoModelForCausalLM.from_pretrained(folder), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1, 2 * (1 - step / STEPS))
    )
    pad = torch.nn.utils.rnn.pad_sequence
    for _ in range(STEPS):
        rows = []
        for _ in range(32):
            text = tokenizer.apply_chat_template(
                conversation(generator), tools=schemas_of([times]), tokenize=False
            )
            rows.append(torch.tensor(tokenizer(text, add_special_tokens=False).input_ids))
        labels = pad(rows, batch_first=True, padding_value=-100)
        model(pad(rows, batch_first=True), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)


@pytest.mark.slow
def test_it_learns_to_call(tmp_path):
    pretrain(tmp_path / "model")
    texts = []

    def right(completions, product, **_):
        found = [completion[-1]["content"] for completion in completions]
        texts.extend(found)
        return [float(text.endswith(f"a{p}")) for text, p in zip(found, product, strict=True)]

    rows = [
        {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "product": a * b}
        for a in range(2, 10)
        for b in range(2, 10)
    ]
    trainer = Trainer(
        tmp_path / "model",
        right,
        train_dataset=rows,
        tools=[times],
        output_dir=tmp_path / "run",
        engine="transformers",
        dtype="float32",
        max_prompt_length=64,
        max_completion_length=120,
        batch_size=8,
        mini_batch_size=4,
        max_steps=10,
        learning_rate=1e-3,
        warmup_steps=2,
        gradient_checkpointing=False,
    )
    rewards = [metrics["reward"] for metrics in trainer.train()]
    assert fmean(rewards[-3:]) > fmean(rewards[:2]) + 0.25
    first, last = texts[:64], texts[-64:]
    calls = [sum("tool_call" in text for text in part) / 64 for part in (first, last)]
    assert calls[1] > calls[0] + 0.25
