"""Rollouts with transformers' `generate`, from the trainer's own model: slow, and always there."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stapo_lite.policy import Policy
from stapo_lite.rollout import Decoding, Sampling
from stapo_lite.types import Completion, Prompt


class TransformersEngine:
    """Samples from the live adapter: publishing only records its version."""

    _policy: Policy
    _version: int

    def __init__(self, sampling: Sampling, max_num_seqs: int):
        self._sampling = sampling
        self._max_num_seqs = max_num_seqs

    def publish(self, policy: Policy, version: int) -> None:
        self._policy, self._version = policy, version

    def generate(self, prompts: Sequence[Prompt], seed: int, progress: bool = False) -> list[list[Completion]]:
        torch.manual_seed(seed)
        groups: list[list[Completion]] = []
        size = self._sampling.num_generations
        bar = tqdm(total=len(prompts), desc="rollout", unit="prompt", leave=False, disable=None if progress else True)
        with bar:
            for start in range(0, len(prompts), self._max_num_seqs // size):
                batch = prompts[start : start + self._max_num_seqs // size]
                recorder = _LogprobRecorder(self._sampling.temperature)
                output = self._generate(
                    batch,
                    [recorder],
                    do_sample=True,
                    temperature=self._sampling.temperature,
                    top_k=0,
                    top_p=1.0,
                    num_return_sequences=size,
                    max_new_tokens=self._sampling.max_completion_length,
                )
                logprobs = recorder.finish(output)
                completions = [
                    self._completion(batch[row // size], ids, chosen)
                    for row, (ids, chosen) in enumerate(zip(output.tolist(), logprobs.tolist(), strict=True))
                ]
                groups += [completions[i : i + size] for i in range(0, len(completions), size)]
                bar.update(len(batch))
        return groups

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decoding: Decoding
    ) -> Iterator[tuple[int, Completion]]:
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        for start in range(0, len(prompts), self._max_num_seqs):
            batch = prompts[start : start + self._max_num_seqs]
            processors = [
                TemperatureLogitsWarper(decoding.temperature),
                TopPLogitsWarper(decoding.top_p),
                _SeededDraws(seeds[start : start + len(batch)], self._policy.device),
            ]
            output = self._generate(batch, processors, do_sample=False, max_new_tokens=decoding.max_completion_length)
            for row, ids in enumerate(output.tolist()):
                yield start + row, self._completion(batch[row], ids, [])

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt], processors: list[Any], **options: Any) -> Tensor:
        """New tokens [rows, steps], padded after the stop token."""
        from transformers import LogitsProcessorList

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
                    **options,
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
        self._temperature = temperature  # the temperature warper runs after it
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
    """A logits processor after which the largest logit is a draw from the distribution (Gumbel's trick), with a
    generator for each row: a sample is the same whatever it is batched with, rounding aside."""

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float()
        noise = [torch.empty_like(scores[0]).exponential_(generator=generator) for generator in self._generators]
        return scores - torch.stack(noise).log_()
