"""Measure the gap between vLLM's log-probabilities and the trainer's, for several ways to serve the
policy.

    python benchmarks/mismatch.py [--model FOLDER] [--only WAY ...] [--prompts 32] [--out FILE]

The engine samples four completions for each of 32 requests for a sentence, with an adapter whose B
is random, and the trainer scores them again. Each way runs in a process of its own. The yardstick
is how far the adapter moves the trainer's log-probabilities of the same tokens: a gap of that size
would mean that the adapter is not served. Merged weights are made by TRL's own code. The seconds of
a rollout are the median of three, after a first one that does not count. In names of ways bf16 is
the machine's own dtype: float32 on a CPU without hardware for bfloat16.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import save, seconds
from torch import Tensor, nn

from stapo_lite.assemble import open_data
from stapo_lite.config import Config, Engine
from stapo_lite.errors import InputError
from stapo_lite.extras.quickstart.model import fetch_model
from stapo_lite.model.loading import load_weights
from stapo_lite.model.policy import Policy, make_policy
from stapo_lite.model.processes import resolve_dtype
from stapo_lite.rollout.make import rollout_settings, start_vllm
from stapo_lite.rollout.vllm_options import check_vllm
from stapo_lite.types import Completion, Prompt

SCALE = 0.02  # standard deviation of the adapter's B
ON_A_GPU: dict[str, dict[str, Any]] = {
    "adapter on fp8, bf16 trainer": {"rollout_quantization": "fp8"},
    "adapter on bf16, keys and values in fp8, bf16 trainer": {"vllm": {"kv_cache_dtype": "fp8"}},
    "adapter on bf16, n-grams guessed, bf16 trainer": {
        "vllm": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
            }
        }
    },
}
"""Ways that are left out on a CPU, where they take seconds per token."""
CASES: dict[str, dict[str, Any]] = {
    "adapter on bf16, bf16 trainer": {},
    "adapter on float16, float16 trainer": {"dtype": "float16"},
    "adapter on bf16, logits in fp32, bf16 trainer": {"head_dtype": "float32"},
    "merged bf16, bf16 trainer": {"merged": True},
    "adapter on bitsandbytes nf4, nf4 trainer": {
        "quantization": "nf4",
        "rollout_quantization": "bitsandbytes",
    },
    "adapter on bf16, nf4 trainer": {"quantization": "nf4"},
    **ON_A_GPU,
}
TASK = "stapo_lite.extras.quickstart.one_sentence"


def make_config(
    model: Path | str,
    quantization: str | None = None,
    rollout_quantization: str | None = None,
    vllm: dict[str, Any] | None = None,
    dtype: str = "auto",
) -> Config:
    """The config of a run with the quickstart's prompts, four completions of up to 48 tokens, and
    rank 16 on all projections."""
    rollout = {
        "num_generations": 4,
        "max_completion_length": 48,
        "gpu_memory_utilization": 0.3,
    }
    tree = {
        "model": str(model),
        "output_dir": "unused",
        "dtype": resolve_dtype(dtype, rollout_quantization),
        "quantization": quantization,
        "data": {"source": f"{TASK}:prompts", "max_prompt_length": 128},
        "reward": {"functions": [f"{TASK}:reward"]},
        "rollout": rollout | {"quantization": rollout_quantization, "vllm": vllm or {}},
        "train": {"gradient_checkpointing": False},
    }
    return Config.model_validate(tree)


def prepare_vllm() -> torch.device:
    """Set vLLM up, before any engine is made; return the trainer's device.

    On a CPU vLLM packs the weights for its kernels and drops the parameters, so that merged weights
    cannot be pushed. Here every engine keeps the parameters and uses the plain matrix product.
    """
    settings = {
        "ENABLE_V1_MULTIPROCESSING": "0",
        "LOGGING_LEVEL": "ERROR",
        "CPU_KVCACHE_SPACE": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(f"VLLM_{name}", value)
    if torch.cuda.is_available():
        return torch.device("cuda")
    from vllm.model_executor.layers import utils

    def plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    torch._dynamo.config.disable = True
    return torch.device("cpu")


class MergedEngine:
    """TRL's engine, which serves the merged weights of one policy, with the methods of an engine of
    `stapo_lite.rollout`."""

    def __init__(self, config: Config, policy: Policy):
        from trl.generation.vllm_generation import VLLMGeneration

        r = config.rollout
        self._num_generations = r.num_generations
        self._generation = VLLMGeneration(
            policy.model,
            Accelerator(),
            None,  # no processor for images
            mode="colocate",
            gpu_memory_utilization=r.gpu_memory_utilization,
            max_model_length=config.data.max_prompt_length + r.max_completion_length,
            max_num_seqs=r.max_num_seqs,
            temperature=r.temperature,
            max_completion_length=r.max_completion_length,
        )

    def publish(self, policy: Policy, version: int) -> None:
        self._generation.sync_weights()

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[Completion]]:
        set_seed(seeds[0])
        n = self._num_generations
        repeated = [prompt for prompt in prompts for _ in range(n)]
        _, ids, logprobs, _ = self._generation.generate([p.token_ids for p in repeated], None, n)
        completions = []
        for prompt, row, scores in zip(repeated, ids, logprobs, strict=True):
            sampled = [values[0] for values in scores]
            completion = Completion(prompt, list(row), sampled, truncated=False, adapter_version=0)
            completions.append(completion)
        return [completions[start : start + n] for start in range(0, len(completions), n)]

    def close(self) -> None: ...


def perturb(policy: Policy, std: float, seed: int, only: str = "") -> None:
    """Add normal noise to the adapter's parameters whose names contain `only`."""
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if only in name:
                shape = parameter.shape
                noise = torch.randn(shape, device=policy.device, generator=generator)
                parameter.add_(noise, alpha=std)


def sample(engine: Any, prompts: Sequence[Prompt]) -> list[Completion]:
    """Sample the completions of prompts."""
    groups = engine.generate(prompts, [1000 * i for i in range(len(prompts))])
    return [completion for group in groups for completion in group]


@torch.no_grad()
def score(policy: Policy, completions: Sequence[Completion], adapter: bool = True) -> Tensor:
    """The trainer's log-probabilities of all tokens, one completion after the other; [N]."""
    rows = []
    for start in range(0, len(completions), 16):
        part = completions[start : start + 16]
        logprobs = policy.statistics(part).logprobs if adapter else policy.reference_logprobs(part)
        rows.append(logprobs.cpu())
    return torch.cat(rows)


def gap(actual: Tensor, other: Tensor) -> dict[str, float]:
    """Differences of two log-probabilities per token, [N] each, in nats. `k3` estimates
    KL(other || actual) if the tokens were drawn from `other`."""
    d = actual - other
    return {
        "mean |d|": d.abs().mean().item(),
        "k3": (d.expm1() - d).mean().item(),
        "max |d|": d.abs().max().item(),
    }


def sampler_gap(policy: Policy, completions: Sequence[Completion]) -> dict[str, Any]:
    """The gap between trainer and engine, and between the trainer without and with its adapter."""
    sampled = torch.tensor([value for c in completions for value in c.rollout_logprobs])
    trainer = score(policy, completions)
    effect = gap(score(policy, completions, adapter=False), trainer)
    return {"gap": gap(trainer, sampled), "effect of the adapter": effect, "tokens": len(sampled)}


def measure(
    model: Path | str,
    count: int = 32,
    merged: bool = False,
    head_dtype: str = "model",
    **keys: Any,
) -> dict[str, Any]:
    """Measure one way in this process.

    Args:
        count: prompts, spread evenly over all.
        merged: serve TRL's merged weights.
        head_dtype: of the logits, for vLLM.
        keys: arguments of `make_config`.
    """
    import vllm

    device, make_llm = prepare_vllm(), vllm.LLM
    # Our engine would choose the dtype by the device.
    overrides = {"hf_overrides": {"head_dtype": head_dtype}}
    vllm.LLM = lambda *arguments, **options: make_llm(*arguments, **options | overrides)
    config = make_config(model, **keys)
    every, _, stop_tokens = open_data(config, None, lambda note: None)
    prompts = every[:: max(1, len(every) // count)][:count]
    policy = make_policy(
        load_weights(config.model, config.dtype, device, config.quantization), config
    )
    perturb(policy, SCALE, seed=0, only="lora_B")
    engine: Any
    if merged:
        engine = MergedEngine(config, policy)
    else:
        share = config.rollout.gpu_memory_utilization
        engine = start_vllm(config, rollout_settings(config, stop_tokens), share)
    engine.publish(policy, 0)
    result = sampler_gap(policy, sample(engine, prompts))
    times = [seconds(partial(sample, engine, prompts)) for _ in range(3)]
    engine.close()
    return result | {"seconds of a rollout": statistics.median(times)}


def compare(model: Path | str, names: Sequence[str], count: int) -> dict[str, Any]:
    """Measure the named ways; a way that this machine's vLLM does not allow is left out."""
    result: dict[str, Any] = {}
    for name in names:
        keys = CASES[name]
        if name in ON_A_GPU and not torch.cuda.is_available():
            result[name] = "left out: needs a GPU"
            continue
        try:
            quantization = keys.get("rollout_quantization")
            check_vllm(Engine(quantization=quantization), resolve_dtype("auto", quantization))
            result[name] = in_own_process(measure, model, count, **keys)
        except InputError as error:
            result[name] = f"left out: {error}"
    return result


def in_own_process(
    function: Callable[..., dict[str, Any]], *arguments: Any, **keys: Any
) -> dict[str, Any]:
    """Call a function in a new process, since an engine is not fully torn down before its process
    ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **keys).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="WAY",
        help=", ".join(map(repr, CASES)),
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or fetch_model()
    setting: dict[str, Any] = {"model": model.name, "standard deviation of B": SCALE}
    setting["prompts"] = arguments.prompts
    setting["dtype"] = resolve_dtype("auto", None)
    save(setting | compare(model, arguments.only, arguments.prompts), arguments.out)


if __name__ == "__main__":
    main()
