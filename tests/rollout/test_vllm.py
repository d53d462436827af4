"""vLLM in the trainer's process: its options, how it starts, fails and ends."""

import json
import weakref
from contextlib import closing, nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, call, create_autospec

import pytest
import torch
from helpers import PROMPTS, adapted_policy, gap, generate, make_vllm, randomise_adapter

from stapo_lite.config import Engine
from stapo_lite.errors import InputError, RunError
from stapo_lite.rollout.make import resolve_engine
from stapo_lite.rollout.vllm_engine import VLLMEngine
from stapo_lite.rollout.vllm_options import (
    BATCHED_TOKENS,
    check_vllm,
    engine_arguments,
    graph_sizes,
)


def test_no_adapter_slot_outlives_its_engine_nor_its_number_of_threads():
    """vLLM's tables of slots, filled by its own functions; both are private."""
    kernels = pytest.importorskip("vllm.lora.ops.triton_ops.utils", reason="vLLM is not installed")
    slots = [torch.zeros(1, 4, 8), torch.zeros(1, 8, 4)]
    kernels._get_lora_a_ptr(slots[:1], slots[0].device)
    kernels._get_lora_b_ptr(slots[1:], 0, slots[1].device)
    left = [weakref.ref(slot) for slot in slots]
    del slots
    assert all(slot() is not None for slot in left)
    engine = object.__new__(VLLMEngine)
    engine._llm, engine._asleep, engine._folder = None, False, Mock()
    engine._threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as vLLM does on a GPU
    engine.close()
    assert all(slot() is None for slot in left)
    assert torch.get_num_threads() == engine._threads


def test_bfloat16_agrees_loosely(tiny_model, make_policy):
    policy, other = make_policy("bfloat16"), make_policy("bfloat16", adapter_seed=2)
    with closing(make_vllm(tiny_model, "bfloat16")) as engine:
        engine.publish(policy, 1)
        groups = generate(engine, PROMPTS)
    assert gap(policy, groups).mean() < 0.1
    assert gap(policy, groups).max() < 1.0
    assert gap(other, groups).mean() > 3 * gap(policy, groups).mean()


@pytest.mark.slow
def test_the_same_4_bit_weights_on_both_sides(smollm2):
    """vLLM with bitsandbytes and an nf4 trainer agree as bfloat16 does with bfloat16."""
    pytest.importorskip("vllm_bnb_plugin", reason="the plugin is not installed")
    policy = adapted_policy(smollm2, "bfloat16", quantization="nf4", scale=0.05)
    with closing(make_vllm(smollm2, "bfloat16", "bitsandbytes")) as engine:
        engine.publish(policy, 1)
        groups = generate(engine, PROMPTS)
    same = gap(policy, groups).mean()
    assert same < 0.1
    assert gap(adapted_policy(smollm2, "bfloat16", scale=0.05), groups).mean() > 3 * same
    randomise_adapter(policy, seed=1, scale=0.0)
    assert gap(policy, groups).mean() > 3 * same


OPTIONS = "stapo_lite.rollout.vllm_options"


@pytest.mark.parametrize(
    ("found", "version", "card", "engine"),
    [
        (None, "", True, "transformers"),
        ("vLLM", "0.32.0+cpu", False, "vllm"),
        ("vLLM", PackageNotFoundError, False, "vllm"),  # the CPU build has another name on PyPI
        ("vLLM", "0.32.0", True, "vllm"),
        ("vLLM", "0.32.0", False, "transformers"),
    ],
)
def test_auto_is_vllm_where_it_can_run(monkeypatch, found, version, card, engine):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(f"{OPTIONS}.version", Mock(side_effect=[version]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    assert resolve_engine("auto") == engine
    assert resolve_engine("transformers") == "transformers"


@pytest.mark.parametrize(
    ("plugin", "card", "quantization", "dtype", "problem"),
    [
        (None, False, "bitsandbytes", "bfloat16", r"vllm-bnb-plugin==0\.0\.3$"),
        ("there", False, "bitsandbytes", "bfloat16", None),
        ("there", False, "bitsandbytes", "float32", "dtype=float32: .* dtype=bfloat16"),
        (None, False, "fp8", "float32", None),
        (None, True, None, "float32", "dtype=float32: .* adapters on a card"),
    ],
)
def test_what_vllm_cannot_serve_is_refused(monkeypatch, plugin, card, quantization, dtype, problem):
    monkeypatch.setattr(f"{OPTIONS}.find_spec", lambda name: plugin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    with pytest.raises(InputError, match=problem) if problem else nullcontext():
        check_vllm(Engine(quantization=quantization), dtype)


@pytest.fixture
def start(monkeypatch):
    """How vLLM is started: as on a GPU, one that only notes the calls that the real one knows."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(vllm, "LLM", start := create_autospec(vllm.LLM))
    start.return_value.llm_engine = Mock()
    return start


def test_a_vllm_that_dies_ends_the_run_in_one_line(start, tiny_model):
    start.return_value.llm_engine.step.side_effect = RuntimeError("the device\nfell off the bus")
    failure = r"vLLM failed while it sampled \(the device fell off the bus\): go on"
    engine = make_vllm(tiny_model, "float32")
    with closing(engine), pytest.raises(RunError, match=failure):
        generate(engine, PROMPTS)


SLEEP = [*[call.llm_engine.step()] * 3, call.sleep(level=0), call.release_kv_cache_memory()]
WAKE = call.wake_up(tags=["kv_cache", "scheduling"])


def test_a_shared_base_stays_while_vllm_sleeps(start, tiny_model):
    """An engine that sleeps wakes before it ends, or the next one would not get its memory."""
    llm, full = start.return_value, RuntimeError("CUDA Error: out of memory at csrc/cumem:62")
    llm.wake_up.side_effect = [None, full, full]
    engine = make_vllm(tiny_model, "bfloat16", share_base=True)
    assert start.call_args.kwargs["enable_sleep_mode"]
    engine.sleep()
    engine.wake()
    engine.sleep()
    with pytest.raises(RunError, match="lower rollout.gpu_memory_utilization, and continue"):
        engine.wake()
    engine.close()
    end = [call.wake_up(), call.llm_engine.engine_core.shutdown()]
    assert llm.mock_calls == [*SLEEP, WAKE, *SLEEP, WAKE, *end]


def test_beside_a_trainer_with_a_copy_of_the_base_vllm_neither_sleeps_nor_wakes(start, tiny_model):
    with closing(make_vllm(tiny_model, "bfloat16")) as engine:
        assert not start.call_args.kwargs["enable_sleep_mode"]
        engine.sleep()
        engine.wake()
        assert start.return_value.mock_calls == []


def test_a_second_engine_of_a_process_is_refused_until_the_first_has_closed(start, tiny_model):
    start.side_effect = [ValueError("no room"), *[DEFAULT] * 2]
    with pytest.raises(InputError, match="no room"):
        make_vllm(tiny_model, "bfloat16")
    for _ in range(2):
        already = pytest.raises(InputError, match="this process has a vLLM engine already")
        with closing(make_vllm(tiny_model, "bfloat16")), already:
            make_vllm(tiny_model, "bfloat16")


@pytest.mark.parametrize("slots", [[0] * 5, [1, 0, -1, 1, 0]], ids=["one", "several and none"])
def test_a_cpu_adds_each_rows_adapter_to_the_base(slots):
    pytest.importorskip("vllm.lora.punica_wrapper.punica_cpu", reason="vLLM is not installed")
    from stapo_lite.rollout.vllm_cpu_lora import _add_lora_linear

    torch.manual_seed(0)
    x, y, widths = torch.randn(5, 4), torch.randn(5, 8), (2, 6)
    a = tuple(torch.randn(2, 1, 3, 4) for _ in widths)
    b = tuple(torch.randn(2, 1, width, 3) for width in widths)
    expected = y.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            parts = [b[i][slot, 0] @ (a[i][slot, 0] @ x[row]) for i in range(2)]
            expected[row] += 0.5 * torch.cat(parts)
    wrapper = SimpleNamespace(token_lora_indices=torch.tensor(slots))
    _add_lora_linear(wrapper, y, x, a, b, 0.5, widths)
    torch.testing.assert_close(y, expected)


def card_arguments(model, dtype="bfloat16", **options):
    options = Engine(**{"max_num_seqs": 4} | options)
    return engine_arguments(str(model), dtype, 400, options, None, max_loras=1, on_cpu=False)


def test_arguments_on_a_card(tiny_model):
    arguments = card_arguments(tiny_model)
    assert arguments["max_num_batched_tokens"] == 4 * 400  # there cannot be more
    graphs = {"cudagraph_specialize_lora": False, "cudagraph_capture_sizes": [1, 2, 4]}
    assert arguments["compilation_config"] == graphs
    assert card_arguments(tiny_model, max_num_seqs=16)["max_num_batched_tokens"] == BATCHED_TOKENS
    with pytest.raises(InputError, match="rollout.vllm.max_model_len: the run sets it itself"):
        card_arguments(tiny_model, vllm={"kv_cache_dtype": "fp8", "max_model_len": 9})


@pytest.mark.parametrize(("longest", "tokens"), [(400, 4096), (5000, 5000)])
def test_on_a_cpu_the_longest_prompt_fits_into_a_batch(tiny_model, longest, tokens):
    """Prefill is not chunked there."""
    options = {"max_loras": 1, "on_cpu": True}
    arguments = engine_arguments(str(tiny_model), "float32", longest, Engine(), None, **options)
    assert arguments["max_num_batched_tokens"] == tokens


def test_4_bit_layers_are_not_compiled_before_ampere(tiny_model):
    """These cards have no bfloat16."""
    in_4_bits = {"quantization": "bitsandbytes", "vllm": {"compilation_config": {"mode": 0}}}
    assert card_arguments(tiny_model, "float16", **in_4_bits)["enforce_eager"]
    assert "enforce_eager" not in card_arguments(tiny_model, "float16")
    given = card_arguments(tiny_model, "bfloat16", **in_4_bits)
    assert "enforce_eager" not in given
    assert given["compilation_config"].pop("cudagraph_capture_sizes") == [1, 2, 4]
    assert given["compilation_config"] == {"cudagraph_specialize_lora": False, "mode": 0}


@pytest.mark.parametrize("name", ["cudagraph_capture_sizes", "max_cudagraph_capture_size"])
def test_graph_sizes_of_the_users_own_exclude_ours(tiny_model, name):
    """vLLM refuses both."""
    for given in ({name: 8}, {"compilation_config": {name: 8}}):
        arguments = card_arguments(tiny_model, vllm=given)
        assert arguments["compilation_config"].get("cudagraph_capture_sizes", 8) == 8


def test_graphs_are_few_and_reach_the_largest_batch():
    assert graph_sizes(128) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert graph_sizes(56) == [1, 2, 4, 8, 16, 24, 32, 48, 56]
    assert graph_sizes(2000)[-3:] == [256, 384, 512]


def test_on_a_card_logits_are_in_fp32_unless_the_head_is_quantised(tiny_model, tmp_path):
    head, rope = {"head_dtype": "float32"}, {"rope_scaling": {"factor": 2.0}}
    for leaves_it in (None, "bitsandbytes", "fp8"):
        arguments = card_arguments(tiny_model, quantization=leaves_it, vllm={"hf_overrides": rope})
        assert arguments["hf_overrides"] == head | rope
    config = json.loads((tiny_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert card_arguments(tmp_path)["hf_overrides"] == {}
