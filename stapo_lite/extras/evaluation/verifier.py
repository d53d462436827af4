"""A language model that judges answers which the rules reject."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from stapo_lite.config import EvalConfig
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
"""  # noqa: E501
LETTERS = ("A", "B", "C")


class Case(NamedTuple):
    """One answer to judge."""

    problem: str
    gold: str
    response: str


class ModelVerifier:
    """The model of `config.verifier`. It replies with one letter: the likeliest of LETTERS.

    If a case is longer than `verifier.max_prompt_length` tokens, its response is truncated from the
    left.

    Raises:
        InputError: there is no such causal language model, or it has no chat template.
    """

    def __init__(self, config: EvalConfig, device: torch.device):
        from transformers import AutoTokenizer

        self._settings = config.verifier
        model = str(config.verifier.model)
        with explained(f"verifier.model={model}: cannot be loaded"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
            self._model = load_weights(model, config.dtype, device)
        if not self._tokenizer.chat_template:
            fix = "choose an instruction-tuned model"
            raise InputError(f"verifier.model={model}: has no chat template; {fix}")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._letters = [self._encode(letter)[-1] for letter in LETTERS]

    def accepts(
        self, cases: Sequence[Case], on_case: Callable[[int], object] = lambda count: None
    ) -> list[bool]:
        """Whether the model judges each answer to be right.

        Args:
            on_case: called with the number of cases just judged.
        """
        texts = [self._render(case) for case in cases]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # to limit padding
        accepted = [False] * len(texts)
        size = self._settings.batch_size
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            likeliest = self._logits([texts[i] for i in batch]).argmax(1).tolist()
            for i, letter in zip(batch, likeliest, strict=True):
                accepted[i] = LETTERS[letter] == "A"
            on_case(len(batch))
        return accepted

    @torch.no_grad()
    def _logits(self, texts: list[str]) -> torch.Tensor:
        """Logits of the letters as the first token of the reply, [texts, letters]."""
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = inputs.to(self._model.device)
        positions = (inputs.attention_mask.cumsum(1) - 1).clamp(min=0)
        output = self._model(**inputs, position_ids=positions, logits_to_keep=1)
        return output.logits[:, -1, self._letters]

    def _render(self, case: Case) -> str:
        """The prompt of a case, with as much of the end of the response as fits."""
        frame = self._prompt(case._replace(response=""))
        room = self._settings.max_prompt_length - len(self._encode(frame))
        if room <= 0:
            return frame
        end = self._tokenizer.decode(self._encode(case.response)[-room:])
        return self._prompt(case._replace(response=end))

    def _prompt(self, case: Case) -> str:
        message = {"role": "user", "content": INSTRUCTION.format(**case._asdict())}
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return self._tokenizer.apply_chat_template([message], **options)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
