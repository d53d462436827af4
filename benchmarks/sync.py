"""Publishing an adapter to vLLM in the trainer's process: our hot-load against TRL's merged weights.

    python benchmarks/sync.py [--model FOLDER] [--pairs 100] [--out FILE]

TRL's way is its own code (`VLLMGeneration.sync_weights`, colocate mode): merge the adapter into the base, push every
weight into vLLM's model, take the adapter off again. Between two syncs the adapter changes a little, by the same amount
on both sides. Times are medians over all pairs but the first, ratios are taken within a pair. Drift is what the syncs
have changed in weights that should stay as they are: the trainer's base and, in our case, vLLM's.
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from common import save, seconds
from mismatch import (
    SCALE,
    MergedEngine,
    gap,
    make_config,
    perturb,
    prepare_vllm,
    sample,
    sampler_gap,
    score,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stapo_lite.model.policy import load_policy
from stapo_lite.rollout import make_engine
from stapo_lite.rollout.vllm_engine import IN_MEMORY
from stapo_lite.tools.quickstart import fetch_model
from stapo_lite.training.opening import load_prompts

DRIFT_AFTER = (1, 20, 100)
STEP = 1e-4  # standard deviation of the adapter's change before every sync


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """The parameters outside the adapter."""
    return {name: p.data for name, p in model.named_parameters() if "lora_" not in name}


def drift(now: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, float]:
    """Elements that differ and by how much, over all of the base's."""
    elements, differing, total, largest, magnitude = 0, 0, 0.0, 0.0, 0.0
    for name, weight in before.items():
        change = (now[name].float() - weight.float()).abs()
        elements += weight.numel()
        differing += int(change.count_nonzero())
        total += change.sum().item()
        largest = max(largest, change.max().item())
        magnitude += weight.float().abs().sum().item()
    return {
        "elements": elements,
        "differing": differing,
        "differing share": differing / elements,
        "mean |change|": total / elements,
        "mean |change| / mean |weight|": total / magnitude,
        "max |change|": largest,
    }


def measure(model: Path | str, pairs: int) -> dict[str, Any]:
    """Both ways."""
    device, config = prepare_vllm(), make_config(model)
    prompts, _, stop_tokens = load_prompts(config, None, lambda note: None)
    policies = {name: load_policy(config, device) for name in ("ours", "trl")}
    ours: Any = make_engine("vllm", config, stop_tokens, Accelerator())
    engines = {"ours": ours, "trl": MergedEngine(config, policies["trl"])}
    bases = {f"{name}: trainer": frozen(policy.model) for name, policy in policies.items()}
    bases["ours: vLLM"] = frozen(ours._llm.llm_engine.model_executor.driver_worker.model_runner.model)
    originals = {name: {key: weight.clone() for key, weight in base.items()} for name, base in bases.items()}
    for policy in policies.values():
        perturb(policy, SCALE, seed=0, only="lora_B")
    times: dict[str, list[float]] = {"ours": [], "trl": []}
    drifts: dict[str, Any] = {}
    for number in range(1, pairs + 1):
        for policy in policies.values():
            perturb(policy, STEP, seed=number)
        for name, engine in engines.items():
            times[name].append(seconds(partial(engine.publish, policies[name], number)))
        if number in (*DRIFT_AFTER, pairs):
            drifts[f"after {number}"] = {name: drift(base, originals[name]) for name, base in bases.items()}
    samples = {name: sample(engine, prompts) for name, engine in engines.items()}
    references = [score(policies[name], samples["ours"], adapter=False) for name in ("trl", "ours")]
    ours.close()
    ratios = [b / a for a, b in zip(times["ours"][1:], times["trl"][1:], strict=True)]
    return {
        "parameters": {
            "base": sum(weight.numel() for weight in originals["ours: trainer"].values()),
            "adapter": sum(p.numel() for p in policies["ours"].parameters.values()),
        },
        "seconds": {name: statistics.median(values[1:]) for name, values in times.items()},
        "seconds of the first sync": {name: values[0] for name, values in times.items()},
        "trl / ours": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "drift": drifts,
        "trainer's base after the last sync, trl against ours": gap(*references),
        "sampler against trainer after the last sync": {n: sampler_gap(policies[n], samples[n]) for n in engines},
    }


def hand_over(pairs: int) -> dict[str, Any]:
    """An adapter of rank 32 on all linear layers of Qwen3-8B, in bfloat16, handed from trainer to vLLM: written to a
    folder in memory and read again, against a copy of the tensors, which is all that a patch of vLLM's loader needs."""
    width, kv, mlp = 4096, 1024, 12288
    shapes = [(width, width), (width, kv), (width, kv), (width, width), (width, mlp), (width, mlp), (mlp, width)]
    halves = [half for n_in, n_out in shapes for half in ((32, n_in), (n_out, 32))]
    tensors = {f"layer{i}.{j}": torch.randn(half).bfloat16() for i in range(36) for j, half in enumerate(halves)}
    times: dict[str, list[float]] = {"folder in memory": [], "copy": []}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        path = Path(folder) / "adapter_model.safetensors"
        for _ in range(pairs):
            times["folder in memory"].append(seconds(lambda: (save_file(tensors, path), load_file(path))))
            times["copy"].append(seconds(lambda: {name: tensor.clone() for name, tensor in tensors.items()}))
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    return {"MiB": size / 2**20} | {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--pairs", type=int, default=100, help="at least 2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or fetch_model()
    result = measure(model, arguments.pairs)
    result["seconds to hand over rank 32 of an 8B model"] = hand_over(min(arguments.pairs, 20))
    save({"model": model.name, "pairs": arguments.pairs, "threads": torch.get_num_threads()} | result, arguments.out)


if __name__ == "__main__":
    main()
