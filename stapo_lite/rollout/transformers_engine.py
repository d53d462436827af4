"""Rollouts with transformers' `generate`, from the trainer's own model: slow, and always there."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from stapo_lite.policy import Policy
from stapo_lite.rollout import Decoding, Sampling
from stapo_lite.types import Completion, Prompt, derived_seed


class TransformersEngine:
    """Samples from the live adapter: publishing only records its version."""

    _policy: Policy
    _version: int

    def __init__(self, sampling: Sampling, max_num_seqs: int):
        self._sampling = sampling
        self._max_num_seqs = max_num_seqs

    def publish(self, policy: Policy, version: int) -> None:
        self._policy, self._version = policy, version

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], progress: bool = False
    ) -> list[list[Completion]]:
        groups: list[list[Completion]] = []
        size = self._sampling.num_generations
        bar = tqdm(total=len(prompts), desc="rollout", unit="prompt", leave=False, disable=None if progress else True)
        with bar:
            at_once = self._max_num_seqs // size
            for start in range(0, len(prompts), at_once):
                rows = [prompt for prompt in prompts[start : start + at_once] for _ in range(size)]
                row_seeds = [derived_seed(seed, g) for seed in seeds[start : start + at_once] for g in range(size)]
                recorder = _LogprobRecorder(self._sampling.temperature)
                warper = TemperatureLogitsWarper(self._sampling.temperature)
                longest = self._sampling.max_completion_length
                output = self._generate(rows, [recorder, warper, _SeededDraws(row_seeds)], longest)
                drawn = zip(rows, output.tolist(), recorder.finish(output).tolist(), strict=True)
                completions = [self._completion(*each) for each in drawn]
                groups += [completions[i : i + size] for i in range(0, len(completions), size)]
                bar.update(len(rows) // size)
        return groups

    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Nothing to gain: who samples here does not train meanwhile."""

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decoding: Decoding
    ) -> Iterator[tuple[int, Completion]]:
        for start in range(0, len(prompts), self._max_num_seqs):
            batch = prompts[start : start + self._max_num_seqs]
            processors = [
                TemperatureLogitsWarper(decoding.temperature),
                TopPLogitsWarper(decoding.top_p),
                _SeededDraws(seeds[start : start + len(batch)]),
            ]
            output = self._generate(batch, processors, decoding.max_completion_length)
            for row, ids in enumerate(output.tolist()):
                yield start + row, self._completion(batch[row], ids, [])

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt], processors: list[Any], max_new_tokens: int) -> Tensor:
        """New tokens [rows, steps], padded after the stop token."""
        device, pad = self._policy.device, self._policy.pad_token_id
        width = max(len(p.token_ids) for p in prompts)
        input_ids = torch.tensor([[pad] * (width - len(p.token_ids)) + p.token_ids for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts], device=device)
        self._policy.model.eval()  # gradient checkpointing would switch the KV cache off
        try:
            with self._policy.autocast():
                output = self._policy.model.generate(
                    input_ids=input_ids,
                    attention_mask=mask,
                    eos_token_id=list(self._sampling.stop_token_ids),
                    logits_processor=LogitsProcessorList(processors),
                    do_sample=False,  # `_SeededDraws` has drawn
                    max_new_tokens=max_new_tokens,
                )
        finally:
            self._policy.model.train()
        return output[:, width:]

    def _completion(self, prompt: Prompt, token_ids: list[int], logprobs: list[float]) -> Completion:
        stops = (t for t, token in enumerate(token_ids) if token in self._sampling.stop_token_ids)
        stop = next(stops, None)
        length = len(token_ids) if stop is None else stop + 1
        return Completion(
            prompt, token_ids[:length], logprobs[:length], truncated=stop is None, adapter_version=self._version
        )

    def sleep(self) -> None:
        """Nothing to free: the model is the trainer's."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class _LogprobRecorder:
    """A logits processor that notes the log-probability of each sampled token and changes nothing.

    It learns of a token only at the next step, so it keeps one step of [rows, V], where
    `output_scores=True` would keep them all.
    """

    def __init__(self, temperature: float):
        self._temperature = temperature  # the warper runs after it
        self._pending: Tensor | None = None
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._note(input_ids)
        self._pending = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        return scores

    def finish(self, output: Tensor) -> Tensor:
        """[rows, new tokens] fp32, given the new tokens."""
        self._note(output)
        return torch.cat(self._chosen, dim=1)

    def _note(self, input_ids: Tensor) -> None:
        if self._pending is not None:
            self._chosen.append(self._pending.gather(1, input_ids[:, -1:]))


class _SeededDraws:
    """A logits processor that leaves one token of each row, drawn by the inverse of the cumulated distribution from a
    uniform number of the row's own generator: a sample is the same whatever it is batched with, rounding aside."""

    def __init__(self, seeds: Sequence[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in self._generators])
        cumulated = scores.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cumulated, uniform.to(scores.device)[:, None] * cumulated[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)
