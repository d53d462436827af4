"""How far the engine's log-probabilities are from the trainer's, for several ways to serve the policy with vLLM.

    python benchmarks/mismatch.py [--model FOLDER] [--only WAY ...] [--out FILE]

Thirty-two requests for a sentence x four completions, sampled by the engine and scored again by the trainer, with an
adapter whose B is random. Each way runs in a process of its own. The yardstick is what the adapter does to the
log-probabilities of the same tokens in the trainer: a gap as large would mean that it is not served. Merged weights
come from TRL's own code. The seconds of a rollout are the median of three after the first.
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

from stapo_lite.config import Config, Engine
from stapo_lite.errors import InputError
from stapo_lite.model.policy import Policy, load_policy
from stapo_lite.rollout import make_engine
from stapo_lite.rollout.vllm_options import check_vllm
from stapo_lite.tools.quickstart import fetch_model
from stapo_lite.training.opening import load_prompts
from stapo_lite.types import Completion, Prompt

SCALE = 0.02  # standard deviation of the adapter's B
ON_A_GPU: dict[str, dict[str, Any]] = {
    "adapter on fp8, bf16 trainer": {"rollout_quantization": "fp8"},
    "adapter on bf16, keys and values in fp8, bf16 trainer": {"vllm": {"kv_cache_dtype": "fp8"}},
    "adapter on bf16, n-grams guessed, bf16 trainer": {
        "vllm": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
    },
}
"""vLLM's CPU build takes seconds a token for these."""
CASES: dict[str, dict[str, Any]] = {
    "adapter on bf16, bf16 trainer": {},
    "adapter on bf16, logits in fp32, bf16 trainer": {"head_dtype": "float32"},
    "merged bf16, bf16 trainer": {"merged": True},
    "adapter on bitsandbytes nf4, nf4 trainer": {"quantization": "nf4", "rollout_quantization": "bitsandbytes"},
    "adapter on bf16, nf4 trainer": {"quantization": "nf4"},
    **ON_A_GPU,
}
TASK = "stapo_lite.tools.one_sentence"


def make_config(
    model: Path | str,
    quantization: str | None = None,
    rollout_quantization: str | None = None,
    vllm: dict[str, Any] | None = None,
) -> Config:
    """A run's config: the quickstart's prompts, four completions of up to 48 tokens, rank 16 on all projections."""
    rollout = {"num_generations": 4, "max_completion_length": 48, "gpu_memory_utilization": 0.3, "sleep_level": 0}
    tree = {
        "model": str(model),
        "output_dir": "unused",
        "dtype": "bfloat16",
        "quantization": quantization,
        "data": {"source": f"{TASK}:prompts", "max_prompt_length": 128},
        "reward": {"functions": [f"{TASK}:reward"]},
        "rollout": rollout | {"quantization": rollout_quantization, "vllm": vllm or {}},
        "train": {"gradient_checkpointing": False},
    }
    return Config.model_validate(tree)


def prepare_vllm() -> torch.device:
    """Before any engine; returns where the trainer goes.

    On a CPU vLLM packs the weights for its kernels and drops the parameters: nothing to push into, nothing to compare.
    Here every engine keeps them and uses the plain matrix product.
    """
    for name, value in {"ENABLE_V1_MULTIPROCESSING": "0", "LOGGING_LEVEL": "ERROR", "CPU_KVCACHE_SPACE": "1"}.items():
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
    """TRL's engine, which serves one policy's merged weights; the protocol of `stapo_lite.rollout`."""

    def __init__(self, config: Config, policy: Policy):
        from trl.generation.vllm_generation import VLLMGeneration

        r = config.rollout
        self._num_generations = r.num_generations
        self._generation = VLLMGeneration(
            policy.model,
            Accelerator(),
            None,  # reads images
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
        completions = [
            Completion(prompt, list(row), [values[0] for values in scores], truncated=False, adapter_version=0)
            for prompt, row, scores in zip(repeated, ids, logprobs, strict=True)
        ]
        return [completions[start : start + n] for start in range(0, len(completions), n)]

    def close(self) -> None: ...


def perturb(policy: Policy, std: float, seed: int, only: str = "") -> None:
    """Add normal noise to the adapter's parameters whose names contain `only`."""
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if only in name:
                parameter.add_(torch.randn(parameter.shape, device=policy.device, generator=generator), alpha=std)


def sample(engine: Any, prompts: Sequence[Prompt], count: int = 32) -> list[Completion]:
    """Completions of `count` prompts, evenly spread."""
    drawn = prompts[:: max(1, len(prompts) // count)][:count]
    groups = engine.generate(drawn, [1000 * i for i in range(len(drawn))])
    return [completion for group in groups for completion in group]


@torch.no_grad()
def score(policy: Policy, completions: Sequence[Completion], adapter: bool = True) -> Tensor:
    """The trainer's log-probabilities of all tokens, one completion after the other."""
    rows = []
    for start in range(0, len(completions), 16):
        part = completions[start : start + 16]
        logprobs = policy.statistics(part).logprobs if adapter else policy.reference_logprobs(part)
        rows.append(logprobs.cpu())
    return torch.cat(rows)


def gap(actual: Tensor, other: Tensor) -> dict[str, float]:
    """Of two log-probabilities per token; k3 estimates KL(other || actual) for tokens drawn from `other`."""
    d = actual - other
    return {"mean |d|": d.abs().mean().item(), "k3": (d.expm1() - d).mean().item(), "max |d|": d.abs().max().item()}


def sampler_gap(policy: Policy, completions: Sequence[Completion]) -> dict[str, Any]:
    """The trainer against the engine, and the trainer without its adapter against itself."""
    sampled = torch.tensor([value for c in completions for value in c.rollout_logprobs])
    trainer = score(policy, completions)
    effect = gap(score(policy, completions, adapter=False), trainer)
    return {"gap": gap(trainer, sampled), "effect of the adapter": effect, "tokens": len(sampled)}


def measure(model: Path | str, merged: bool = False, head_dtype: str = "model", **keys: Any) -> dict[str, Any]:
    """One way, in this process; `keys` are those of `make_config`."""
    import vllm

    device, make_llm = prepare_vllm(), vllm.LLM
    overrides = {"hf_overrides": {"head_dtype": head_dtype}}  # the engine's own choice depends on the device
    vllm.LLM = lambda *arguments, **options: make_llm(*arguments, **options | overrides)
    config = make_config(model, **keys)
    prompts, _, stop_tokens = load_prompts(config, None, lambda note: None)
    policy = load_policy(config, device)
    perturb(policy, SCALE, seed=0, only="lora_B")
    engine: Any = MergedEngine(config, policy) if merged else make_engine("vllm", config, stop_tokens, Accelerator())
    engine.publish(policy, 0)
    result = sampler_gap(policy, sample(engine, prompts))
    times = [seconds(partial(sample, engine, prompts)) for _ in range(3)]
    engine.close()
    return result | {"seconds of a rollout": statistics.median(times)}


def compare(model: Path | str, names: Sequence[str]) -> dict[str, Any]:
    """The ways that the installed vLLM allows."""
    result: dict[str, Any] = {}
    for name in names:
        keys = CASES[name]
        if name in ON_A_GPU and not torch.cuda.is_available():
            result[name] = "left out: for a GPU"
            continue
        try:
            check_vllm(Engine(quantization=keys.get("rollout_quantization")))
            result[name] = in_own_process(measure, model, **keys)
        except InputError as error:
            result[name] = f"left out: {error}"
    return result


def in_own_process(function: Callable[..., dict[str, Any]], *arguments: Any, **keys: Any) -> dict[str, Any]:
    """Engines are not fully torn down before their process ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **keys).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=list(CASES), metavar="WAY", help=", ".join(map(repr, CASES))
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or fetch_model()
    save({"model": model.name, "standard deviation of B": SCALE} | compare(model, arguments.only), arguments.out)


if __name__ == "__main__":
    main()
