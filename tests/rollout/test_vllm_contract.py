"""What this package relies on in vLLM's CUDA Python, which the CPU build has, too: read, not run.
If one fails with a new vLLM, find out what took its place before a card does."""

import ast
import importlib
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
from random_model import qwen3

from stapo_lite.model.loading import beside_vllm

pytest.importorskip("vllm", reason="vLLM is not installed")
ROOT = Path(find_spec("vllm").submodule_search_locations[0])


def source(path, function=None):
    """A file, or one function or method of it, as Python's parser writes it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    return ast.unparse(functions[function] if function else tree)


WORKER, CORE = "v1/worker/gpu_worker.py", "v1/engine/core.py"
HEAD = "model_executor/layers/logits_processor.py"
COMPILE = "compilation/decorators.py"
UTILITIES = "model_executor/models/transformers/utils.py"
GDN = "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
QWEN3_5 = "model_executor/models/qwen3_5.py"
QWEN3_VL = "model_executor/models/qwen3_vl.py"


@pytest.mark.parametrize(
    ("path", "function", "text"),
    [
        # Weights and cache lie in pools of their own, and the cache alone can be given back.
        (WORKER, "load_model", "_maybe_get_memory_pool_context(tag='weights')"),
        (WORKER, None, "_maybe_get_memory_pool_context(tag='kv_cache')"),
        (CORE, "release_kv_cache_memory", "discard(('kv_cache',))"),
        (CORE, "wake_up", "'scheduling' in tags"),
        (CORE, "wake_up", "resume_scheduler"),
        # An engine needs the memory of the one before: a trainer must let go of the weights first.
        (WORKER, "_maybe_get_memory_pool_context", "allocator.get_current_usage() == 0"),
        # The memory of graphs is measured. Up to 0.28 the second runner returned 0.
        ("v1/worker/gpu_model_runner.py", "profile_cudagraph_memory", "get_memory_info"),
        ("v1/worker/gpu/model_runner.py", "profile_cudagraph_memory", "_cudagraph_memory(self)"),
        # Graphs without an adapter can be left out.
        ("v1/cudagraph_dispatcher.py", "_get_lora_cases", "cudagraph_specialize_lora"),
        # An fp32 head is not a copy: the trainer shares its weight.
        (HEAD, "_apply_head", "mm(flat, lm_head.weight.t(), out_dtype=self.head_dtype)"),
        (HEAD, "_apply_head", "UnquantizedEmbeddingMethod"),
        # Layouts that the trainer reads.
        ("model_executor/layers/linear.py", None, "self.output_sizes = output_sizes"),
        ("model_executor/layers/vocab_parallel_embedding.py", None, "self.org_vocab_size"),
        # Qwen3.5: four parts, of which transformers fuses three; the names that an adapter needs.
        (GDN, "create_qkvz_proj", "[key_dim, key_dim, value_dim, value_dim]"),
        (QWEN3_5, None, "'in_proj_qkvz': ['in_proj_qkv', 'in_proj_z']"),
        (QWEN3_VL, None, "'model.language_model.': 'language_model.model.'"),
        # transformers' modules that vLLM serves ask for its config; `beside_vllm` gives them one.
        (COMPILE, None, "vllm_config = get_current_vllm_config()"),
        (COMPILE, None, "self.compilation_config.mode"),
        (UTILITIES, "can_enable_torch_compile", "vllm_config.model_config.hf_config"),
    ],
)
def test_the_source_of_vllm_says_so(path, function, text):
    assert text in source(path, function)


def test_a_decoder_with_dynamic_rope_can_be_built_beside_vllm():
    """vLLM's patched decoders ask more of its config for those; 0.33 also for a length."""
    from vllm.config import CompilationMode, get_current_vllm_config
    from vllm.model_executor.models.transformers.utils import can_enable_torch_compile

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with beside_vllm(qwen3("0.6B", rope_parameters=rope)):
        can_enable_torch_compile(config := get_current_vllm_config())
    assert config.compilation_config.mode == CompilationMode.NONE


def test_the_bitsandbytes_plugin_keeps_shards_and_states_at_its_parameters():
    plugin = pytest.importorskip("vllm_bnb_plugin", reason="the plugin is not installed")
    loader = importlib.import_module(f"{plugin.__name__}.bitsandbytes_loader")
    for name in ("bnb_quant_state", "bnb_shard_offsets"):
        assert name in inspect.getsource(loader)
