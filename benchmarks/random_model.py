"""Write a model with random weights, a byte-level tokenizer and a chat template to a folder,
without a download."""

from pathlib import Path
from typing import Any

import torch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|endoftext|>", "<|im_end|>", "<|im_start|>"]
VOCABULARY = len(SPECIAL) + 256

# hidden, intermediate, layers, heads, tied embedding: from the models' configs on the Hub
QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}

# hidden, intermediate, layers, heads, key heads, heads of linear attention's values, tied embedding
QWEN3_5 = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "2B": (2048, 6144, 24, 8, 2, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 32, False),
}


def qwen3(size: str, **changes: Any) -> Any:
    """The transformers config of a Qwen3 model of this size."""
    from transformers import Qwen3Config

    hidden, intermediate, layers, heads, tied = QWEN3[size]
    values = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
        "eos_token_id": SPECIAL.index("<|endoftext|>"),
    }
    return Qwen3Config(**values | changes)


def qwen3_5(size: str, **changes: Any) -> Any:
    """The transformers config of a Qwen3.5 model of this size, with what reads images.

    Args:
        changes: of the language model.
    """
    from transformers import Qwen3_5Config

    hidden, intermediate, layers, heads, key_heads, value_heads, tied = QWEN3_5[size]
    values = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "tie_word_embeddings": tied,
        "eos_token_id": SPECIAL.index("<|endoftext|>"),
    }
    return Qwen3_5Config(text_config=values | changes, tie_word_embeddings=tied)


def build(
    folder: Path, config: Any, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Path:
    """Write a model and its tokenizer; return the folder.

    Args:
        config: of transformers; its `initializer_range` is the standard deviation of the weights.
        device: draws the weights.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from stapo_lite.model.loading import model_class

    alphabet = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)

    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            shape = parameter.shape
            if len(shape) == 1:  # a norm
                parameter.fill_(1.0)
            else:
                drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
                parameter.copy_(drawn.mul_(config.get_text_config().initializer_range))
    model.save_pretrained(folder)
    return folder
