"""Rollouts with transformers' `generate`, from the trainer's own model: slow, but needs no vLLM."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopPLogitsWarper

from stapo_lite.errors import InputError
from stapo_lite.rollout import Decoding, Publisher, RolloutEngine, Sampling, progress_bar
from stapo_lite.types import Completion, Prompt, derived_seed


class TransformersEngine(RolloutEngine):
    """Samples from the live adapter: publishing only records its version."""

    def __init__(self, sampling: Sampling, max_num_seqs: int):
        self._sampling = sampling
        self._max_num_seqs = max_num_seqs

    def publish(self, policy: Publisher, version: int) -> None:
        self._model, self._version = policy.model, version

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        s, size = self._sampling, self._sampling.num_generations
        rows = [prompt for prompt in prompts for _ in range(size)]
        row_seeds = [derived_seed(seed, g) for seed in seeds for g in range(size)]
        draws = self.stream(rows, row_seeds, [Decoding(s.max_completion_length, s.temperature, top_p=1.0)] * len(rows))
        completions = [completion for _, completion in progress_bar("rollout", "completion", len(rows), draws)]
        return [completions[i : i + size] for i in range(0, len(rows), size)]

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decodings: Sequence[Decoding]
    ) -> Iterator[tuple[int, Completion]]:
        """As the protocol has it, for decodings of one temperature and top-p.

        Raises:
            InputError: a decoding has options of vLLM's.
        """
        if wrong := next((d.options for d in decodings if d.options), None):
            raise InputError(f"rollout.engine=transformers knows no {next(iter(wrong))}: set rollout.engine=vllm")
        for start in range(0, len(prompts), self._max_num_seqs):
            batch = prompts[start : start + self._max_num_seqs]
            limits = [d.max_completion_length for d in decodings[start : start + self._max_num_seqs]]
            draws = _SeededDraws(seeds[start : start + len(batch)], decodings[start])
            output = self._generate(batch, draws, max(limits))
            drawn = zip(batch, limits, output.tolist(), torch.cat(draws.logprobs, dim=1).tolist(), strict=True)
            yield from enumerate((self._completion(*each) for each in drawn), start)

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt], draws: "_SeededDraws", max_new_tokens: int) -> Tensor:
        """New tokens [rows, steps], padded after the stop token."""
        device, dtype = self._model.device, self._model.get_output_embeddings().weight.dtype
        width = max(len(p.token_ids) for p in prompts)
        input_ids = torch.tensor([[0] * (width - len(p.token_ids)) + p.token_ids for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts], device=device)
        checkpointed = [module for module in self._model.modules() if module.training]
        self._model.eval()  # gradient checkpointing would switch the KV cache off
        try:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):  # the adapter is in fp32
                output = self._model.generate(
                    input_ids=input_ids,
                    attention_mask=mask,
                    eos_token_id=list(self._sampling.stop_token_ids),
                    logits_processor=LogitsProcessorList([draws]),
                    do_sample=False,  # `_SeededDraws` has drawn
                    max_new_tokens=max_new_tokens,
                )
        finally:
            for module in checkpointed:
                module.training = True
        return output[:, width:]

    def _completion(self, prompt: Prompt, limit: int, token_ids: list[int], logprobs: list[float]) -> Completion:
        stops = (t for t, token in enumerate(token_ids[:limit]) if token in self._sampling.stop_token_ids)
        stop = next(stops, None)
        length = min(limit, len(token_ids)) if stop is None else stop + 1
        return Completion(
            prompt, token_ids[:length], logprobs[:length], truncated=stop is None, adapter_version=self._version
        )


class _SeededDraws:
    """A logits processor that leaves one token of each row, drawn by the inverse of the cumulative distribution from a
    uniform number of the row's own generator: up to rounding, a sample does not depend on what it is batched with.

    Attributes:
        logprobs: of the tokens drawn, before top-p; [rows, 1] fp32 for each step.
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
        uniform = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in self._generators])
        cumulated = scores.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cumulated, uniform.to(scores.device)[:, None] * cumulated[:, -1:], right=True)
        self.logprobs.append(logprobs.gather(1, drawn))
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)
