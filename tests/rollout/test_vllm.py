"""vLLM in the trainer's process: its options, how it starts, fails and ends."""

import json
import shutil
import weakref
from contextlib import closing, nullcontext
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock, call

import pytest
import torch
from helpers import (
    MINIMAL,
    PROMPTS,
    adapted_policy,
    gap,
    generate,
    make_vllm,
    randomise_adapter,
)

from stapo_lite.config import Engine, load_config
from stapo_lite.errors import InputError, RunError
from stapo_lite.rollout import check_options, resolve_engine, rollout_settings
from stapo_lite.rollout import vllm_engine as vllm_engine_module
from stapo_lite.rollout.vllm_options import (
    BATCHED_TOKENS,
    batched_tokens,
    check_vllm,
    engine_arguments,
    fp32_head,
)


def test_no_adapter_slot_outlives_its_engine():
    """vLLM's tables of slots, filled by its own functions; both are private."""
    kernels = pytest.importorskip("vllm.lora.ops.triton_ops.utils", reason="vLLM is not installed")
    slots = [torch.zeros(1, 4, 8), torch.zeros(1, 8, 4)]
    kernels._get_lora_a_ptr(slots[:1], slots[0].device)
    kernels._get_lora_b_ptr(slots[1:], 0, slots[1].device)
    left = [weakref.ref(slot) for slot in slots]
    del slots
    assert all(slot() is not None for slot in left)
    engine = object.__new__(vllm_engine_module.VLLMEngine)
    engine._llm, engine._asleep, engine._folder = None, False, Mock()
    engine.close()
    assert all(slot() is None for slot in left)


@pytest.mark.parametrize("joined", [True, False])
def test_the_process_group_of_all_is_kept_where_it_is_not_vllms(monkeypatch, joined):
    """In test_parallel.py two processes train, export and evaluate with it."""
    ended = []
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda group=None: ended.append(group)
    )
    with vllm_engine_module.kept_process_group(joined):
        for group in ("vLLM's own", None):
            torch.distributed.destroy_process_group(group)
    torch.distributed.destroy_process_group("later")
    assert ended == ["vLLM's own", *([] if joined else [None]), "later"]


def test_a_model_that_vllm_cannot_serve_is_one_line(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="rollout: vLLM cannot serve .*model \\(") as error:
        make_vllm(tmp_path / "model", "float32")
    assert "\n" not in str(error.value)


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
    """vLLM's bitsandbytes weights are those of an nf4 trainer: they agree as bfloat16 does with
    bfloat16."""
    try:
        check_vllm(Engine(quantization="bitsandbytes"), "bfloat16")
    except InputError as error:
        pytest.skip(str(error))
    policy = adapted_policy(smollm2, "bfloat16", quantization="nf4", scale=0.05)
    with closing(make_vllm(smollm2, "bfloat16", "bitsandbytes")) as engine:
        engine.publish(policy, 1)
        groups = generate(engine, PROMPTS)
    same = gap(policy, groups).mean()
    assert same < 0.1
    assert gap(adapted_policy(smollm2, "bfloat16", scale=0.05), groups).mean() > 3 * same
    randomise_adapter(policy, seed=1, scale=0.0)
    assert gap(policy, groups).mean() > 3 * same


def test_auto_is_vllm_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_engine("auto") == "transformers"
    with pytest.raises(InputError, match="rollout.engine=vllm: vLLM is not installed"):
        resolve_engine("vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("stapo_lite.rollout.vllm_options.version", lambda name: "0.32.0+cpu")
    assert [resolve_engine(name) for name in ("auto", "vllm", "transformers")] == [
        "vllm",
        "vllm",
        "transformers",
    ]
    monkeypatch.setattr(
        "stapo_lite.rollout.vllm_options.version", Mock(side_effect=PackageNotFoundError)
    )
    assert resolve_engine("auto") == "vllm"  # the CPU build on PyPI has another name
    monkeypatch.setattr("stapo_lite.rollout.vllm_options.version", lambda name: "0.32.0")
    for usable, engine in ((True, "vllm"), (False, "transformers")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert resolve_engine("auto") == engine


def test_rollouts_have_the_configs_temperature():
    assert (
        rollout_settings(load_config(MINIMAL, ["rollout.temperature=0.6"]), ()).temperature == 0.6
    )


@pytest.mark.parametrize(
    ("vllm", "plugin", "quantization", "dtype", "problem"),
    [
        ("0.30.2", False, "bitsandbytes", "float16", None),  # in its core, but see the next test
        ("0.31.0", False, "bitsandbytes", "bfloat16", r"vllm-bnb-plugin==0\.0\.3$"),
        ("0.32.0", True, "bitsandbytes", "bfloat16", None),
        ("0.32.0", True, "bitsandbytes", "float32", "dtype=float32: .* set dtype=bfloat16"),
        ("0.32.0", False, "fp8", "float32", None),
    ],
)
def test_4_bit_rollouts_need_a_plugin_and_16_bits(
    monkeypatch, vllm, plugin, quantization, dtype, problem
):
    options = "stapo_lite.rollout.vllm_options"
    monkeypatch.setattr(f"{options}.version", lambda name: vllm)
    monkeypatch.setattr(f"{options}.find_spec", lambda name: object() if plugin else None)
    with pytest.raises(InputError, match=problem) if problem else nullcontext():
        check_vllm(Engine(quantization=quantization), dtype)


@pytest.mark.parametrize(("vllm", "warned"), [("0.30.2", True), ("0.31.0", False)])
def test_a_vllm_that_is_too_old_costs_a_warning(monkeypatch, caplog, vllm, warned):
    monkeypatch.setattr("stapo_lite.rollout.vllm_options.version", lambda name: vllm)
    check_vllm(Engine(), "float32")
    assert ("vLLM 0.30.2 is not supported: pip install 'vllm>=0.31,<0.33'" in caplog.text) == warned


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kv_cache_dtype": "fp8", "speculative_config": {"method": "ngram"}}, None),
        (
            {"kv_cach_dtype": "fp8"},
            r"vllm.kv_cach_dtype: not an engine argument of vLLM .*; did you mean 'kv_cache_dt",
        ),
        (
            {"zzz": 1},
            r"rollout.vllm.zzz: not an engine argument of vLLM .*; see vLLM's documentation",
        ),
        ({"logprobs_mode": "raw_logprobs"}, "rollout.vllm.logprobs_mode: the run sets it itself"),
        (
            {"kv_cache_dtype": "fp8", "max_model_len": 9},
            "rollout.vllm.max_model_len: the run sets it itself",
        ),
    ],
)
def test_arguments_that_vllm_gets(given, problem):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    config = load_config(MINIMAL | {"rollout": {"vllm": given}})
    with pytest.raises(InputError, match=problem) if problem else nullcontext():
        check_options("vllm", config)


@pytest.fixture
def start(monkeypatch):
    """How vLLM is started: as on a GPU, one that only notes what it is asked for."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm, "LLM", start := Mock())
    return start


def test_a_vllm_that_dies_ends_the_run_in_one_line(start, tiny_model):
    start.return_value.llm_engine.step.side_effect = RuntimeError("the device\nfell off the bus")
    failure = r"vLLM failed while it sampled \(RuntimeError: the device fell off the bus\): go on with the same command"  # noqa: E501
    with (
        closing(make_vllm(tiny_model, "float32")) as engine,
        pytest.raises(RunError, match=failure),
    ):
        generate(engine, PROMPTS)


def test_a_card_that_is_full_when_vllm_wakes_is_one_line(start, tiny_model):
    llm, full = (
        start.return_value,
        RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"),
    )
    llm.wake_up.side_effect = [None, full, full]
    engine = make_vllm(tiny_model, "bfloat16")
    options = start.call_args.kwargs
    assert batched_tokens(Engine(max_num_seqs=4), 400) == 4 * 400  # there cannot be more
    assert options["hf_overrides"] == {"head_dtype": "float32"}  # logits as the trainer's
    assert options["compilation_config"] == {"cudagraph_specialize_lora": False}
    many = engine_arguments(
        str(tiny_model), "bfloat16", 1024, Engine(max_num_seqs=16), None, max_loras=1, on_cpu=False
    )
    assert many["max_num_batched_tokens"] == BATCHED_TOKENS  # what the planner counts on
    rope = {"rope_scaling": {"factor": 2.0}}
    lengthened = Engine(engine="vllm", vllm={"hf_overrides": rope})
    both = engine_arguments(
        str(tiny_model), "bfloat16", 64, lengthened, None, max_loras=1, on_cpu=False
    )
    assert both["hf_overrides"] == {"head_dtype": "float32"} | rope
    engine.sleep()
    engine.wake()
    engine.sleep()
    with pytest.raises(
        RunError, match=r"lower rollout.gpu_memory_utilization, or set train.park_trainer=true"
    ):
        engine.wake()
    engine.close()  # wakes it first: else the next engine of the process does not get its memory
    slept, shut_down = call.sleep(level=1), call.llm_engine.engine_core.shutdown()
    assert llm.mock_calls == [
        slept,
        call.wake_up(),
        slept,
        call.wake_up(),
        call.wake_up(),
        shut_down,
    ]


def test_4_bit_layers_are_not_compiled_before_ampere(tiny_model):
    def arguments(quantization, dtype="float16", **given):
        options = Engine(quantization=quantization, vllm=given)
        return engine_arguments(
            str(tiny_model), dtype, 64, options, None, max_loras=1, on_cpu=False
        )

    assert arguments("bitsandbytes")["enforce_eager"]  # a card before Ampere has no bfloat16
    assert "enforce_eager" not in arguments(None)
    given = arguments("bitsandbytes", "bfloat16", compilation_config={"mode": 0})
    assert "enforce_eager" not in given
    both = {"cudagraph_specialize_lora": False, "mode": 0}
    assert given["compilation_config"] == both
    assert arguments(None, compilation_config=0)["compilation_config"] == both


def test_a_quantised_head_keeps_its_type(tiny_model, tmp_path):
    for leaves_it in ("bitsandbytes", "fp8"):
        fp32 = {"head_dtype": "float32"}
        assert fp32_head(str(tiny_model), Engine(quantization=leaves_it)) == fp32
    config = json.loads((tiny_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert fp32_head(str(tmp_path), Engine()) == {}
