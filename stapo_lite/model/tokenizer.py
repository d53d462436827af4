"""A model's tokenizer, and what can be checked before the model's weights are loaded."""

from typing import Any

from stapo_lite.errors import InputError, explained
from stapo_lite.model.loading import NO_MODEL, load_model_config

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


def load_tokenizer(model: str) -> tuple[Any, int | list[int] | None]:
    """Load a model's tokenizer, and check the model's config.

    Returns:
        The tokenizer, and the ids of the model's end-of-text tokens.

    Raises:
        InputError: there is no such model or tokenizer; the model's head is more than one linear
            layer.
    """
    from transformers import AutoTokenizer, GenerationConfig

    config = load_model_config(model)
    text = config.get_text_config()
    with explained(NO_MODEL.format(model)):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    # transformers makes an empty tokenizer if the files are missing.
    if not tokenizer("1 + 1 = 2", add_special_tokens=False).input_ids:
        raise InputError(f"model={model}: has no tokenizer")
    for key in TRANSFORMED_LOGITS:
        if getattr(text, key, None) not in (None, 1):
            raise InputError(f"model={model}: its logits are transformed after the head ({key})")
    try:
        model_eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no generation_config.json
        model_eos = text.eos_token_id
    return tokenizer, model_eos
