"""The protocol of rollout engines, their settings, and what several engines use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stapo_lite.files import open_to_others
from stapo_lite.types import BaseWeights, Completion, Prompt, derived_seed


@dataclass(frozen=True)
class RolloutSettings:
    """Sampling of a training run: from the full distribution at `temperature`, without top-p or
    top-k."""

    num_generations: int
    max_model_len: int
    """Tokens of the longest prompt plus the longest completion."""
    max_completion_length: int
    temperature: float
    stop_token_ids: tuple[int, ...]

    @property
    def decoding(self) -> Decoding:
        """The same settings for a single completion with its own seed."""
        return Decoding(self.max_completion_length, self.temperature, top_p=1.0, logprobs=True)


@dataclass(frozen=True)
class Decoding:
    """Sampling of one completion with its own seed, for an evaluation or for a turn."""

    max_completion_length: int
    temperature: float
    top_p: float
    logprobs: bool = False
    """Whether the log-probability of each token is wanted."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of vLLM's SamplingParams, such as `stop`."""

    def parameters(self, seed: int) -> dict[str, Any]:
        """All settings by the names of vLLM's SamplingParams, which its server shares."""
        fixed = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_completion_length,
            "logprobs": 0 if self.logprobs else None,  # 0: of the sampled token only
            "seed": seed,
        }
        return fixed | self.options


def each_sample(
    prompts: Sequence[Prompt], seeds: Sequence[int], size: int
) -> Iterator[tuple[Prompt, int]]:
    """Yield every prompt `size` times, each time with another seed."""
    for prompt, seed in zip(prompts, seeds, strict=True):
        for g in range(size):
            yield prompt, derived_seed(seed, g)


def in_groups(completions: list[Completion], size: int) -> list[list[Completion]]:
    """Cut completions in the order of `each_sample` into groups of `size`."""
    return [completions[i : i + size] for i in range(0, len(completions), size)]


class Publisher(Protocol):
    """What engines see of a policy."""

    model: Any
    """The PeftModel."""

    def adapter_tensors(self, dtype: str) -> dict[str, Any]:
        """Copies of the adapter's values in host memory, by the names under which PEFT saves
        them."""


class RolloutEngine(Protocol):
    """Samples completions, each from the adapter version that is the latest when it begins."""

    sleeps: bool = False
    """Whether it gives memory of the card to the trainer while it sleeps, and takes it back."""

    def publish(self, policy: Publisher, version: int) -> None:
        """Sample from this adapter from now on."""

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        """Sample one group of `num_generations` completions for each prompt, in order.

        Each completion has the adapter version that it was sampled from, and the log-probability of
        each token at the sampling temperature. Completion g of a prompt with seed s is drawn with
        `derived_seed(s, g)`; in-process vLLM instead seeds the whole call with the first prompt's
        seed.
        """

    def add(self, index: int, prompt: Prompt, seed: int, decoding: Decoding) -> None:
        """Begin one completion, beside those that are in progress. Its draws depend only on its
        seed. It has log-probabilities if the decoding asks for them.

        Args:
            index: the completion's name in `step`.
        """

    def step(self) -> list[tuple[int, Completion]]:
        """Sample for a moment; return index and completion of those that have finished."""

    def abort(self) -> None:
        """Drop the completions that were added and have not finished."""

    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decodings: Sequence[Decoding]
    ) -> Iterator[tuple[int, Completion]]:
        """Yield each prompt's index and its one completion, as they finish."""
        try:
            for index, request in enumerate(zip(prompts, seeds, decodings, strict=True)):
                self.add(index, *request)
            missing = len(prompts)
            while missing:
                finished = self.step()
                missing -= len(finished)
                yield from finished
        finally:
            self.abort()

    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Announce the prompts of later calls of `generate`. An engine in the trainer's process
        ignores them, since it cannot sample while the trainer runs."""
        return

    def shared_base(self) -> BaseWeights | None:
        """Views of the base's weights in the engine, for a trainer in this process; None if the
        engine has none to share."""
        return None

    def sleep(self) -> None:
        """Give memory of the device to the trainer. The base's weights stay in place. By default
        there is nothing to give."""
        return

    def wake(self) -> None:
        """Take the memory back, and serve the same version as before."""
        return

    def close(self) -> None:
        """Release the engine's resources."""
        return


def write_adapter(policy: Publisher, dtype: str, folder: Path) -> None:
    """Write the adapter's current values in PEFT's format and in this dtype."""
    from safetensors.torch import save_file

    policy.model.peft_config["default"].save_pretrained(folder)
    save_file(policy.adapter_tensors(dtype), folder / "adapter_model.safetensors")
    open_to_others(folder)
