"""A model's tokenizer, and what can be checked before the model's weights are loaded."""

from collections.abc import Sequence
from typing import Any

from stapo_lite.errors import InputError, explained
from stapo_lite.model.adapter import target_layers
from stapo_lite.model.loading import NO_MODEL, load_model_config, without_weights

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


def load_tokenizer(model: str, target_modules: Sequence[str]) -> tuple[Any, int | list[int] | None]:
    """Load a model's tokenizer, and check the model before its weights are loaded.

    Returns:
        The tokenizer, and the ids of the model's end-of-text tokens.

    Raises:
        InputError: there is no such causal language model or tokenizer; the model's head is more
            than one linear layer; one of the `target_modules` is not a linear layer of the decoder.
    """
    from transformers import AutoTokenizer, GenerationConfig

    config = load_model_config(model)
    text = config.get_text_config()
    with explained(NO_MODEL.format(model)):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        empty_model = without_weights(config)
    # transformers makes an empty tokenizer if the files are missing.
    if not tokenizer("1 + 1 = 2", add_special_tokens=False).input_ids:
        raise InputError(f"model={model}: has no tokenizer")
    for key in TRANSFORMED_LOGITS:
        if getattr(text, key, None) not in (None, 1):
            raise InputError(f"model={model}: its logits are transformed after the head ({key})")
    target_layers(empty_model, target_modules)  # raises if one is missing
    try:
        model_eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no generation_config.json
        model_eos = text.eos_token_id
    return tokenizer, model_eos
