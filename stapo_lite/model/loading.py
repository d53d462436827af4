"""A model from a folder or the Hub: checked before its weights are loaded, then loaded, with an adapter."""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from stapo_lite.config import Lora
from stapo_lite.errors import InputError, explained
from stapo_lite.files import read_object

# bitsandbytes warns at every start where it cannot fetch a kernel from the Hub, and takes its own.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
PLAIN_LORA: dict[str, tuple | None] = {
    "peft_type": ("LORA",),
    "bias": ("none",),  # another one trains biases of the base, which are not published
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base when they are loaded
    # These decide the adapter's shape, and PEFT and vLLM apply them alike.
    "r": None, "lora_alpha": None, "use_rslora": None, "target_modules": None, "exclude_modules": None,
    "layers_to_transform": None, "layers_pattern": None,
    # These change nothing in a model that only computes, or only together with a key that is refused.
    "base_model_name_or_path": None, "revision": None, "task_type": None, "peft_version": None, "auto_mapping": None,
    "inference_mode": None, "lora_dropout": None, "megatron_core": None, "qalora_group_size": None,
    "runtime_config": None,
}  # fmt: skip
"""Keys of PEFT's LoRA config that a plain adapter may set, each with the values that it may have; None for any. Every
other key must be off: None, False or empty."""
NO_MODEL = "model={}: not a causal language model in a folder or on the Hub"


def load_tokenizer(
    model: str, longest_sequence: int, target_modules: Sequence[str]
) -> tuple[Any, int | list[int] | None]:
    """The tokenizer and the model's end-of-text tokens, after checking the model before its weights are loaded.

    Raises:
        InputError: there is no such causal language model or tokenizer; its head does more than one
            linear layer; its context is shorter than `longest_sequence` tokens; one of the `target_modules` is
            none of its decoder's linear layers.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = load_model_config(model)
    with explained(NO_MODEL.format(model)), torch.device("meta"):  # shapes only
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        linears = linear_layers(AutoModelForCausalLM.from_config(config))
    # Where the files are missing, transformers makes an empty one.
    if not tokenizer("1 + 1 = 2", add_special_tokens=False).input_ids:
        raise InputError(f"model={model}: has no tokenizer")
    text_config = config.get_text_config()  # that of the decoder, where the model reads images as well
    for key in (
        "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier",
        "logits_soft_cap", "output_logit_soft_cap",
    ):  # fmt: skip
        if getattr(text_config, key, None) not in (None, 1, 1.0):
            raise InputError(f"model={model}: its logits are transformed after the head ({key}): choose another model")
    context = getattr(text_config, "max_position_embeddings", longest_sequence)
    if longest_sequence > context:
        raise InputError(
            f"model={model} holds {context} tokens, but data.max_prompt_length + rollout.max_completion_length = "
            f"{longest_sequence}: shorten one"
        )
    check_target_modules(target_modules, linears)
    try:
        model_eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        model_eos = text_config.eos_token_id
    return tokenizer, model_eos


def linear_layers(model: Any) -> dict[str, list[nn.Linear]]:
    """The decoder's linear layers by the last part of their names: those that may get an adapter."""
    linears: dict[str, list[nn.Linear]] = {}
    for path, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            linears.setdefault(path.rpartition(".")[2], []).append(module)
    return linears


def outside_decoder(base: Any, names: Collection[str]) -> str | None:
    """A pattern of the paths of all layers outside the decoder, such as a vision tower's, for PEFT's `exclude_modules`;
    None if no such layer has one of the names."""
    decoder = next(path for path, module in base.named_modules() if module is base.get_decoder())
    paths = [path for path, module in base.named_modules() if isinstance(module, nn.Linear)]
    if all(path.startswith(f"{decoder}.") for path in paths if path.rpartition(".")[2] in names):
        return None
    return rf"(?!{re.escape(decoder)}\.).*"


def check_target_modules(target_modules: Sequence[str], linears: Collection[str]) -> Collection[str]:
    """The names of the layers that get an adapter.

    Raises:
        InputError: the model has no such linear layer.
    """
    if target_modules == ["all-linear"]:
        return linears
    if missing := set(target_modules) - set(linears):
        raise InputError(
            f"lora.target_modules: the model has no linear layer {', '.join(sorted(missing))}: choose from "
            f"{', '.join(linears)}"
        )
    return target_modules


def load_model_config(model: str) -> Any:
    """The transformers config of a model.

    Raises:
        InputError: there is none.
    """
    from transformers import AutoConfig

    with explained(NO_MODEL.format(model)):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


def load_weights(
    model: str, dtype: str, device: torch.device | str = "cpu", quantization: Literal["nf4"] | None = None
) -> Any:
    """Load a causal language model in `dtype`, or in 4 bits with double quantisation (QLoRA, bitsandbytes).

    Raises:
        InputError: it cannot be loaded, does not fit on the device, or lacks weights.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

    in_4_bits = None
    if quantization == "nf4":
        in_4_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
    device = torch.device(device)
    before_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    too_large = explained(f"model={model} does not fit on {device}", torch.OutOfMemoryError, fix="; see `stapo plan`")
    with explained(NO_MODEL.format(model)), too_large, default_stream(device):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype,
            attn_implementation=use_repeated_keys() if before_ampere else None,
            quantization_config=in_4_bits,
            device_map={"": device},
            trust_remote_code=False,
            output_loading_info=True,
        )
    base, loading = loaded
    if loading["missing_keys"]:
        raise InputError(f"model={model}: its weights lack {min(loading['missing_keys'])}")
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes would repack weights when `generate` runs,
            module.support_avx512bf16_for_cpu = False  # and what is packed so has no backward pass
    # generate() falls back on these for what a call leaves open: top-p and top-k of a model's defaults would bias the
    # sampled log-probabilities. What stands in the padding is never read.
    base.generation_config = GenerationConfig(pad_token_id=0)
    return base


@contextmanager
def default_stream(device: torch.device) -> Iterator[None]:
    """Have torch work in the card's default stream. bitsandbytes quantises there whatever torch's is, and vLLM leaves a
    process in another, so that a base loaded after a vLLM was closed would be quantised from unfinished values."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        yield
    torch.cuda.synchronize(device)


def use_repeated_keys() -> str:
    """Register SDPA whose keys and values are repeated for grouped queries, and return its name.

    transformers leaves the repetition to torch, whose fast kernels for cards before Ampere (T4, RTX 20) do not know it:
    attention would be written out, [rows, heads, length, length].
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("repeated_keys", _attend_with_repeated_keys)
    AttentionMaskInterface.register("repeated_keys", sdpa_mask)
    return "repeated_keys"


def _attend_with_repeated_keys(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    causal = attention_mask is None and query.shape[2] > 1
    attended = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=attention_mask, is_causal=causal, scale=scaling
    )
    return attended.transpose(1, 2).contiguous(), None


def read_adapter(folder: Path) -> dict[str, Any]:
    """PEFT's config of an adapter.

    Raises:
        InputError: there is no adapter, or not one that both engines apply as it was trained.
    """
    with explained(f"adapter={folder}: no adapter in PEFT's format", InputError):
        adapter = read_object(folder / "adapter_config.json")
    for key, value in ({"peft_type": None} | adapter).items():
        allowed = PLAIN_LORA.get(key, (None, False, "", [], {}))
        if allowed is not None and value not in allowed:
            raise InputError(f"adapter={folder}: not a plain LoRA adapter ({key}={value!r:.60})")
    modules = adapter.get("target_modules")
    if not isinstance(modules, list) or any("." in name for name in modules):
        raise InputError(f"adapter={folder}: its target_modules must be a list of layer names, got {modules}")
    if not isinstance(adapter.get("r"), int) or not 1 <= adapter["r"] <= 512:
        raise InputError(f"adapter={folder}: its rank must be at most 512, got {adapter.get('r')!r}")
    if (weights := folder / "adapter_model.safetensors").exists():
        with explained(f"{weights}: cannot be read", OSError, SafetensorError), safe_open(weights, "pt") as file:
            other = [name for name in file.keys() if ".lora_A." not in name and ".lora_B." not in name]  # noqa: SIM118
        if other:  # such as a resized embedding, which PEFT would put into the base
            raise InputError(f"adapter={folder}: not a plain LoRA adapter (it holds {other[0]})")
    return adapter


def adapter_digest(folder: Path) -> str:
    """A digest of an adapter's files.

    Raises:
        InputError: one cannot be read.
    """
    with explained(f"adapter={folder}: cannot be read", OSError):
        contents = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    return hashlib.sha256(b"".join(contents)).hexdigest()


def model_digest(model: str) -> str | None:
    """A digest of a model's folder: names and sizes of config and weights, and some of what is in each file, which may
    be large. None if there is no such folder, as for a name on the Hub."""
    digest = hashlib.sha256()
    for path in sorted(Path(model).glob("*")):
        if path.suffix not in (".safetensors", ".bin") and path.name != "config.json":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(1, size // 64)):
                file.seek(place)
                digest.update(file.read(4096))
    return digest.hexdigest() if Path(model).is_dir() else None


def load_adapter(model: Any, folder: Path) -> None:
    """Give a PeftModel the values of a saved adapter of the same shape.

    Raises:
        InputError: it has values for other layers or of another shape, or none for some.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    with explained(f"{folder}: the adapter does not fit the model", RuntimeError):
        result: Any = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    wrong = [*result.unexpected_keys, *(name for name in result.missing_keys if "lora_" in name)]
    if wrong:
        raise InputError(f"{folder}: the adapter does not fit the model, {wrong[0]} is on one side only")


def find_start(lora: Lora) -> Path | None:
    """The folder of the adapter to start from, fetched from the Hub where there is no such folder; None without one.

    Raises:
        InputError: there is none, or the config asks for another rank, scale or other layers than it has.
    """
    if lora.adapter is None:
        return None
    folder = Path(lora.adapter)
    if not folder.exists():
        from huggingface_hub import snapshot_download

        with explained(f"lora.adapter={folder}: neither a folder nor on the Hub"):
            folder = Path(snapshot_download(lora.adapter, allow_patterns="adapter_*"))
    adapter = read_adapter(folder)
    differing = []
    for key in ("r", "lora_alpha", "use_rslora", "target_modules"):
        has, wanted = adapter.get(key, Lora.model_fields[key].default), getattr(lora, key)
        if wanted != ["all-linear"] and (sorted(has) != sorted(wanted) if isinstance(has, list) else has != wanted):
            differing.append(f"lora.{key}={json.dumps(has)}")
    if not (folder / "adapter_model.safetensors").exists():
        raise InputError(f"lora.adapter={lora.adapter}: it has no adapter_model.safetensors")
    if differing:
        raise InputError(f"lora.adapter={lora.adapter} is another kind of adapter: set {' '.join(differing)}")
    return folder


def add_adapter(base: Any, lora: Lora, gradient_checkpointing: bool | int) -> Any:
    """Freeze the base and give it a LoRA adapter (PEFT, in fp32), whose first output is zero; ready to train.

    Of PEFT's `prepare_model_for_kbit_training` a frozen base and non-reentrant checkpointing remain: fp32 copies of
    what is not quantised would cost 2.5 GB in an 8B model and agree less with the engine.
    """
    from peft import LoraConfig, get_peft_model

    base.requires_grad_(False)
    switch_off_dropout(base)
    if gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        if gradient_checkpointing is not True:  # the last layers keep theirs, and free them before others recompute
            for layer in base.get_decoder().layers[gradient_checkpointing:]:
                layer.gradient_checkpointing = False
    targets = list(check_target_modules(lora.target_modules, linear_layers(base)))
    model = get_peft_model(
        base,
        LoraConfig(
            r=lora.r,
            lora_alpha=lora.lora_alpha,
            use_rslora=lora.use_rslora,
            target_modules=targets,
            exclude_modules=outside_decoder(base, targets),
            task_type="CAUSAL_LM",
        ),
    )
    if base.dtype != torch.float32:  # autocast casts; PEFT would make an fp32 copy of every input
        module: Any
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    # Training mode would switch on more than dropout, such as the random routing of PhiMoE. A layer checkpoints only in
    # training mode, which its own modules need not share.
    model.eval()
    for module in base.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
    return model


def switch_off_dropout(base: Any) -> None:
    """Set every rate of dropout to 0, also those that modules keep as numbers: it would put noise into masks and
    log-probabilities, and the engine has none."""
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
