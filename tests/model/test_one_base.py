"""The trainer on vLLM's weights, against a trainer with a copy of its own: real vLLM on the CPU."""

import gc
import re
import signal
import weakref
from contextlib import closing
from types import SimpleNamespace

import bitsandbytes
import interrupted
import pytest
import torch
from base_weights import check_weights
from families import FAMILIES, IN_HALF, random_checkpoint
from helpers import (
    MINIMAL,
    PROMPTS,
    SAMPLING,
    adapter_bytes,
    gap,
    generate,
    held_out_rows,
    learn,
    make_vllm,
    randomise_adapter,
    relative,
    run,
    with_gradient,
    without_times,
)
from torch import nn

from stapo_lite import assemble
from stapo_lite.assemble import shared_base
from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.files import read_lines
from stapo_lite.model.loading import load_weights
from stapo_lite.model.one_base import base_on, linear_4bit
from stapo_lite.model.policy import make_policy
from stapo_lite.rollout.vllm_weights import named_weights
from stapo_lite.training.folder import read_metrics
from stapo_lite.types import NF4Weight

pytest.importorskip("vllm", reason="vLLM is not installed")
CPU = torch.device("cpu")
DTYPES = {None: "float32", "nf4": "bfloat16"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model"), FAMILIES["Qwen3"])


@pytest.fixture
def unpacked(monkeypatch):
    """vLLM's CPU build with 16- and 32-bit weights that are not packed away, as on a card."""

    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def plain(layer, remove_weight):
        if layer.weight.ndim == 3:  # a convolution, for which there is no other kernel
            pack(layer, remove_weight)
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)


def start(model, quantization, dtype=None):
    in_vllm = {"nf4": "bitsandbytes"}.get(quantization)
    return make_vllm(model, dtype or DTYPES[quantization], in_vllm)


def storages(model):
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_on_vllms_weights_is_that_of_a_copy(family, quantization, unpacked, tmp_path):
    """In log-probabilities, gradients and ten steps, after which vLLM samples as before."""
    model = str(tmp_path / "model")
    dtype = "bfloat16" if family in IN_HALF else DTYPES[quantization]
    random_checkpoint(tmp_path / "model", FAMILIES[family])
    keys = {"model": model, "dtype": dtype, "quantization": quantization}
    keys["lora"] = {"r": 8}
    config = load_config(MINIMAL | keys, [f"rollout.temperature={SAMPLING.temperature}"])
    with closing(start(model, quantization, dtype)) as engine:
        base = base_on(engine.shared_base(), model, dtype, CPU)
        check_weights(base, model)
        models: list = []
        engine._llm.apply_model(models.append)
        copies = storages(base) - storages(models[0])
        # Only for such a CPU does vLLM repack the convolutions.
        repacks = torch.cpu.get_capabilities().get("avx512_bf16", False)
        assert len(copies) == (3 if family in IN_HALF and repacks else 0)
        shared = make_policy(base, config)
        own = make_policy(load_weights(model, dtype, CPU, quantization), config)
        randomise_adapter(shared, seed=1)
        randomise_adapter(own, seed=1)
        shared.save_adapter(tmp_path / "adapter")
        engine.load_adapter(tmp_path / "adapter", 1)
        groups = generate(engine, PROMPTS)
        assert gap(shared, groups).mean() < {"float32": 1e-5, "bfloat16": 0.1}[dtype]
        completions = [c for group in groups for c in group]
        computed = (with_gradient(policy, completions) for policy in (shared, own))
        assert all(relative(*pair) < 1e-6 for pair in zip(*computed, strict=True))
        likelihoods = [learn(policy, completions, 1e-3) for policy in (shared, own)]
        assert likelihoods[0] == pytest.approx(likelihoods[1], rel=1e-5)
        engine.load_adapter(tmp_path / "adapter", 2)
        again = [c.token_ids for group in generate(engine, PROMPTS) for c in group]
        assert again == [c.token_ids for c in completions]


@pytest.fixture
def weights(checkpoint):
    """A base's weights by their names, as an engine would give them."""
    base = load_weights(str(checkpoint), "float32")
    return {name: parameter.data for name, parameter in base.named_parameters()}


VALUES = "model.layers.1.self_attn.v_proj.weight"


def share(checkpoint, weights, *overrides):
    config = load_config(MINIMAL | {"model": str(checkpoint), "dtype": "float32"}, overrides)
    engine = SimpleNamespace(shared_base=lambda: weights)
    return shared_base(engine, config, SimpleNamespace(device=CPU))


@pytest.mark.parametrize(
    ("change", "there"),
    [
        (lambda values: None, "no such weight"),
        (lambda values: values[:-1], "one of [63, 128] in torch.float32"),
        (lambda values: values.bfloat16(), "one of [64, 128] in torch.bfloat16"),
    ],
    ids=["missing", "short", "rounded"],
)
def test_weights_that_do_not_fit_the_model_end_the_run(checkpoint, weights, change, there):
    weights[VALUES] = change(weights[VALUES])
    ours = f"{VALUES} is [64, 128] in torch.float32"
    message = f"do not fit ({ours}, and the engine has {there}): set it to false"
    with pytest.raises(InputError, match=f"^rollout.share_base: .*{re.escape(message)}$"):
        share(checkpoint, weights)


def test_the_trainer_loads_a_copy_if_the_engine_has_nothing_to_share(checkpoint, weights):
    """As vLLM on a CPU with its packed weights."""
    assert share(checkpoint, None) is None
    assert share(checkpoint, weights, "rollout.share_base=false") is None


def test_a_tied_head_is_the_embedding_of_the_engine(tmp_path):
    random_checkpoint(tmp_path, FAMILIES["Qwen3, tied"])
    whole = load_weights(str(tmp_path), "float32")
    weights = {name: parameter.data for name, parameter in whole.named_parameters()}
    base = share(tmp_path, weights)
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    assert base.get_input_embeddings().weight.data_ptr() == whole.lm_head.weight.data_ptr()


def test_a_layout_that_is_not_known_is_missed_by_its_name():
    layer = nn.Linear(4, 6, bias=False)
    model = nn.Module()
    model.qkv_proj = layer
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert named_weights(model) == {}
    layer.output_sizes = [3, 2]  # not its six rows
    assert named_weights(model) == {}
    layer.output_sizes = [3, 2, 1]
    rows = {"q_proj": slice(0, 3), "k_proj": slice(3, 5), "v_proj": slice(5, 6)}
    found = named_weights(model)
    assert found.keys() == {f"{name}.weight" for name in rows}
    for name, part in rows.items():
        assert torch.equal(found[f"{name}.weight"], layer.weight[part])


def test_a_layer_in_4_bits_takes_over_the_bias():
    linear = nn.Linear(64, 64)
    packed, state = bitsandbytes.functional.quantize_4bit(linear.weight.data, quant_type="nf4")
    layer, x = linear_4bit(linear, NF4Weight(packed, state)), torch.randn(3, 64)
    assert layer.bias is linear.bias
    weight = bitsandbytes.functional.dequantize_4bit(packed, state)
    torch.testing.assert_close(layer(x), x @ weight.T + linear.bias, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_vllm_gives_its_cache_back_after_it_has_sampled(checkpoint, monkeypatch):
    """vLLM refuses while its scheduler knows requests that have ended. No memory moves here."""
    with closing(start(checkpoint, "nf4")) as engine:
        core = engine._llm.llm_engine.engine_core.engine_core
        discarded = []
        monkeypatch.setattr(core.model_executor, "discard", discarded.append)
        monkeypatch.setattr(engine, "sleeps", True)  # which a CPU's does not
        sampled = []
        for _ in range(2):
            groups = generate(engine, PROMPTS)
            sampled.append([c.token_ids for group in groups for c in group])
            engine.sleep()
            assert core.is_scheduler_paused()
            engine.wake()
            assert not core.is_scheduler_paused()
        assert discarded == [("kv_cache",)] * 2
        assert sampled[0] == sampled[1]


@pytest.fixture
def in_4_bits(write_config, checkpoint, tmp_path):
    """A run in 4 bits; from float32 trainer and engine would round to them in different ways."""

    def write(name="run", **rollout):
        rollout |= {"engine": "vllm", "quantization": "bitsandbytes", "max_completion_length": 8}
        keys = {"model": str(checkpoint), "dtype": "bfloat16", "quantization": "nf4"}
        keys |= {"rollout": rollout | {"num_generations": 4}, "log__save_steps": 1}
        keys |= {"train__gradient_checkpointing": True, "evaluation": held_out_rows(tmp_path)}
        return write_config(output_dir=str(tmp_path / name), **keys)

    return write


def outcome(folder):
    evaluations = read_lines(folder / "evaluations.jsonl")
    return without_times(read_metrics(folder)), evaluations, adapter_bytes(folder / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize(
    "turns", [{}, {"function": "engine_cases:with_a_tool"}], ids=["one", "two"]
)
def test_a_run_on_one_base_is_that_of_two_copies(in_4_bits, tmp_path, children, turns):
    """With evaluations while it trains, and also if it is killed and resumed."""
    run(in_4_bits("off", share_base=False, **turns))
    run(in_4_bits("on", share_base=True, **turns))
    config, third_step = in_4_bits("resumed", **turns), (4, 9)
    killed = children(interrupted.train, [str(config)], "update", third_step, signal.SIGKILL)
    assert killed == -signal.SIGKILL
    run(config, resume=True)
    off, on, resumed = (outcome(tmp_path / name) for name in ("off", "on", "resumed"))
    assert on == off
    assert resumed == off


@pytest.mark.slow
def test_nothing_holds_the_weights_when_the_engine_is_closed(in_4_bits, monkeypatch, watch):
    """On a card no other engine would start in this process."""
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    events, close = [], VLLMEngine.close

    def note_close(engine):
        gc.collect()
        events.append("closed")
        close(engine)

    watch(assemble, "base_on", lambda base, *_: weakref.finalize(base, events.append, "freed"))
    monkeypatch.setattr(VLLMEngine, "close", note_close)
    run(in_4_bits())
    assert events == ["freed", "closed"]
