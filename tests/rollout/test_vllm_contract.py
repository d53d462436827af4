"""What this package relies on in vLLM's CUDA Python, which the CPU build carries, too: read, not
run. If one of these fails with a new vLLM, find out what took its place before a card does."""

import ast
import dataclasses
import importlib
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from stapo_lite.config import Engine, Lora
from stapo_lite.rollout.vllm_options import engine_arguments

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
ROOT = Path(find_spec("vllm").submodule_search_locations[0])


def source(path):
    return (ROOT / path).read_text(encoding="utf-8")


def function(path, name):
    """The syntax tree of a function or method."""
    for node in ast.walk(ast.parse(source(path))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{path} has no {name}")


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("sleep", {"level"}),
        ("wake_up", {"tags"}),
        ("release_kv_cache_memory", set()),
        ("apply_model", {"func"}),
        ("collective_rpc", {"method"}),
    ],
)
def test_calls_of_the_engine(method, parameters):
    assert parameters <= inspect.signature(getattr(vllm.LLM, method)).parameters.keys()


def test_arguments_on_a_card_are_engine_arguments(tiny_model):
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    given = engine_arguments(
        str(tiny_model), "bfloat16", 64, Engine(), Lora(r=8), max_loras=1, on_cpu=False
    )
    assert given.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    known = {field.name for field in dataclasses.fields(CompilationConfig)}
    assert given["compilation_config"].keys() <= known


def test_the_kv_cache_alone_can_be_given_back():
    """Weights and cache lie in pools of their own; the second is discarded."""
    worker = source("v1/worker/gpu_worker.py")
    for tag in ("weights", "kv_cache"):
        assert f'_maybe_get_memory_pool_context(tag="{tag}")' in worker
    release = ast.unparse(function("v1/engine/core.py", "release_kv_cache_memory"))
    assert "discard(('kv_cache',))" in release
    wake = ast.unparse(function("v1/engine/core.py", "wake_up"))
    assert "'scheduling' in tags" in wake
    assert "resume_scheduler" in wake


def test_level_2_reads_the_weights_again():
    assert function("v1/worker/gpu_worker.py", "reload_weights")


@pytest.mark.parametrize(
    ("path", "measures"),
    [
        ("v1/worker/gpu_model_runner.py", "get_memory_info"),
        ("v1/worker/gpu/model_runner.py", "return _profile_cudagraph_memory(self)"),
    ],
)
def test_the_memory_of_graphs_is_measured(path, measures):
    """Up to 0.28 the second runner returned 0, and vLLM gave the memory to the KV cache."""
    assert measures in ast.unparse(function(path, "profile_cudagraph_memory"))


def test_an_engine_needs_the_memory_of_the_one_before():
    """So that a trainer must let go of the weights before its engine is closed."""
    pool = ast.unparse(function("v1/worker/gpu_worker.py", "_maybe_get_memory_pool_context"))
    assert "allocator.get_current_usage() == 0" in pool


def test_graphs_without_an_adapter_can_be_left_out():
    cases = ast.unparse(function("v1/cudagraph_dispatcher.py", "_get_lora_cases"))
    assert "cudagraph_specialize_lora" in cases
    sizes = ast.unparse(function("config/vllm.py", "_set_cudagraph_sizes"))
    assert "max_num_seqs * decode_query_len * 2" in sizes  # as `count_graphs` has it


def test_the_tables_of_adapter_slots_that_an_engine_leaves_behind():
    tables = source("lora/ops/triton_ops/utils.py")
    assert "_LORA_A_PTR_DICT: dict" in tables
    assert "_LORA_B_PTR_DICT: dict" in tables


def test_an_fp32_head_needs_no_copy_of_the_weight():
    """So that the head's weight is the trainer's, too; an unquantised head in an fp8 model may have
    it."""
    head = ast.unparse(function("model_executor/layers/logits_processor.py", "_apply_head"))
    assert "torch.mm(flat, lm_head.weight.t(), out_dtype=self.head_dtype)" in head
    assert "UnquantizedEmbeddingMethod" in head


def test_layouts_that_the_trainer_reads():
    linear = source("model_executor/layers/linear.py")
    assert "self.output_sizes = output_sizes" in linear
    assert "self.org_vocab_size" in source("model_executor/layers/vocab_parallel_embedding.py")
    online = source("model_executor/layers/quantization/online/fp8.py")
    assert 'replace_parameter(layer, "weight", qweight.t())' in online
    assert 'replace_parameter(layer, "weight_scale", weight_scale)' in online
    if find_spec("vllm_bnb_plugin") is not None:
        loader = inspect.getsource(importlib.import_module("vllm_bnb_plugin.bitsandbytes_loader"))
        assert "bnb_quant_state" in loader
        assert "bnb_shard_offsets" in loader


def test_transformers_modules_that_vllm_serves_ask_for_its_config():
    """`beside_vllm` gives them one."""
    decorated = source("compilation/decorators.py")
    assert "vllm_config = get_current_vllm_config()" in decorated
    assert "self.compilation_config.mode" in decorated
    condition = ast.unparse(
        function("model_executor/models/transformers/utils.py", "can_enable_torch_compile")
    )
    assert "vllm_config.model_config.hf_config" in condition
