"""For a GPU; `benchmarks/gpu_suite.py` runs these first. Without one they are skipped."""

import importlib.util
import json
import multiprocessing
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from helpers import (
    LONG,
    PROMPTS,
    adapted_policy,
    dense,
    fake_completions,
    gap,
    generate,
    learn,
    make_vllm,
    relative,
)
from memory import peak_bytes
from random_model import build, qwen3

from stapo_lite.algorithm.lm_head import token_statistics
from stapo_lite.algorithm.microbatches import sequence_length
from stapo_lite.model.one_base import base_on, check_weights
from stapo_lite.training.folder import read_metrics

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Big enough that its weights show in the allocator's count: 20 million of them."""
    shape = {
        "vocab_size": 2000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    }
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    return build(
        tmp_path_factory.mktemp("small"), qwen3("1.7B", **shape, **heads, initializer_range=0.05)
    )


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)]
)
def test_lm_head_against_float64(dtype, tolerance, entropy):
    generator = torch.Generator().manual_seed(0)
    hidden = (1.5 * torch.randn(300, 256, generator=generator)).to(CUDA, dtype).requires_grad_()
    weight = (torch.randn(5003, 256, generator=generator) / 16).to(CUDA, dtype)
    targets = torch.randint(0, 5003, (300,), generator=generator).to(CUDA)
    options = {"temperature": 0.7, "memory_bytes": 4 << 20, "differentiable_entropy": entropy}
    actual = token_statistics(hidden, weight, targets, **options)
    reference = hidden.detach().double().requires_grad_()
    expected = dense(reference, weight, None, targets, 0.7)
    for got, want in zip(actual, expected, strict=True):
        assert (got - want).abs().max() < 5e-5
    for values in (actual, expected):
        (values[0].sum() + (values[1].sum() if entropy else 0)).backward()
    assert relative(hidden.grad, reference.grad) < tolerance


def test_lm_head_stays_within_its_budget():
    hidden = torch.randn(4096, 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50_000, 512, device=CUDA, dtype=torch.bfloat16)
    targets = torch.randint(0, 50_000, (4096,), device=CUDA)

    def run():
        token_statistics(hidden, weight, targets, memory_bytes=64 << 20).logprobs.sum().backward()

    run()
    assert peak_bytes(run) < (64 << 20) + 3 * hidden.nbytes + (1 << 20)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_the_trainer_computes_as_on_a_cpu(small_model, quantization):
    completions = fake_completions(0, [1.0] * 4, longest=40, vocabulary=2000)
    logprobs, gradients = [], []
    for device in ("cpu", "cuda"):
        policy = adapted_policy(small_model, quantization=quantization, device=device, seed=0)
        logprobs.append(policy.statistics(completions).logprobs)
        gradient = torch.autograd.grad(logprobs[-1].sum(), list(policy.parameters.values()))
        gradients.append(torch.cat([g.flatten().cpu() for g in gradient]))
    assert (logprobs[0] - logprobs[1].cpu()).abs().max() < 1e-3
    assert relative(gradients[1], gradients[0].double()) < 1e-2


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_parking_frees_the_card(small_model, quantization):
    policy = adapted_policy(small_model, "bfloat16", quantization=quantization, device=CUDA)
    base = sum(p.nbytes for p in policy.model.parameters() if not p.requires_grad)
    completions = fake_completions(0, [1.0] * 4)
    with torch.no_grad():
        before = policy.statistics(completions).logprobs
    there = torch.cuda.memory_allocated()
    policy.park()
    assert there - torch.cuda.memory_allocated() >= 0.95 * base
    assert policy.device.type == "cuda"
    policy.unpark()
    with torch.no_grad():
        assert torch.equal(policy.statistics(completions).logprobs, before)


def test_offloaded_activations_leave_the_card(small_model):
    completions = fake_completions(0, [1.0] * 64, longest=200)
    peaks = []
    for offload in (False, True):
        changes = {"train__gradient_checkpointing": True, "train__offload_activations": offload}
        policy = adapted_policy(small_model, "bfloat16", device=CUDA, **changes)
        policy.statistics(completions).logprobs.sum().backward()
        peaks.append(
            peak_bytes(
                lambda policy=policy: policy.statistics(completions).logprobs.sum().backward()
            )
        )
    inputs = (
        5 * 64 * max(map(sequence_length, completions)) * 512 * 2
    )  # of all layers but the one at work
    assert peaks[0] - peaks[1] > 0.8 * inputs


@pytest.mark.parametrize("optim", ["adamw", "paged_adamw_8bit"])
def test_qlora_learns(small_model, optim):
    checkpointing = {"train__gradient_checkpointing": True}
    policy = adapted_policy(
        small_model, "bfloat16", quantization="nf4", device=CUDA, **checkpointing
    )
    completions = fake_completions(0, [1.0] * 8, vocabulary=2000)
    likelihoods = learn(policy, completions, optim, 0.003)
    assert likelihoods[-1] > likelihoods[0] + 10


def sleep_and_wake(model, level):
    """Without a level the trainer computes on vLLM's weights."""
    engine = make_vllm(model, "bfloat16", sleep_level=level or 1, cache_bytes=None)
    policy = adapted_policy(model, "bfloat16", device=CUDA)
    if level is None:
        base = base_on(engine.shared_base(), str(model), "bfloat16", CUDA)
        check_weights(base, str(model))
        assert same_weights(base, policy.model.get_base_model())
        engine.keep_base()
    engine.publish(policy, 7)
    before = gap(policy, generate(engine, PROMPTS + LONG)).mean()
    free, total = torch.cuda.mem_get_info()
    for _ in range(2):
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - free > 0.2 * total  # of the 0.3 it has
        engine.wake()
        groups = generate(engine, PROMPTS + LONG)
        assert {c.adapter_version for group in groups for c in group} == {7}
        assert gap(policy, groups).mean() < 2 * before + 0.01
    if level is None:
        assert same_weights(base, policy.model.get_base_model())
        del base
    other = adapted_policy(model, "bfloat16", adapter_seed=2, device=CUDA)
    assert gap(other, groups).mean() > 3 * before
    engine.sleep()
    engine.close()  # asleep: a second engine of the process finds its memory again
    make_vllm(model, "bfloat16", sleep_level=level or 1).close()


def same_weights(base, adapted):
    theirs = {
        name.replace(".base_layer", ""): parameter
        for name, parameter in adapted.named_parameters()
        if not parameter.requires_grad
    }
    return all(torch.equal(mine, theirs[name]) for name, mine in base.named_parameters())


@pytest.mark.parametrize("level", [1, 2, None])
def test_sleep_frees_the_card_and_the_adapter_outlives_it(small_model, level):
    process = multiprocessing.get_context("spawn").Process(
        target=sleep_and_wake, args=(small_model, level)
    )
    process.start()  # a process of its own, whose memory is all its own
    process.join(900)
    assert process.exitcode == 0


@pytest.mark.parametrize("park", [False, True], ids=["one base", "parked"])
@pytest.mark.parametrize("changes", [{}, {"quantization": "nf4"}], ids=["bf16", "nf4"])
def test_a_run_that_shares_the_card(small_model, tmp_path, changes, park):
    """One base or a parked trainer, sleeping engine, expandable segments: three steps."""
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"prompt": "say it", "answer": "1"}) + "\n", encoding="utf-8"
    )
    tree = {"model": str(small_model), "output_dir": str(tmp_path / "run")}
    tree |= {"data": {"source": str(tmp_path / "prompts.jsonl")}, "reward": {"functions": ["math"]}}
    tree["objective"] = {"beta": 0.01}  # with random weights every reward is the same
    tree["rollout"] = {
        "num_generations": 4,
        "max_completion_length": 64,
        "gpu_memory_utilization": 0.3,
    }
    tree["train"] = {"max_steps": 3, "batch_size": 1, "mini_batch_size": 1}
    if importlib.util.find_spec("vllm"):  # transformers samples from the trainer's model
        tree["train"]["park_trainer"] = park
        tree["rollout"]["share_base"] = "off" if park else "on"
        if changes:
            tree["rollout"]["quantization"] = "bitsandbytes"
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tree | changes), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "stapo_lite", "train", str(path), "--processes", "1"],
        check=True,
        timeout=900,
    )
    metrics = read_metrics(tmp_path / "run")
    assert [m["updates"] for m in metrics] == [1, 1, 1]
    assert all(m["kl"] is not None for m in metrics)
    total = torch.cuda.mem_get_info()[1] / 2**30
    assert all(
        0 < m["peak_memory_gb"] < 0.6 * total for m in metrics
    )  # vLLM's 0.3 asleep during the update
