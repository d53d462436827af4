"""STAPO on one page, from prompts to the optimiser's step. Read this first.

    python -m stapo_lite.minimal MODEL ROWS

    python -m stapo_lite.minimal MODEL ROWS REWARD

ROWS is a file of JSON lines with a `prompt`, or `package.module:function`, which returns such rows.
REWARD is `package.module:function`; by default the quickstart's.

Advantages, masks, factors and loss are the package's own functions (`method/`). Left out are vLLM,
several devices, mixed precision, memory that runs out, checkpoints and logs: `training/loop.py` and
`training/update.py` take the same steps in the same order, with all of these.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from stapo_lite.config import Objective
from stapo_lite.files import read_jsonl
from stapo_lite.method.advantages import group_advantages
from stapo_lite.method.lm_head import Head, token_statistics
from stapo_lite.method.loss import find_factors, policy_loss
from stapo_lite.method.masks import find_masks
from stapo_lite.method.microbatches import cut_evenly
from stapo_lite.method.tokens import Tokens, pack
from stapo_lite.types import Completion, Prompt, TokenStatistics

STEPS = 15
PROMPTS = 8  # of a step
GROUP = 8  # completions of a prompt
LENGTH = 32  # tokens of a completion, at most
MINI_BATCHES = 2  # of a step, an update each
MICRO_BATCH = 16  # completions in one pass through the model
LEARNING_RATE = 4e-4
MAX_GRAD_NORM = 1.0


def train(model_name: str, rows: Sequence[dict[str, Any]], reward: Any) -> list[float]:
    """Train a LoRA adapter; returns the mean reward of each step.

    Args:
        rows: each with a `prompt`; its other columns go to the reward.
        reward: gets the answers, and the columns of their rows:
            `reward(completions=[...], column=[...], ...)`.
    """
    torch.manual_seed(0)
    random.seed(0)
    objective = Objective()  # the defaults are STAPO; docs/methods.md has the others
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    base = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    # Only the adapter is trained. Its B is zero, so that training begins at the base model.
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=LEARNING_RATE)
    history = []
    for step in range(STEPS):
        # 1. The model answers each prompt several times. We compare the answers of a prompt with
        #    each other. Therefore no second model has to predict how good an answer will be.
        step_rows = random.sample(rows, PROMPTS)
        completions = sample(model, tokenizer, [row["prompt"] for row in step_rows])
        # 2. Your function says how good each answer is.
        columns = {
            name: [row[name] for row in step_rows for _ in range(GROUP)] for name in step_rows[0]
        }
        scores = reward(completions=[completion.text for completion in completions], **columns)
        # 3. An answer's advantage: how much better it is than the others of its group, in standard
        #    deviations. Where all are equal, it is 0, and there is nothing to learn.
        rewards = torch.tensor(scores, dtype=torch.float32).view(PROMPTS, GROUP)
        for completion, advantage in zip(
            completions, group_advantages(rewards).flatten().tolist(), strict=True
        ):
            completion.advantage = advantage
        # 4. Put the tokens into tables, and measure them before the model changes. This model also
        #    sampled, with the probabilities that we measure now. (vLLM rounds differently, and the
        #    loss corrects for that. The package measures only what an update needs.)
        batches = []
        for part in cut_evenly(completions, len(completions) // MINI_BATCHES):
            tokens = pack(part, model.device, objective)
            with torch.no_grad():
                tokens.old = statistics(model, tokens.completions)
            tokens.rollout_logprobs = tokens.old.logprobs
            batches.append(tokens)
        # 5. Update on one table after the other. From the second on, the model is no longer the
        #    one that sampled: the ratio of their probabilities corrects for it, and is clipped.
        for tokens in batches:
            update(model, optimizer, tokens, objective)
        history.append(rewards.mean().item())
        print(f"step {step + 1}/{STEPS} | reward {history[-1]:.3f} | {completions[0].text!r}")
    return history


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[str]) -> list[Completion]:
    """Sample a group of completions for each prompt, from the full distribution: top-p or top-k
    would be another policy than the one whose probabilities we train."""
    # An empty system message, or some templates add one of their own.
    chats = [[{"role": "system", "content": ""}, {"role": "user", "content": p}] for p in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    # The template has added the special tokens already.
    options = {"padding": True, "padding_side": "left", "add_special_tokens": False}
    inputs = tokenizer(texts, return_tensors="pt", **options)
    output = model.generate(
        **inputs.to(model.device),
        **{"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        eos_token_id=tokenizer.eos_token_id,
        num_return_sequences=GROUP,
        max_new_tokens=LENGTH,
    )
    completions = []
    for number, ids in enumerate(output[:, inputs.input_ids.shape[1] :].tolist()):
        # A completion ends with its stop token, unless it was cut off.
        stopped = tokenizer.eos_token_id in ids
        ids = ids[: ids.index(tokenizer.eos_token_id) + 1] if stopped else ids
        real = inputs.attention_mask[number // GROUP].bool()
        prompt_ids = inputs.input_ids[number // GROUP][real].tolist()
        prompt = Prompt(prompts[number // GROUP], prompt_ids, answer=None)
        completion = Completion(
            prompt,
            token_ids=ids,
            rollout_logprobs=[0.0] * len(ids),  # below they are measured
            truncated=not stopped,
            adapter_version=0,
            text=tokenizer.decode(ids, skip_special_tokens=True),
        )
        completions.append(completion)
    return completions


def update(model: Any, optimizer: Any, tokens: Tokens, objective: Objective) -> None:
    """Update the adapter once."""
    assert tokens.old is not None
    # Leave spurious tokens out: the answer was good, the token improbable, and the model sure of
    # another one.
    masks = find_masks(tokens.old, tokens, objective, gather=alone)
    # Divide by the number of tokens that are left. It is known before any gradient. Therefore it
    # makes no difference how the table is cut into passes.
    factor = find_factors(tokens, masks.keep, objective, LENGTH, reduce=alone)
    if factor is None:  # nothing has a gradient, such as with equal rewards in every group
        return
    table = tokens.with_masks(masks, factor)
    for numbers in cut_evenly(tokens.trained, MICRO_BATCH):
        part = table.part(numbers)
        current = statistics(model, part.completions)
        policy_loss(part, current, None, objective).surrogate.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()


def statistics(model: Any, completions: Sequence[Completion]) -> TokenStatistics:
    """Log-probability, entropy and collision probability of each completion token, [n]."""
    sequences = [torch.tensor(c.prompt.token_ids + c.token_ids) for c in completions]
    # Padding on the right needs no mask: in a causal model no token looks to its right.
    input_ids = pad_sequence(sequences, batch_first=True).to(model.device)
    causal_lm = model.get_base_model()
    states = causal_lm.get_decoder()(input_ids=input_ids).last_hidden_state
    hidden = []
    for row, completion in zip(states, completions, strict=True):
        first = len(completion.prompt.token_ids) - 1  # the state before a token predicts it
        hidden.append(row[first : first + len(completion.token_ids)])
    targets = torch.tensor([token for c in completions for token in c.token_ids])
    # The logits of all tokens at once would not fit on a card; this goes through them in tiles.
    head = causal_lm.get_output_embeddings().weight
    return token_statistics(torch.cat(hidden), Head(head), targets.to(head.device))


def alone(values: Tensor) -> Tensor:
    """What `gather` and `reduce` are in a single process."""
    return values


if __name__ == "__main__":
    name, source, *options = sys.argv[1:]
    path = options[0] if options else "stapo_lite.extras.quickstart.one_sentence:reward"
    rows = read_jsonl(source) if Path(source).exists() else resolve_name(source)()
    train(name, rows, resolve_name(path))
