"""A model from a folder or the Hub: checked before its weights are loaded, then adapted."""

import logging
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stapo_lite.config import Lora
from stapo_lite.errors import InputError, explained

# bitsandbytes warns at every start if it cannot fetch a kernel from the Hub, and then uses its own.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
NO_MODEL = "model={}: not a causal language model in a folder or on the Hub"
TRANSFORMED_LOGITS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "logits_mup_width_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
"""Keys of a model's config that change its logits after the head, unless they are None or 1."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""PEFT's `init_lora_weights` that leave the base as it is."""


def load_tokenizer(model: str, target_modules: Sequence[str]) -> tuple[Any, int | list[int] | None]:
    """Load a model's tokenizer, and check the model before its weights are loaded.

    Returns:
        The tokenizer, and the ids of the model's end-of-text tokens.

    Raises:
        InputError: there is no such causal language model or tokenizer; its head is more than one
            linear layer; one of the `target_modules` is not a linear layer of its decoder.
    """
    from transformers import AutoTokenizer, GenerationConfig

    config = load_model_config(model)
    with explained(NO_MODEL.format(model)):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        linears = linear_layers(without_weights(config))
    # transformers makes an empty tokenizer if the files are missing.
    if not tokenizer("1 + 1 = 2", add_special_tokens=False).input_ids:
        raise InputError(f"model={model}: has no tokenizer")
    for key in TRANSFORMED_LOGITS:
        if getattr(config.get_text_config(), key, None) not in (None, 1):
            raise InputError(f"model={model}: its logits are transformed after the head ({key})")
    check_target_modules(target_modules, linears)
    try:
        model_eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        model_eos = config.get_text_config().eos_token_id
    return tokenizer, model_eos


def load_model_config(model: str) -> Any:
    """The transformers config of a model.

    Raises:
        InputError: there is no such model.
    """
    from transformers import AutoConfig

    with explained(NO_MODEL.format(model)):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


def without_weights(config: Any) -> Any:
    """A causal language model on the meta device: shapes only.

    Args:
        config: the model's transformers config.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), beside_vllm(config):
        return AutoModelForCausalLM.from_config(config)


def linear_layers(model: Any) -> dict[str, list[nn.Linear]]:
    """The decoder's linear layers, which may get an adapter, by the last part of their names."""
    linears: dict[str, list[nn.Linear]] = {}
    for path, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            linears.setdefault(path.rpartition(".")[2], []).append(module)
    return linears


def check_target_modules(
    target_modules: Sequence[str], linears: Collection[str]
) -> Collection[str]:
    """The names of the layers that get an adapter.

    Raises:
        InputError: the model has no such linear layer.
    """
    if target_modules == ["all-linear"]:
        return linears
    if missing := set(target_modules) - set(linears):
        raise InputError(
            f"lora.target_modules: the model has no linear layer {', '.join(sorted(missing))}: "
            f"choose from {', '.join(linears)}"
        )
    return target_modules


def load_weights(
    model: str,
    dtype: str,
    device: torch.device | str = "cpu",
    quantization: Literal["nf4"] | None = None,
) -> Any:
    """Load a causal language model in `dtype`, or in 4 bits with double quantisation (QLoRA,
    bitsandbytes).

    Raises:
        InputError: it cannot be loaded, does not fit on the device, or lacks weights.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    in_4_bits = None
    if quantization == "nf4":
        in_4_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
    device = torch.device(device)
    too_large = explained(f"model={model} does not fit on {device}", torch.OutOfMemoryError)
    config = load_model_config(model)
    with explained(NO_MODEL.format(model)), too_large, default_stream(device), beside_vllm(config):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            dtype="auto" if in_4_bits else dtype,  # like vLLM, round to 4 bits first
            attn_implementation=attention_for(device),
            quantization_config=in_4_bits,
            device_map={"": device},
            trust_remote_code=False,
            output_loading_info=True,
        )
    base, loading = loaded
    if loading["missing_keys"]:
        raise InputError(f"model={model}: its weights lack {min(loading['missing_keys'])}")
    for parameter in base.parameters() if in_4_bits else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return ready(base)


def ready(base: Any) -> Any:
    """Override transformers' defaults for a model that has just been loaded; returns it."""
    for module in base.modules():
        # bitsandbytes would repack the weights in `generate`, and repacked ones have no backward.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    from transformers import GenerationConfig

    # `generate` takes from here what a call does not set: a model's default top-p and top-k would
    # bias the sampled log-probabilities. Padding is never read, so any token will do.
    base.generation_config = GenerationConfig(pad_token_id=0)
    return base


@contextmanager
def beside_vllm(config: Any) -> Iterator[None]:
    """Let transformers build a model while vLLM runs in this process, or did.

    vLLM serves some families (SmolLM3, OLMo 2 and 3) with transformers' own modules, and patches
    their decoder class: every decoder built afterwards asks for vLLM's config, to be compiled.

    Args:
        config: the model's transformers config.
    """
    vllm = sys.modules.get("vllm.config")
    if vllm is None:
        yield
        return
    uncompiled: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=0),  # CompilationMode.NONE
        model_config=SimpleNamespace(hf_config=config, max_model_len=0),
    )
    with vllm.set_current_vllm_config(uncompiled):
        yield


@contextmanager
def default_stream(device: torch.device) -> Iterator[None]:
    """Run torch on the card's default stream within the context.

    bitsandbytes quantises on that stream, whichever one torch uses, and vLLM leaves the process on
    another one when it closes: a base loaded then would be quantised from unfinished values.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        yield
    torch.cuda.synchronize(device)


def attention_for(device: torch.device) -> str | None:
    """The name of the attention for a device; None for transformers' own choice."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return use_repeated_keys()
    return None


def use_repeated_keys() -> str:
    """Register an SDPA that repeats keys and values for grouped queries; returns its name.

    transformers leaves the repetition to torch, but torch's fast kernels for cards before Ampere
    (T4, RTX 20) do not support it. Attention would fall back to a kernel that holds
    [rows, heads, length, length].
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("repeated_keys", _attend_with_repeated_keys)
    AttentionMaskInterface.register("repeated_keys", sdpa_mask)
    return "repeated_keys"


def _attend_with_repeated_keys(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = query.shape[1] // key.shape[1]
    keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
    no_module: Any = None  # a module would tell transformers to repeat them again
    return sdpa_attention_forward(no_module, query, keys, values, *mask, **options)


def read_adapter(folder: Path) -> Any:
    """PEFT's config of an adapter. Its `target_modules`, whole paths or a pattern, become the last
    parts of the names of the layers that it has.

    Raises:
        InputError: there is none, or it is not a plain LoRA adapter, which both engines apply as it
            was trained.
    """
    from peft import PeftConfig

    with explained(f"adapter={folder}: no adapter in PEFT's format"):
        adapter: Any = PeftConfig.from_pretrained(str(folder))
        names = list(load_file(folder / "adapter_model.safetensors"))
    plain = (
        adapter.peft_type == "LORA"
        and adapter.bias == "none"
        and adapter.init_lora_weights in PLAIN_STARTS
        and not (adapter.use_dora or adapter.modules_to_save)
        and not (adapter.rank_pattern or adapter.alpha_pattern)
        # PEFT would put any other tensor, such as a resized embedding, into the base.
        and all(".lora_" in name for name in names)
    )
    if not plain:
        raise InputError(f"adapter={folder}: not a plain LoRA adapter")
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in names}
    adapter.target_modules = sorted(layers)
    return adapter


def read_fitting_adapter(folder: Path, model: str) -> Any:
    """`read_adapter`, for a model without its weights. Engines would leave out tensors whose names
    they do not know.

    Raises:
        InputError: also if the adapter does not fit the model (`load_adapter`).
    """
    adapter = read_adapter(folder)
    load_adapter(add_adapter(without_weights(load_model_config(model)), adapter), folder)
    return adapter


def find_start(lora: Lora) -> Path | None:
    """The folder of the adapter to start from; None without `lora.adapter`."""
    return find_adapter(lora, lora.adapter, "lora.adapter") if lora.adapter else None


def find_adapter(lora: Lora, adapter: str, key: str) -> Path:
    """The folder of an adapter, downloaded from the Hub if there is no such folder.

    Args:
        key: of the config, for messages.

    Raises:
        InputError: there is no such adapter, or its rank, scale or layers are not the config's.
    """
    folder = Path(adapter)
    if not folder.exists():
        from huggingface_hub import snapshot_download

        with explained(f"{key}={folder}: neither a folder nor on the Hub"):
            folder = Path(snapshot_download(adapter, allow_patterns="adapter_*"))
    saved = read_adapter(folder)
    scale = ("r", "lora_alpha", "use_rslora")
    differing = [name for name in scale if getattr(saved, name) != getattr(lora, name)]
    if set(lora.target_modules) not in ({"all-linear"}, set(saved.target_modules)):
        differing.append("target_modules")
    if differing:
        raise InputError(f"{key}={adapter} has another lora.{', lora.'.join(differing)}")
    return folder


def load_adapter(model: Any, folder: Path) -> None:
    """Give a PeftModel the values of a saved adapter of the same shape.

    Raises:
        InputError: it has values for other layers or of another shape, or lacks some.
    """
    from peft import set_peft_model_state_dict

    weights = load_file(folder / "adapter_model.safetensors")
    weights = {name: values.to(model.device) for name, values in weights.items()}  # may be meta
    with explained(f"{folder}: the adapter does not fit the model", RuntimeError):
        result: Any = set_peft_model_state_dict(model, weights)
    wrong = [*result.unexpected_keys, *(name for name in result.missing_keys if "lora_" in name)]
    if wrong:
        raise InputError(
            f"{folder}: the adapter does not fit the model, {wrong[0]} is on one side only"
        )


def public_name(model: str) -> str:
    """The name on the Hub of a model or adapter, or its folder's name without the path."""
    on_hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model) and not Path(model).exists()
    return model if on_hub else Path(model).resolve().name


def add_adapter(base: Any, lora: Lora) -> Any:
    """Freeze the base and give it a LoRA adapter (PEFT, in fp32) that changes nothing yet; returns
    the PeftModel, ready to train.

    Unlike PEFT's `prepare_model_for_kbit_training`, it does not cast unquantised weights to fp32,
    which would take 2.5 GB in an 8B model and agree less with the engine.
    """
    from peft import LoraConfig, get_peft_model

    base.requires_grad_(False)
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
    model.peft_config["default"].base_model_name_or_path = public_name(base.name_or_path)
    module: Any
    if base.dtype != torch.float32:  # autocast casts; PEFT would make an fp32 copy of every input
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    # Training mode would switch on dropout, which the engine does not have, and more, such as the
    # random routing of PhiMoE.
    model.eval()
    return model


def checkpoint_layers(base: Any) -> None:
    """Let layers recompute their activations in the backward pass."""
    base.gradient_checkpointing_enable({"use_reentrant": False})
    # A layer checkpoints only in training mode: set it on these layers alone, not on their
    # submodules, and set their own dropout rates to 0.
    for module in base.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def outside_decoder(base: Any, names: Collection[str]) -> str | None:
    """A pattern for PEFT's `exclude_modules` that matches every path outside the decoder, such as a
    vision tower's. None if no layer there has one of the names."""
    decoder = next(path for path, module in base.named_modules() if module is base.get_decoder())
    for path, module in base.named_modules():
        named = isinstance(module, nn.Linear) and path.rpartition(".")[2] in names
        if named and not path.startswith(f"{decoder}."):
            return rf"(?!{re.escape(decoder)}\.).*"
    return None
