"""Pre-train the model for `countdown.py` from scratch on its traces: a Qwen3 of half a million
parameters, whose words are its tokens. Takes about a quarter of an hour on a core.

    OMP_NUM_THREADS=1 python benchmarks/countdown_model.py [FOLDER]

The weights are rounded to bfloat16, and the folder has less than a megabyte. The study's is kept in
`benchmarks/countdown_base`.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from countdown import VOCABULARY, is_right, prompts, trace
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FOLDER = Path(__file__).parent / "countdown_base"
IDS = {word: number for number, word in enumerate(VOCABULARY)}
BATCH, PEAK = 64, 3e-3
"""Traces in a step, and the highest learning rate."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_model(width: int) -> Qwen3ForCausalLM:
    """An untrained model of four layers."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=IDS["<eos>"],
        pad_token_id=IDS["<pad>"],
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def draw_batch(rows: list[dict[str, Any]], generator: random.Random) -> tuple[Tensor, Tensor]:
    """Token ids and labels of some rows with a new trace each, [BATCH, longest]."""
    ids, labels = [], []
    for row in generator.sample(rows, BATCH):
        prompt = [IDS[word] for word in row["prompt"].split()]
        answer = [IDS[word] for word in (*trace(row, generator), "<eos>")]
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def pretrain(model: Qwen3ForCausalLM, rows: list[dict[str, Any]], steps: int) -> None:
    """Train with AdamW; the rate falls to zero over the second half."""
    generator = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1.0, 2 * (1 - step / steps))
    )
    for step in range(steps):
        ids, labels = draw_batch(rows, generator)
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def solved(model: Qwen3ForCausalLM, rows: list[dict[str, Any]]) -> float:
    """The share of the rows whose sampled answer is right."""
    ids = torch.tensor([[IDS[word] for word in row["prompt"].split()] for row in rows])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=66
    )
    texts = make_tokenizer().batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    right = [
        is_right(text, row["numbers"], row["target"]) for text, row in zip(texts, rows, strict=True)
    ]
    return sum(right) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--width", type=int, default=96)
    given = parser.parse_args()
    torch.manual_seed(0)
    rows, held_out = prompts()
    model = make_model(given.width)
    pretrain(model, rows, given.steps)
    model.bfloat16().save_pretrained(given.folder)
    make_tokenizer().save_pretrained(given.folder)
    print(f"solved: {solved(model.float().eval(), held_out):.2f} of the held-out puzzles")


if __name__ == "__main__":
    main()
