"""Qwen3.5, a hybrid of linear and full attention, as its checkpoints are on the Hub: the language
model is part of a larger model. Real vLLM on the CPU, which computes it in bfloat16 only."""

import inspect
import itertools
from contextlib import closing

import pytest
import torch
from families import FAMILIES, random_checkpoint
from helpers import (
    LONG,
    PROMPTS,
    SAMPLING,
    adapted_policy,
    fake_completions,
    gap,
    generate,
    make_learner,
    make_vllm,
    objective,
    randomise_adapter,
    with_gradient,
)
from transformers.integrations import hub_kernels

from stapo_lite.errors import RunError
from stapo_lite.extras.self_check import check_engine
from stapo_lite.extras.transformers_engine import TransformersEngine

LINEAR = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
FULL = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = [*LINEAR, *FULL, "gate_proj", "up_proj", "down_proj"]
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("hybrid"), FAMILIES["Qwen3.5"])


@pytest.fixture(scope="module")
def engine(hybrid):
    with closing(make_vllm(hybrid, "bfloat16")) as engine:
        yield engine


def test_every_kind_of_layer_has_an_adapter_by_default(hybrid):
    policy = adapted_policy(hybrid)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in policy.parameters}
    assert names == set(KINDS)
    # A and B of three layers of linear attention, one of full attention, and four MLPs.
    assert len(policy.parameters) == 2 * (3 * len(LINEAR) + len(FULL) + 4 * 3)


def test_no_kernel_of_the_hub_takes_the_place_of_one_with_a_gradient(hybrid):
    """For a model in eval mode, as ours is, the Hub's kernels would be those for inference."""
    modes = inspect.getsource(hub_kernels)
    assert "Mode.INFERENCE if not model.training else Mode.TRAINING" in modes
    model = adapted_policy(hybrid).model.get_base_model()
    assert not model.training
    assert not getattr(model, "_use_kernels", False)


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_serves_the_adapter_of_each_kind_of_layer(hybrid, engine, kind):
    policy = adapted_policy(hybrid, "bfloat16", scale=0.0)
    randomise_adapter(policy, seed=3, scale=2.0, only=kind)
    engine.publish(policy, next(VERSIONS))
    groups = generate(engine, PROMPTS)
    rounding = gap(policy, groups).mean()
    randomise_adapter(policy, seed=3, scale=0.0)
    assert rounding < gap(policy, groups).mean() / 4


@pytest.mark.parametrize(
    "part", ["", ".linear_attn.", ".self_attn.", ".mlp.", ".o_proj.", ".up_proj."]
)
def test_the_self_check_finds_an_adapter_that_vllm_ignores(hybrid, engine, monkeypatch, part):
    """With the names of the language model alone, of which vLLM says nothing: all, or some."""
    policy = adapted_policy(hybrid, "bfloat16")
    learner = make_learner(policy, objective(), max_tokens=2000)
    tensors = policy.adapter_tensors

    def misnamed(dtype):
        return {
            name.replace("language_model.", "") if part in name else name: values
            for name, values in tensors(dtype).items()
        }

    def check():
        check_engine(engine, learner, LONG + PROMPTS, SAMPLING.temperature, same_weights=True)

    publish = engine.publish
    monkeypatch.setattr(engine, "publish", lambda policy, version: publish(policy, next(VERSIONS)))
    check()
    monkeypatch.setattr(policy, "adapter_tensors", misnamed)
    fault = "it computes another model" if part else "it ignores the adapter"
    with pytest.raises(RunError, match=rf"{fault}.*0\.32 is tested; vllm#34186 and #49354"):
        check()


def test_transformers_samples_as_the_trainer_computes(hybrid):
    policy = adapted_policy(hybrid)
    engine = TransformersEngine(SAMPLING, 16)
    engine.publish(policy, 1)
    assert gap(policy, generate(engine, PROMPTS)).max() < 1e-4  # prompts of three lengths


@pytest.mark.parametrize("checkpointing", [False, True])
def test_neither_padding_nor_other_rows_change_a_completion(hybrid, checkpointing):
    policy = adapted_policy(hybrid, checkpointing=checkpointing)
    completions = fake_completions(0, [1.0] * 4)
    logprobs, _, _, *gradients = with_gradient(policy, completions)
    alone = [with_gradient(policy, [completion]) for completion in completions]
    assert (logprobs - torch.cat([numbers[0] for numbers in alone])).abs().max() < 3e-5
    for gradient, *parts in zip(gradients, *(numbers[3:] for numbers in alone), strict=True):
        assert (gradient - sum(parts)).norm() < 1e-4 * gradient.norm()


def test_checkpointed_layers_give_the_same_numbers(hybrid):
    completions = fake_completions(0, [1.0] * 4)
    plain = with_gradient(adapted_policy(hybrid), completions)
    checkpointed = with_gradient(adapted_policy(hybrid, checkpointing=True), completions)
    for one, other in zip(plain, checkpointed, strict=True):
        assert torch.equal(one, other)
