"""A language model as second judge of answers that the rules reject."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from stapo_lite.errors import InputError, explained
from stapo_lite.model.loading import load_weights

INSTRUCTION = """\
You grade the final answer of a candidate. The standard answer is right; do not solve the problem yourself. Compare \
only the candidate's final answer with it: another form of the same value or expression is right, a part of several \
required answers is not, and neither is an answer that is missing or cut off.

Problem:
{problem}

Standard answer:
{gold}

End of the candidate's response:
{response}

Reply with one letter: A if the candidate's final answer is correct, B if it is incorrect, C if there is none.
"""
LETTERS = ("A", "B", "C")


class Case(NamedTuple):
    """One answer to judge."""

    problem: str
    gold: str
    response: str


class Verifier:
    """Asks for one letter and takes the likeliest of the three as the reply.

    Args:
        model: folder or Hub name of a causal language model with a chat template.
        max_prompt_length: in tokens; where a case is longer, the beginning of its response is cut off.

    Raises:
        InputError: there is no such model, or it has no chat template.
    """

    def __init__(self, model: str, dtype: str, device: torch.device, max_prompt_length: int, batch_size: int):
        from transformers import AutoTokenizer

        with explained(f"verifier.model={model}: cannot be loaded", Exception):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
            self._model = load_weights(model, dtype, device)
        if not self._tokenizer.chat_template:
            raise InputError(f"verifier.model={model}: has no chat template; choose an instruction-tuned model")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._max_prompt_length, self._batch_size = max_prompt_length, batch_size
        self._letters = [self._encode(letter)[-1] for letter in LETTERS]

    def accepts(self, cases: Sequence[Case], on_case: Callable[[int], object] = lambda count: None) -> list[bool]:
        """Whether each answer is right in the model's eyes.

        Args:
            on_case: called with the number of cases just judged.
        """
        texts = [self._render(case) for case in cases]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
        verdicts = [False] * len(texts)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            for i, letter in zip(batch, self._logits([texts[i] for i in batch]).argmax(1).tolist(), strict=True):
                verdicts[i] = LETTERS[letter] == "A"
            on_case(len(batch))
        return verdicts

    @torch.no_grad()
    def _logits(self, texts: list[str]) -> torch.Tensor:
        """Logits of the letters as the first token of the reply, [texts, letters]."""
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = inputs.to(self._model.device)
        positions = (inputs.attention_mask.cumsum(1) - 1).clamp(min=0)
        return self._model(**inputs, position_ids=positions, logits_to_keep=1).logits[:, -1, self._letters]

    def _render(self, case: Case) -> str:
        def render(response: str) -> str:
            content = INSTRUCTION.format(problem=case.problem, gold=case.gold, response=response)
            message = [{"role": "user", "content": content}]
            options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
            return self._tokenizer.apply_chat_template(message, **options)

        room = self._max_prompt_length - len(self._encode(render("")))
        return render(self._tokenizer.decode(self._encode(case.response)[-room:]) if room > 0 else "")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
