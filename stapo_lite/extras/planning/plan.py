"""Does a run fit the card? Predict the memory of both phases before anything is loaded.

Needs only the model's config, not its weights. Tensors are counted; what CUDA and vLLM take beyond
them is estimated by the constants below.
"""

import bisect
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from transformers import AutoConfig

from stapo_lite.config import Config, Rollout, check_processes
from stapo_lite.errors import InputError
from stapo_lite.model.loading import (
    check_target_modules,
    linear_layers,
    load_model_config,
    without_weights,
)
from stapo_lite.rollout.vllm_options import batched_tokens, has_graphs, served_rank

GIB = 2**30
CUDA_CONTEXT = int(0.5 * GIB)
CUDA_GRAPH = 28 * 2**20
"""Bytes of vLLM's CUDA graphs per batch size, with and without adapter together: 2.38 GiB were
measured for the 86 sizes of 256 sequences (vllm#25914). They stay on the card during sleep."""
MOST_IN_A_GRAPH = 512
HOST_PROCESS = 6 * GIB
"""Bytes of Python, torch, CUDA and vLLM in host memory."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight with double quantisation: 4 bits, an 8-bit scale for 64 weights, an fp32 scale
for 256 scales."""
JOINED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
"""Linear layer -> the layer that vLLM fuses it into."""
PINNED = ("trainer: base weights", "vLLM: weights", "vLLM: adapter slots", "activations")
"""Parts of `Plan.host` in pinned memory."""
SHARED = ("vLLM: weights", "vLLM: adapter slots", "vLLM: CUDA graphs")
"""Parts of vLLM that stay on the card during updates if the trainer uses its weights."""
TOKEN_BYTES = 14
"""Bytes per completion token sent to other processes: id and log-probability, pickled."""
SERVED_BYTES = {"bitsandbytes": 0.5 + 4 / 64, "fp8": 1.0}
"""Bytes per weight in vLLM, which unpacks the scales of 4-bit weights to fp32."""


class Plan(NamedTuple):
    """Bytes by purpose."""

    rollout: dict[str, int]
    """On the card that samples: the server's if there is one."""
    update: dict[str, int]
    """On the card that trains."""
    host: dict[str, int]
    kv_tokens: int
    """Tokens that the KV cache holds."""
    longest: int
    """Tokens of the longest sequence."""
    problems: list[str]
    """Empty if everything fits."""
    traffic: dict[str, int]
    """Bytes that a process sends over the network."""


class Sizes(NamedTuple):
    """Sizes that follow from the model's config alone."""

    linears: dict[str, list[tuple[int, int]]]
    """(in, out) of the decoder's linear layers by name: those that are quantised and may get an
    adapter."""
    others: list[int]
    """Elements of each other parameter: embedding, head, norms."""
    kv_per_token: int
    """Elements of a token's keys and values, over all layers."""
    queries_and_keys: int
    """Elements of a token's queries and keys in one layer."""
    normed_queries: bool
    """Whether queries and keys are normed, as in Qwen3."""

    @property
    def matrices(self) -> list[int]:
        """Elements of each linear layer."""
        return [n_in * n_out for shapes in self.linears.values() for n_in, n_out in shapes]

    @property
    def joined(self) -> list[int]:
        """Elements of each linear layer in vLLM."""
        sizes = Counter[tuple[str, int]]()
        for name, shapes in self.linears.items():
            for number, (n_in, n_out) in enumerate(shapes):
                sizes[JOINED.get(name, name), number] += n_in * n_out
        return list(sizes.values())


class Hardware(NamedTuple):
    """The hardware of a run."""

    gpu_memory: int
    """Bytes of each card."""
    host_memory: float | None = None
    """Bytes of the host for each card; None leaves it unchecked."""
    processes: int = 1
    """Processes that train; each has a card."""
    pinned_memory: float | None = None
    """Bytes of the host for each card that may be pinned; None if all of them may."""


class WeightBytes(NamedTuple):
    """Bytes of a run's parameters."""

    linears: list[int]
    """Each linear layer of the frozen base, in the trainer."""
    others: list[int]
    served: list[int]
    """Each parameter in vLLM."""
    slots: int
    """vLLM's memory for adapters."""
    lora: int
    """Elements of the adapter."""
    adapter: int
    optimizer: int


def make_plan(config: Config, model: Any, cards: Hardware) -> Plan:
    """Predict the memory of each phase, per card; rollouts must be vLLM's.

    Args:
        model: the transformers config of the decoder (`get_text_config()`).

    Raises:
        InputError: rollouts are not vLLM's; the model lacks a target module; there are more
            processes than prompts in a batch.
    """
    check_processes(config, cards.processes)
    if config.rollout.engine == "transformers":
        raise InputError(
            "rollout.engine=transformers: only rollouts with vLLM are planned; set "
            "rollout.engine=vllm"
        )
    train, rollout, sizes = config.train, config.rollout, model_sizes(as_json(model))
    weights, serving = count_weights(config, sizes), rollout.engine == "server"
    own = {"trainer: base weights": sum(weights.linears + weights.others)}
    base = {} if config.may_share_base else own  # it is vLLM's
    trainer = {"trainer: adapter": weights.adapter, "trainer: optimiser": weights.optimizer}
    if config.lora.adapter and config.objective.beta:
        trainer["trainer: reference adapter"] = weights.adapter
    if config.objective.teacher_adapter:
        trainer["trainer: teacher's adapter"] = weights.adapter
    context = {"CUDA context": CUDA_CONTEXT}
    engine, kv_tokens = plan_engine(config, model, weights, sizes, cards)
    rollout_phase = engine | context
    if not serving:
        scales = int(sum(sizes.matrices) * (NF4_BYTES - 0.5))  # bitsandbytes keeps them on the card
        parked = {"trainer: scales of 4-bit weights": scales} if config.quantization else {}
        rollout_phase = (parked if train.park_trainer else base) | trainer | rollout_phase

    # Update: what autograd keeps and allocates for the largest micro-batch.
    kept, activations, head = count_activations(config, model)
    update_phase = base | trainer | {"trainer: gradients": weights.adapter} | context
    update_phase[f"activations of {config.largest_microbatch:,} tokens"] = activations
    update_phase["LM head, beyond those"] = head
    if train.offload_activations:
        update_phase["activations in host memory"] = -kept
    if config.quantization:
        update_phase["a dequantised matrix"] = max(sizes.matrices) * config.bytes_per_value
    if not serving:
        stays = engine
        if rollout.sleep_level:
            parts = SHARED if config.may_share_base else ("vLLM: CUDA graphs",)
            stays = {part: engine[part] for part in parts}
        update_phase |= stays

    host = plan_host(config, weights, kept)
    phases = {"rollouts": rollout_phase, "update": update_phase, "host": host}
    longest = config.max_sequence_length
    problems = find_problems(phases, cards, kv_tokens, longest)
    traffic = plan_traffic(config, weights, cards, longest)
    return Plan(rollout_phase, update_phase, host, kv_tokens, longest, problems, traffic)


def find_problems(
    phases: dict[str, dict[str, int]], cards: Hardware, kv_tokens: int, longest: int
) -> list[str]:
    """What does not fit, in words."""
    problems = []
    for name, parts in phases.items():
        needed = sum(parts.values())
        room = cards.host_memory if name == "host" else cards.gpu_memory
        if room is not None and needed > room:
            problems.append(
                f"{name}: {needed / GIB:.1f} GiB needed, {room / GIB:.1f} GiB available"
            )
    pinned = sum(size for name, size in phases["host"].items() if name in PINNED)
    if cards.pinned_memory is not None and pinned > cards.pinned_memory:
        problems.append(
            f"host: {pinned / GIB:.1f} GiB of pinned memory needed, "
            f"{cards.pinned_memory / GIB:.1f} GiB available"
        )
    if kv_tokens < longest:
        problems.append(
            f"rollouts: the KV cache holds {kv_tokens:,} tokens, less than one sequence of "
            f"{longest:,}"
        )
    return problems


def count_weights(config: Config, sizes: Sizes) -> WeightBytes:
    """Count the bytes of the base in trainer and vLLM, and of the adapter (fp32)."""
    width, rollout = config.bytes_per_value, config.rollout
    modules = check_target_modules(config.lora.target_modules, sizes.linears)
    lora = config.lora.r * sum(sum(shape) for name in modules for shape in sizes.linears[name])
    others = [n * width for n in sizes.others]
    trained = {"nf4": NF4_BYTES, "fp8": 1.0}.get(config.quantization or "", width)
    return WeightBytes(
        linears=[int(n * trained) for n in sizes.matrices],
        others=others,
        served=[int(n * served_bytes(config, width)) for n in sizes.joined] + others,
        slots=lora // config.lora.r * served_rank(config.lora.r) * width * (rollout.max_lag + 1),
        lora=lora,
        adapter=4 * lora,
        optimizer=8 * lora if config.train.optim == "adamw" else int(2 * lora * (1 + 4 / 256)),
    )


def plan_engine(
    config: Config, model: Any, weights: WeightBytes, sizes: Sizes, cards: Hardware
) -> tuple[dict[str, int], int]:
    """Bytes of vLLM on its card by purpose, and the tokens that its KV cache holds. Unless its size
    is given, the cache gets what the other parts leave of vLLM's share of the card."""
    rollout, width = config.rollout, config.bytes_per_value
    given, shards = rollout.vllm, rollout.vllm.get("tensor_parallel_size", 1)
    longest = config.max_sequence_length
    batched = given.get("max_num_batched_tokens", batched_tokens(rollout, longest))
    layer = batched * width * (2 * model.hidden_size + 3 * model.intermediate_size)
    logits = rollout.max_num_seqs * model.vocab_size * 4 * 4
    engine = {
        "vLLM: weights": sum(weights.served) // shards,
        "vLLM: adapter slots": weights.slots,  # upper bound: tensor parallelism splits half
        "vLLM: activations": layer + logits,
        "vLLM: CUDA graphs": CUDA_GRAPH * count_graphs(rollout, config.dtype),
    }
    left = max(0, int(rollout.gpu_memory_utilization * cards.gpu_memory) - sum(engine.values()))
    cache = given.get("kv_cache_memory_bytes", left)
    per_token = sizes.kv_per_token * kv_bytes(config)
    return engine | {"vLLM: KV cache": cache}, cache * shards // per_token


def count_graphs(rollout: Rollout, dtype: str) -> int:
    """The number of batch sizes that vLLM captures: full graphs of a decoding step up to
    `max_num_seqs`, and piecewise ones up to twice as many tokens (vllm/config/vllm.py,
    `_set_cudagraph_sizes`)."""
    if not has_graphs(rollout, dtype):
        return 0
    largest = min(2 * rollout.max_num_seqs, MOST_IN_A_GRAPH)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, MOST_IN_A_GRAPH + 1, 16)]
    return bisect.bisect(sizes, largest) + bisect.bisect(sizes, rollout.max_num_seqs)


def kv_bytes(config: Config) -> int:
    """Bytes of a value in the KV cache."""
    if str(config.rollout.vllm.get("kv_cache_dtype", "auto")).startswith("fp8"):
        return 1
    return config.bytes_per_value


def plan_host(config: Config, weights: WeightBytes, kept: int) -> dict[str, int]:
    """Bytes of host memory for each card.

    Args:
        kept: bytes of the layers' inputs that wait for the backward pass.
    """
    base = weights.linears + weights.others
    host = {
        "processes": HOST_PROCESS,
        "snapshots of two steps": 2 * (weights.adapter + weights.optimizer),
    }
    if config.train.park_trainer:
        host["trainer: base weights"] = pinned(base)
    leaves = config.rollout.sleep_level == 1 and not config.may_share_base
    if leaves and config.rollout.engine != "server":
        host["vLLM: weights"] = pinned(weights.served)
        host["vLLM: adapter slots"] = 2 * weights.slots  # many sizes: upper bound
    if config.train.offload_activations:
        host["activations"] = 2 * kept  # pinned memory is rounded up to powers of two
    return host


def plan_traffic(
    config: Config, weights: WeightBytes, cards: Hardware, longest: int
) -> dict[str, int]:
    """Bytes that a process sends."""
    others = (cards.processes - 1) / cards.processes
    completions = config.train.batch_size * config.rollout.num_generations // cards.processes
    traffic = {
        "gradients, an update": int(2 * others * weights.lora * 4),
        "completions, a step, at most": (cards.processes - 1) * completions * longest * TOKEN_BYTES,
    }
    if config.rollout.engine == "server":
        traffic["adapter to each server, a step"] = weights.lora * config.bytes_per_value
    return traffic


@cache
def model_sizes(model: str) -> Sizes:
    """Count the model's parameters on the meta device.

    Args:
        model: from `as_json`.
    """
    causal_lm = without_weights(AutoConfig.for_model(**json.loads(model)))
    layers = linear_layers(causal_lm)
    linears = {}
    for name, group in layers.items():
        linears[name] = [(layer.in_features, layer.out_features) for layer in group]
    quantised = {layer.weight for group in layers.values() for layer in group}
    others = [p.numel() for p in causal_lm.parameters() if p not in quantised]
    config = causal_lm.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys, queries = head_dim * config.num_key_value_heads, head_dim * config.num_attention_heads
    normed = any(name.endswith("q_norm.weight") for name, _ in causal_lm.named_parameters())
    return Sizes(linears, others, 2 * config.num_hidden_layers * keys, queries + keys, normed)


def as_json(model: Any) -> str:
    """A transformers config as a hashable cache key."""
    return model.to_json_string(use_diff=False)


def served_bytes(config: Config, width: int) -> float:
    """Bytes per weight of a linear layer in vLLM."""
    rollout = config.rollout
    if rollout.quantization in SERVED_BYTES:
        return SERVED_BYTES[rollout.quantization]
    checkpoint = served_quantization(rollout.model) if rollout.model else {}
    if "bits" in checkpoint:  # AWQ, GPTQ: a scale and a zero point per group
        group = checkpoint.get("group_size", 128)
        return checkpoint["bits"] / 8 + (2.5 / group if group > 0 else 0)  # -1: a column is a group
    if checkpoint.get("quant_method") == "fp8":
        return SERVED_BYTES["fp8"]
    return width  # an unknown format may take less


@cache  # a choice makes dozens of plans, and a Hub name costs a request
def served_quantization(model: str) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint; empty if it has none."""
    return getattr(load_model_config(model), "quantization_config", {})


def pinned(sizes: Sequence[int]) -> int:
    """Bytes of host memory that pinning takes: each size is rounded up to a power of two."""
    return sum(1 << math.ceil(math.log2(max(1, size))) for size in sizes)


def count_activations(config: Config, model: Any) -> tuple[int, int, int]:
    """Bytes that autograd needs for a micro-batch of `largest_microbatch` tokens.

    Assumes layers like those of Llama and Qwen: two norms in fp32, attention scores never
    materialised, a gated MLP. Within 2 % of what such layers allocate (1.7B to 32B; bf16 and fp32;
    with and without checkpointing).

    Returns:
        Layer inputs kept for the backward pass, without the last one; the peak of the decoder's
        forward and backward pass; what the LM head needs beyond that.
    """
    train, width, sizes = config.train, config.bytes_per_value, model_sizes(as_json(model))
    hidden, inner, tokens = model.hidden_size, model.intermediate_size, config.largest_microbatch
    # Each norm keeps its input in fp32 and its output, the MLP gate, SiLU, up and their product;
    # attention keeps queries, keys, values and its output.
    layer = tokens * (8 * hidden + width * (2 * hidden + 4 * inner + 2 * sizes.queries_and_keys))
    if sizes.normed_queries:  # in fp32, too
        layer += tokens * 4 * sizes.queries_and_keys
    inputs = tokens * hidden * width  # of a layer
    layers = model.num_hidden_layers
    checkpointed = checkpointed_layers(train.gradient_checkpointing, layers)
    kept = inputs * checkpointed + layer * (layers - checkpointed)
    # If some layers are not checkpointed, these come last, so that their activations are freed
    # before any are recomputed.
    recomputed = layer if checkpointed == layers else 0
    # Gradients of gate and up, and of the layer's input and output.
    gradients = tokens * width * 2 * (inner + hidden)
    # The last norm, its output's gradient, the hidden states for the LM head.
    final = tokens * width * 11 * hidden
    decoder = kept + max(recomputed + gradients, final)
    head = kept + int(train.lm_head_memory_gb * GIB) + tokens * width * 3 * hidden
    return inputs * (layers - 1), decoder, max(0, head - decoder)  # the last one is used at once


def checkpointed_layers(gradient_checkpointing: bool | int, layers: int) -> int:
    """How many of the layers `train.gradient_checkpointing` covers."""
    return layers if gradient_checkpointing is True else min(int(gradient_checkpointing), layers)


def report(plan: Plan) -> str:
    """The plan as a table in GiB."""
    columns = (plan.rollout, plan.update, plan.host)
    rows = [["GiB", "rollouts", "update", "host"]]
    for name in dict.fromkeys(itertools.chain(*columns)):
        sizes = [f"{column[name] / GIB:.2f}" if name in column else "-" for column in columns]
        rows.append([name, *sizes])
    rows.append(["total", *(f"{sum(column.values()) / GIB:.2f}" for column in columns)])
    lines = [f"{name:<32}" + "".join(f"{cell:>10}" for cell in cells) for name, *cells in rows]
    lines.append(
        f"The KV cache holds {plan.kv_tokens:,} tokens: {plan.kv_tokens // plan.longest} sequences "
        f"of the longest length ({plan.longest:,}) at a time."
    )
    sent = [f"{size / GIB:.2f} GiB of {name}" for name, size in plan.traffic.items() if size]
    if sent:
        lines.append(f"Each process sends {'; '.join(sent)}.")
    return "\n".join(lines)
