"""Rollouts with transformers' `generate`, from the trainer's own model: slow, but without vLLM."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, TopPLogitsWarper

from stapo_lite.errors import InputError
from stapo_lite.progress import progress_bar
from stapo_lite.rollout.engine import (
    Decoding,
    Publisher,
    RolloutEngine,
    RolloutSettings,
    each_sample,
    in_groups,
)
from stapo_lite.types import Completion, Prompt


class TransformersEngine(RolloutEngine):
    """Samples from the adapter in training itself: publishing only records its version."""

    def __init__(self, sampling: RolloutSettings, max_num_seqs: int):
        self._sampling = sampling
        self._max_num_seqs = max_num_seqs
        self._asked: dict[int, tuple[Prompt, int, Decoding]] = {}

    def publish(self, policy: Publisher, version: int) -> None:
        self._model = policy.model
        self._version = version

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        size = self._sampling.num_generations
        rows, row_seeds = zip(*each_sample(prompts, seeds, size), strict=True)
        draws = self.stream(rows, row_seeds, [self._sampling.decoding] * len(rows))
        bar = progress_bar("rollout", "completion", len(rows), draws)
        return in_groups([completion for _, completion in bar], size)

    def add(self, index: int, prompt: Prompt, seed: int, decoding: Decoding) -> None:
        """Begin one completion. All decodings in progress must have the same temperature and top-p.

        Raises:
            InputError: the decoding has options of vLLM's.
        """
        for option in decoding.options:
            raise InputError(
                f"rollout.engine=transformers knows no {option}: set rollout.engine=vllm"
            )
        self._asked[index] = (prompt, seed, decoding)

    def step(self) -> list[tuple[int, Completion]]:
        """Finish as many completions as fit into a batch."""
        batch = dict(islice(self._asked.items(), self._max_num_seqs))
        prompts, seeds, decodings = zip(*batch.values(), strict=True)
        limits = [decoding.max_completion_length for decoding in decodings]
        draws = _SeededDraws(seeds, decodings[0])
        output = self._generate(prompts, draws, max(limits)).tolist()
        logprobs = torch.cat(draws.logprobs, dim=1).tolist()
        for index in batch:
            del self._asked[index]
        completions = map(self._completion, prompts, limits, output, logprobs)
        return list(zip(batch, completions, strict=True))

    def abort(self) -> None:
        self._asked.clear()

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Prompt], draws: "_SeededDraws", max_new_tokens: int
    ) -> Tensor:
        """New tokens [rows, steps], padded after the stop token."""
        device = self._model.device
        dtype = self._model.get_output_embeddings().weight.dtype
        rows = [torch.tensor(prompt.token_ids) for prompt in prompts]
        input_ids = pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        written = [torch.ones_like(row) for row in rows]
        mask = pad_sequence(written, batch_first=True, padding_side="left").to(device)
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()  # gradient checkpointing would switch the KV cache off
        try:
            # The fp32 adapter computes in the base's dtype, as in training.
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                output = self._model.generate(
                    input_ids=input_ids,
                    attention_mask=mask,
                    eos_token_id=list(self._sampling.stop_token_ids),
                    logits_processor=LogitsProcessorList([draws]),
                    do_sample=False,  # `_SeededDraws` has drawn
                    max_new_tokens=max_new_tokens,
                )
        finally:
            for module in training:
                module.training = True
        return output[:, input_ids.shape[1] :]

    def _completion(
        self, prompt: Prompt, limit: int, token_ids: list[int], logprobs: list[float]
    ) -> Completion:
        """A row of a batch, cut after its first stop token or at its own limit."""
        stops = self._sampling.stop_token_ids
        tokens = enumerate(token_ids[:limit], start=1)
        ends = [length for length, token in tokens if token in stops]
        length = ends[0] if ends else limit
        return Completion(prompt, token_ids[:length], logprobs[:length], not ends, self._version)


class _SeededDraws:
    """A logits processor that leaves one token per row. It is drawn by inverse transform sampling
    with the row's own generator. Up to rounding, a sample does not depend on the rest of its batch.

    Attributes:
        logprobs: of the sampled tokens, before top-p; [rows, 1] fp32 for each step.
    """

    def __init__(self, seeds: Sequence[int], decoding: Decoding):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._temperature = decoding.temperature
        self._nucleus = TopPLogitsWarper(decoding.top_p) if decoding.top_p < 1 else None
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:
        scores = scores / self._temperature
        logprobs = scores.log_softmax(-1)
        if self._nucleus is not None:
            scores = self._nucleus(input_ids, scores)
        # The first token whose cumulated probability exceeds a uniform number.
        uniform = [torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators]
        cumulated = scores.double().softmax(-1).cumsum(-1)
        thresholds = torch.stack(uniform).to(scores.device) * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, thresholds, right=True)
        self.logprobs.append(logprobs.gather(1, tokens))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
