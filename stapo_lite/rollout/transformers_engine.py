"""Rollouts with transformers' `generate`, from the trainer's own model: slow, and always there."""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stapo_lite.policy import Policy
from stapo_lite.rollout import Sampling
from stapo_lite.types import Completion, Prompt


class TransformersEngine:
    """Samples from the live adapter: publishing only records its version."""

    _policy: Policy
    _version: int

    def __init__(self, sampling: Sampling, max_num_seqs: int):
        self._sampling = sampling
        self._prompts_per_batch = max_num_seqs // sampling.num_generations

    def publish(self, policy: Policy, version: int) -> None:
        self._policy, self._version = policy, version

    def generate(self, prompts: Sequence[Prompt], seed: int, progress: bool = False) -> list[list[Completion]]:
        torch.manual_seed(seed)
        groups: list[list[Completion]] = []
        bar = tqdm(total=len(prompts), desc="rollout", unit="prompt", leave=False, disable=None if progress else True)
        self._policy.model.eval()  # gradient checkpointing would switch the KV cache off
        try:
            for start in range(0, len(prompts), self._prompts_per_batch):
                batch = prompts[start : start + self._prompts_per_batch]
                groups += self._generate_batch(batch)
                bar.update(len(batch))
        finally:
            self._policy.model.train()
            bar.close()
        return groups

    @torch.no_grad()
    def _generate_batch(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        from transformers import LogitsProcessorList

        sampling, device = self._sampling, self._policy.device
        width = max(len(p.token_ids) for p in prompts)
        pad = self._policy.pad_token_id
        input_ids = torch.tensor([[pad] * (width - len(p.token_ids)) + p.token_ids for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts], device=device)
        recorder = _LogprobRecorder(sampling.temperature)
        with self._policy.autocast():
            output = self._policy.model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                do_sample=True,
                temperature=sampling.temperature,
                top_k=0,
                top_p=1.0,
                num_return_sequences=sampling.num_generations,
                max_new_tokens=sampling.max_completion_length,
                eos_token_id=list(sampling.stop_token_ids),
                logits_processor=LogitsProcessorList([recorder]),
            )
        logprobs = recorder.finish(output)
        completions = [
            self._completion(prompts[row // sampling.num_generations], ids, chosen)
            for row, (ids, chosen) in enumerate(zip(output[:, width:].tolist(), logprobs.tolist(), strict=True))
        ]
        return [
            completions[i : i + sampling.num_generations] for i in range(0, len(completions), sampling.num_generations)
        ]

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
        """[rows, new tokens] fp32, given the finished sequences."""
        self._note(output)
        return torch.cat(self._chosen, dim=1)

    def _note(self, input_ids: Tensor) -> None:
        if self._pending is not None:
            self._chosen.append(self._pending.gather(1, input_ids[:, -1:]))
