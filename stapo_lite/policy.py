"""The policy: a frozen base model with a LoRA adapter, and the token statistics the loss needs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stapo_lite.config import InputError
from stapo_lite.lm_head import token_statistics
from stapo_lite.types import MicroBatch, TokenStatistics


def load_tokenizer(model: str, longest_sequence: int, target_modules: list[str]) -> tuple[Any, int | list[int] | None]:
    """The tokenizer and the model's end-of-text tokens, after checking the model before its weights are loaded.

    Raises:
        InputError: there is no such causal language model or tokenizer; its head does more than one
            linear layer; its context is shorter than `longest_sequence` tokens; it lacks one of the
            `target_modules`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        with torch.device("meta"):  # shapes only
            modules = {name.rpartition(".")[2] for name, _ in AutoModelForCausalLM.from_config(config).named_modules()}
    except Exception as error:  # transformers raises a dozen kinds
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"model={model}: not a causal language model in a folder or on the Hub ({reason})") from None
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise InputError(f"model={model}: its logits are transformed after the head ({key}): choose another model")
    context = getattr(config, "max_position_embeddings", longest_sequence)
    if longest_sequence > context:
        raise InputError(
            f"model={model} holds {context} tokens, but data.max_prompt_length + rollout.max_completion_length = "
            f"{longest_sequence}: shorten one"
        )
    missing = set(target_modules) - modules
    if missing:
        raise InputError(f"lora.target_modules: model={model} has no {', '.join(sorted(missing))}: leave them out")
    try:
        model_eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        model_eos = config.eos_token_id
    return tokenizer, model_eos


def load_policy(
    model: str,
    *,
    dtype: torch.dtype,
    quantization: str | None,
    lora_r: int,
    lora_alpha: int,
    target_modules: list[str],
    gradient_checkpointing: bool,
    temperature: float,
    pad_token_id: int,
    lm_head_memory_bytes: int,
    device: torch.device,
    seed: int,
) -> "Policy":
    """Load the base model, freeze it and give it a new LoRA adapter (PEFT), whose first output is zero.

    Args:
        quantization: None, or "nf4" for a 4-bit base with double quantisation (bitsandbytes).
        seed: of the adapter's random initialisation.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

    quantization_config = None
    if quantization == "nf4":
        quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    base = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, quantization_config=quantization_config, device_map={"": device}
    )
    # generate() falls back on these for what a call leaves open: top-p and top-k of a model's
    # defaults would bias the sampled log-probabilities.
    base.generation_config = GenerationConfig(pad_token_id=pad_token_id)
    base.requires_grad_(False)
    if gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(seed)
    lora = LoraConfig(r=lora_r, lora_alpha=lora_alpha, target_modules=list(target_modules), task_type="CAUSAL_LM")
    peft_model = get_peft_model(base, lora, autocast_adapter_dtype=True)
    if dtype == torch.bfloat16:  # autocast does it, without an fp32 copy of every input
        module: Any
        for module in peft_model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    peft_model.train()  # without dropout this only switches gradient checkpointing on
    return Policy(peft_model, dtype, temperature, pad_token_id, lm_head_memory_bytes)


class Policy:
    """Base model and adapter. The base is never merged into and never changes.

    Attributes:
        model: the PeftModel.
        parameters: the adapter's trainable parameters by name, fp32.
    """

    def __init__(
        self, model: Any, dtype: torch.dtype, temperature: float, pad_token_id: int, lm_head_memory_bytes: int
    ):
        self.model = model
        self.pad_token_id = pad_token_id
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._causal_lm = model.get_base_model()
        self._dtype = dtype
        self._temperature = temperature
        self._memory_bytes = lm_head_memory_bytes

    @property
    def device(self) -> torch.device:
        return self.model.device

    def statistics(self, batch: MicroBatch, differentiable_entropy: bool = False) -> TokenStatistics:
        """Log-probability (with gradient), entropy and collision probability of every completion token.

        Args:
            differentiable_entropy: give entropy a gradient too, by the recomputing LM head.

        Returns:
            TokenStatistics of [B, C] fp32, 0 where `completion_mask` is False.
        """
        with self.autocast():
            hidden = self._causal_lm.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        # The causal shift, here and nowhere else: completion token t is predicted at prompt_length + t - 1.
        row, t = batch.completion_mask.nonzero(as_tuple=True)
        hidden = hidden[row, batch.prompt_lengths[row] + t - 1]
        head = self._causal_lm.get_output_embeddings()
        flat = token_statistics(
            hidden.to(head.weight.dtype),
            head.weight,
            batch.completion_ids[row, t],
            bias=head.bias,
            temperature=self._temperature,
            memory_bytes=self._memory_bytes,
            differentiable_entropy=differentiable_entropy,
        )
        blank = torch.zeros(batch.completion_ids.shape, device=hidden.device)
        return TokenStatistics(*(blank.masked_scatter(batch.completion_mask, values) for values in flat))

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the base model, [B, C] fp32: the reference of the KL term is the adapter, disabled."""
        with self.model.disable_adapter():
            return self.statistics(batch).logprobs

    def autocast(self) -> torch.autocast:
        """The fp32 adapter computes in the base model's dtype, as it does in vLLM."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in PEFT's format."""
        # "auto" would ask the Hub whether the embedding was resized; adapters here never touch it.
        self.model.save_pretrained(folder, save_embedding_layers=False)

    def load_adapter(self, folder: Path) -> None:
        """Replace the adapter's values by those of a saved one of the same shape."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(self.model, load_file(folder / "adapter_model.safetensors"))


def make_optimizer(policy: Policy, name: str, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Fused AdamW over the adapter, or bitsandbytes' paged 8-bit AdamW."""
    parameters = list(policy.parameters.values())
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    if name == "paged_adamw_8bit":
        from bitsandbytes.optim import PagedAdamW8bit

        optimizer = PagedAdamW8bit
    return optimizer(parameters, lr=learning_rate, betas=(0.9, 0.999), weight_decay=weight_decay)


def sum_gradients(policy: Policy, reduce: Callable[[Tensor], Tensor]) -> None:
    """Add the adapter's gradients up over processes in one collective.

    Args:
        reduce: sums a tensor over the processes; a process without gradients contributes zeros.
    """
    parameters = list(policy.parameters.values())
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    flat = reduce(flat)
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)
