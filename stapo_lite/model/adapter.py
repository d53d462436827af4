"""A LoRA adapter in PEFT's format: find it, read it, add one to a base, load its values."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from stapo_lite.config import Lora
from stapo_lite.errors import InputError, explained
from stapo_lite.model.loading import (
    NO_MODEL,
    decoder_path,
    load_model_config,
    without_weights,
)

PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""PEFT's `init_lora_weights` that leave the base as it is."""


def find_start(lora: Lora) -> Path | None:
    """Find the adapter that training starts from; None without `lora.adapter`."""
    if lora.adapter is None:
        return None
    return find_adapter(lora, lora.adapter, "lora.adapter")


def find_adapter(lora: Lora, adapter: str, key: str) -> Path:
    """Find the folder of an adapter. What is no folder is downloaded from the Hub.

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
    differences = [name for name in scale if getattr(saved, name) != getattr(lora, name)]
    if set(lora.target_modules) not in ({"all-linear"}, set(saved.target_modules)):
        differences.append("target_modules")
    if differences:
        raise InputError(f"{key}={adapter} has another lora.{', lora.'.join(differences)}")
    return folder


def read_adapter(folder: Path) -> Any:
    """Read PEFT's config of an adapter.

    Returns:
        The config. Its `target_modules` are the last parts of the names of the adapted layers;
        in the file they may also be whole paths, or a pattern.

    Raises:
        InputError: there is no adapter, or it is not a plain LoRA adapter. Only a plain one is
            applied by both engines as it was trained.
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
    adapter.target_modules = sorted({kind_of(name) for name in names})
    return adapter


def kind_of(name: str) -> str:
    """The kind of layer that a parameter adapts:
    `base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight` -> `up_proj`."""
    return name.partition(".lora_")[0].rpartition(".")[2]


def read_fitting_adapter(folder: Path, model: str) -> Any:
    """Read PEFT's config of an adapter, and check that the adapter fits a model. No weights of the
    model are loaded. (An engine would silently leave out tensors whose names it does not know.)

    Raises:
        InputError: as `read_adapter` and `load_adapter`.
    """
    adapter = read_adapter(folder)
    load_adapter(add_adapter(without_weights(load_model_config(model)), adapter), folder)
    return adapter


def add_adapter(base: Any, lora: Lora) -> Any:
    """Freeze a base and give it a LoRA adapter, in fp32, that changes nothing yet.

    PEFT's `prepare_model_for_kbit_training` would also cast unquantised weights to fp32. That would
    take 2.5 GB in an 8B model, and agree less with the engine.

    Returns:
        The PeftModel, ready to train.
    """
    from peft import LoraConfig, get_peft_model

    base.requires_grad_(False)
    names = list(target_layers(base, lora.target_modules))
    decoder = decoder_path(base)
    outside_decoder = None
    if "." in decoder:  # towers may have layers of the same names, where others load the adapter
        outside_decoder = rf"(?!{re.escape(decoder)}\.).*"
    model = get_peft_model(
        base,
        LoraConfig(
            r=lora.r,
            lora_alpha=lora.lora_alpha,
            use_rslora=lora.use_rslora,
            target_modules=names,
            exclude_modules=outside_decoder,
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


def load_adapter(model: Any, folder: Path) -> None:
    """Give a PeftModel the values of a saved adapter of the same shape.

    Raises:
        InputError: the adapter has values for other layers or of another shape, or lacks some.
    """
    from peft import set_peft_model_state_dict

    saved = load_file(folder / "adapter_model.safetensors")
    weights = {name: values.to(model.device) for name, values in saved.items()}  # may be meta
    with explained(f"{folder}: the adapter does not fit the model", RuntimeError):
        result: Any = set_peft_model_state_dict(model, weights)
    lacking = [name for name in result.missing_keys if "lora_" in name]
    if misfits := result.unexpected_keys + lacking:
        raise InputError(
            f"{folder}: the adapter does not fit the model, {misfits[0]} is on one side only"
        )


def name_layers(lora: Lora, model: str) -> Lora:
    """The settings with the names of the layers in place of `all-linear`, by which vLLM would also
    adapt the embedding, the head and convolutions.

    Raises:
        InputError: there is no such model, or the decoder has no linear layer of one of the names.
    """
    with explained(NO_MODEL.format(model)):
        empty = without_weights(load_model_config(model))
    names = list(target_layers(empty, lora.target_modules))
    return lora.model_copy(update={"target_modules": names})


def target_layers(model: Any, target_modules: Sequence[str]) -> dict[str, list[nn.Linear]]:
    """The linear layers that get an adapter, by the last part of their names.

    Raises:
        InputError: the decoder has no linear layer of one of the names.
    """
    linears = linear_layers(model)
    if target_modules == ["all-linear"]:
        return linears
    if missing := set(target_modules) - set(linears):
        raise InputError(
            f"lora.target_modules: the model has no linear layer {', '.join(sorted(missing))}: "
            f"choose from {', '.join(linears)}"
        )
    return {name: linears[name] for name in target_modules}


def linear_layers(model: Any) -> dict[str, list[nn.Linear]]:
    """The decoder's linear layers, by the last part of their names."""
    linears: dict[str, list[nn.Linear]] = {}
    for path, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            linears.setdefault(path.rpartition(".")[2], []).append(module)
    return linears


def public_name(model: str) -> str:
    """The name of a model or adapter on the Hub, or its folder's name without the path."""
    on_hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model) and not Path(model).exists()
    return model if on_hub else Path(model).resolve().name
