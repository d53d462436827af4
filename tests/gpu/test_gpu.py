"""For a GPU; `benchmarks/gpu_suite.py` runs these first. Without one they are skipped."""

import importlib.util
import multiprocessing
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from base_weights import check_weights
from bitsandbytes.functional import dequantize_4bit
from helpers import (
    LONG,
    PROMPTS,
    adapted_policy,
    dense,
    fake_completions,
    gap,
    generate,
    learn,
    make_learner,
    make_vllm,
    objective,
    relative,
    with_gradient,
)
from memory import peak_bytes
from random_model import build, qwen3

from stapo_lite.method.lm_head import Head, token_statistics
from stapo_lite.method.microbatches import sequence_length
from stapo_lite.model.one_base import base_on
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.memory import MemoryBudget, MemorySetting
from stapo_lite.training.rehearsal import rehearse

CUDA = torch.device("cuda")
SHAPE = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Big enough that its weights show in the allocator's count: 20 million of them."""
    return build(tmp_path_factory.mktemp("small"), qwen3("1.7B", **SHAPE))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)]
)
def test_lm_head_against_float64(dtype, tolerance, entropy):
    generator = torch.Generator().manual_seed(0)
    hidden = (1.5 * torch.randn(300, 256, generator=generator)).to(CUDA, dtype).requires_grad_()
    weight = (torch.randn(5003, 256, generator=generator) / 16).to(CUDA, dtype)
    targets = torch.randint(0, 5003, (300,), generator=generator).to(CUDA)
    options = {"temperature": 0.7, "memory_bytes": 4 << 20}
    actual = token_statistics(hidden, Head(weight, **options), targets, entropy)
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
        token_statistics(
            hidden, Head(weight, memory_bytes=64 << 20), targets
        ).logprobs.sum().backward()

    run()
    assert peak_bytes(run) < (64 << 20) + 3 * hidden.nbytes + (1 << 20)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_the_trainer_computes_as_on_a_cpu(small_model, quantization):
    """In 4 bits, on the weights as the card rounded them: a CPU rounds some scales otherwise."""
    completions = fake_completions(0, [1.0] * 4, longest=40, vocabulary=2000)
    on_card = adapted_policy(small_model, quantization=quantization, device="cuda", seed=0)
    on_cpu = adapted_policy(small_model, seed=0)
    if quantization:
        weights = dict(on_cpu.model.named_parameters())
        for name, parameter in on_card.model.named_parameters():
            if hasattr(parameter, "quant_state"):
                weights[name].data = dequantize_4bit(parameter.data, parameter.quant_state).cpu()
    computed = []
    for policy in (on_cpu, on_card):
        values = [value.cpu() for value in with_gradient(policy, completions)]
        computed.append((values[0], torch.cat([gradient.flatten() for gradient in values[3:]])))
    (expected, gradient), (actual, other) = computed
    assert (actual - expected).abs().max() < 1e-3
    assert relative(other, gradient.double()) < 1e-2


def test_offloaded_activations_leave_the_card(small_model):
    completions = fake_completions(0, [1.0] * 64, longest=200)
    policy = adapted_policy(small_model, "bfloat16", device="cuda")
    peaks = []
    for offload in (False, True):
        policy.save_memory(checkpointing=True, offload=offload)
        with_gradient(policy, completions)
        peaks.append(peak_bytes(lambda: with_gradient(policy, completions)))
    # The inputs of all layers but the one at work, in 16 bits.
    inputs = 5 * 64 * max(map(sequence_length, completions)) * 512 * 2
    assert peaks[0] - peaks[1] > 0.8 * inputs


def test_qlora_learns(small_model):
    in_4_bits = {"quantization": "nf4", "checkpointing": True}
    policy = adapted_policy(small_model, "bfloat16", device="cuda", **in_4_bits)
    completions = fake_completions(0, [1.0] * 8, vocabulary=2000)
    likelihoods = learn(policy, completions, 0.003)
    assert likelihoods[-1] > likelihoods[0] + 10


def test_the_rehearsal_steps_down_on_a_card_that_is_nearly_full(small_model):
    """16,384 tokens take some 2 GB, and 1 GiB is left."""
    policy = adapted_policy(small_model, "bfloat16", device="cuda")
    first = MemorySetting(offload=False, checkpointing=False, tokens=16_384)
    budget = MemoryBudget(first, policy.save_memory)
    learner = make_learner(policy, objective(), budget, longest=1023)
    rehearse(learner)
    assert budget.setting == first
    torch.cuda.empty_cache()
    others = torch.empty(torch.cuda.mem_get_info()[0] - 2**30, dtype=torch.uint8, device=CUDA)
    rehearse(learner)
    found = budget.setting
    rehearse(learner)
    del others
    torch.cuda.empty_cache()  # for the tests' other processes
    assert found.saved() > first.saved()
    assert budget.setting == found  # which fits


def sleep_and_wake(model, one_base):
    """With one base vLLM's cache is the trainer's while it sleeps; beside a copy nothing moves."""
    engine = make_vllm(model, "bfloat16", cache_bytes=None, share_base=one_base)
    policy = adapted_policy(model, "bfloat16", device="cuda")
    base = base_on(engine.shared_base(), str(model), "bfloat16", CUDA)
    engine.publish(policy, 7)
    before = gap(policy, generate(engine, PROMPTS + LONG)).mean()
    free, total = torch.cuda.mem_get_info()
    for _ in range(2):
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - free
        assert freed > 0.2 * total if one_base else freed < 0.01 * total  # of the 0.3 it has
        check_weights(base, model)
        engine.wake()
        groups = generate(engine, PROMPTS + LONG)
        assert {c.adapter_version for group in groups for c in group} == {7}
        assert gap(policy, groups).mean() < 2 * before + 0.01
    del base
    other = adapted_policy(model, "bfloat16", adapter_seed=2, device="cuda")
    assert gap(other, groups).mean() > 3 * before
    engine.sleep()
    engine.close()  # asleep: a second engine of the process finds its memory again
    make_vllm(model, "bfloat16", share_base=one_base).close()


@pytest.mark.parametrize("one_base", [True, False])
def test_sleep_frees_the_cache_of_one_base_alone(small_model, one_base):
    context = multiprocessing.get_context("spawn")  # a process whose memory is all its own
    process = context.Process(target=sleep_and_wake, args=(small_model, one_base))
    process.start()
    process.join(900)
    assert process.exitcode == 0


@pytest.mark.parametrize("share_base", [True, False])
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_run_that_shares_the_card(small_model, write_config, tmp_path, quantization, share_base):
    """Engine and trainer, expandable segments: three steps."""
    rollout = {"num_generations": 4, "max_completion_length": 64, "gpu_memory_utilization": 0.3}
    if importlib.util.find_spec("vllm"):  # transformers samples from the trainer's model
        rollout["share_base"] = share_base
        rollout["quantization"] = "bitsandbytes" if quantization else None
    config = write_config(
        model=str(small_model),
        dtype="auto",
        quantization=quantization,
        rollout=rollout,
        objective__beta=0.01,  # should every reward be the same
        train={"max_steps": 3, "batch_size": 1, "mini_batch_size": 1},
    )
    command = [sys.executable, "-m", "stapo_lite", "train", str(config)]
    subprocess.run(command, check=True, timeout=900, cwd=tmp_path)  # which has the reward
    metrics = read_metrics(tmp_path / "run")
    assert [m["updates"] for m in metrics] == [1, 1, 1]
    assert all(m["kl"] is not None for m in metrics)
    total = torch.cuda.mem_get_info()[1] / 2**30
    assert all(0 < m["peak_memory_gb"] < 0.6 * total for m in metrics)
