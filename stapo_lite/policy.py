"""The policy: a frozen base model with a LoRA adapter, and the token statistics the loss needs."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stapo_lite.config import InputError, one_line
from stapo_lite.lm_head import token_statistics, top_tokens
from stapo_lite.types import MicroBatch, TokenStatistics

# Where it cannot fetch a kernel from the Hub it says so, at every start, and takes its own.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def load_tokenizer(model: str, longest_sequence: int, target_modules: list[str]) -> tuple[Any, int | list[int] | None]:
    """The tokenizer and the model's end-of-text tokens, after checking the model before its weights are loaded.

    Raises:
        InputError: there is no such causal language model or tokenizer; its head does more than one
            linear layer; its context is shorter than `longest_sequence` tokens; it lacks one of the
            `target_modules`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = load_model_config(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        with torch.device("meta"):  # shapes only
            modules = {name.rpartition(".")[2] for name, _ in AutoModelForCausalLM.from_config(config).named_modules()}
    except Exception as error:  # transformers raises a dozen kinds
        raise _no_model(model, error) from None
    # Where the files are missing, transformers makes an empty one.
    if not tokenizer("1 + 1 = 2", add_special_tokens=False).input_ids:
        raise InputError(f"model={model}: has no tokenizer")
    text_config = config.get_text_config()  # that of the decoder, where the model reads images as well
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(text_config, key, None) not in (None, 1, 1.0):
            raise InputError(f"model={model}: its logits are transformed after the head ({key}): choose another model")
    context = getattr(text_config, "max_position_embeddings", longest_sequence)
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
        model_eos = text_config.eos_token_id
    return tokenizer, model_eos


def load_model_config(model: str) -> Any:
    """The transformers config of a model.

    Raises:
        InputError: there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen kinds
        raise _no_model(model, error) from None


def _no_model(model: str, error: Exception) -> InputError:
    return InputError(f"model={model}: not a causal language model in a folder or on the Hub ({one_line(error)})")


def load_policy(
    model: str,
    *,
    dtype: torch.dtype,
    quantization: str | None,
    lora_r: int,
    lora_alpha: int,
    target_modules: list[str],
    lora_dtype: torch.dtype,
    gradient_checkpointing: bool,
    offload_activations: bool,
    compile_layers: bool,
    temperature: float,
    pad_token_id: int,
    lm_head_memory_bytes: int,
    lm_head_triton: bool,
    device: torch.device,
    seed: int,
    shard: Callable[[Any], None] | None = None,
) -> "Policy":
    """Load the base model and give it a new LoRA adapter.

    Args:
        quantization: None, or "nf4" for a 4-bit base with double quantisation (bitsandbytes).
        lora_dtype: of the adapter's parameters.
        offload_activations: keep what checkpointing saves in host memory.
        seed: of the adapter's random initialisation.
        shard: spreads the base over the processes (`sharding.py`).

    Raises:
        InputError: the model cannot be loaded, does not fit on the device, or lacks weights.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

    quantization_config = None
    if quantization == "nf4":
        quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype,
            quantization_config=quantization_config,
            device_map={"": torch.device("cpu") if shard else device},
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError as error:
        raise InputError(f"model={model} does not fit on {device}; see `python -m stapo_lite.plan`") from error
    except Exception as error:  # transformers raises a dozen kinds
        raise _no_model(model, error) from None
    base, loading = loaded
    if loading["missing_keys"]:
        raise InputError(f"model={model}: its weights lack {min(loading['missing_keys'])}")
    # generate() falls back on these for what a call leaves open: top-p and top-k of a model's
    # defaults would bias the sampled log-probabilities.
    base.generation_config = GenerationConfig(pad_token_id=pad_token_id)
    if shard is not None:
        shard(base)
    torch.manual_seed(seed)
    peft_model = add_adapter(
        base,
        lora_r=lora_r,
        lora_alpha=lora_alpha,
        target_modules=target_modules,
        lora_dtype=lora_dtype,
        gradient_checkpointing=gradient_checkpointing,
    )
    if compile_layers:  # one by one: all have the same code, and checkpointing stays outside
        module: Any
        for module in base.get_decoder().layers:
            module.compile(dynamic=True)
    return Policy(
        peft_model,
        dtype=dtype,
        temperature=temperature,
        pad_token_id=pad_token_id,
        offload_activations=offload_activations,
        lm_head_memory_bytes=lm_head_memory_bytes,
        lm_head_triton=lm_head_triton,
        sharded=shard is not None,
    )


def add_adapter(
    base: Any,
    *,
    lora_r: int,
    lora_alpha: int,
    target_modules: list[str],
    lora_dtype: torch.dtype,
    gradient_checkpointing: bool,
) -> Any:
    """Freeze the base and give it a LoRA adapter (PEFT), whose first output is zero; ready to train.

    Of PEFT's `prepare_model_for_kbit_training` a frozen base and non-reentrant checkpointing remain: fp32 copies of
    what is not quantised would cost 2.5 GB in an 8B model and agree less with the engine.
    """
    from peft import LoraConfig, get_peft_model

    base.requires_grad_(False)
    if gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(r=lora_r, lora_alpha=lora_alpha, target_modules=list(target_modules), task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(lora_dtype)
    if base.dtype != torch.float32:  # autocast does it, without an fp32 copy of every input
        module: Any
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    model.train()  # without dropout this only switches gradient checkpointing on
    return model


class Policy:
    """Base model and adapter. The base is never merged into and never changes.

    Attributes:
        model: the PeftModel.
        parameters: the adapter's trainable parameters by name.
        dtype: of the base and of the forward pass.
        sharded: whether all processes must run the decoder together.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        temperature: float,
        pad_token_id: int,
        offload_activations: bool,
        lm_head_memory_bytes: int,
        lm_head_triton: bool,
        sharded: bool,
    ):
        self.model = model
        self.sharded = sharded
        self.pad_token_id = pad_token_id
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._causal_lm = model.get_base_model()
        self.dtype = dtype
        self._offload_activations = offload_activations
        self._temperature = temperature
        self._lm_head_memory_bytes = lm_head_memory_bytes
        self._lm_head_triton = lm_head_triton
        self._host_copies: dict[nn.Parameter, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the adapter lives."""
        return next(iter(self.parameters.values())).device

    def park(self) -> None:
        """Move the frozen base to pinned host memory. It never changes, so it is copied there only once."""
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                if parameter not in self._host_copies:
                    host = torch.empty_like(parameter.data, device="cpu", pin_memory=parameter.is_cuda)
                    self._host_copies[parameter] = host.copy_(parameter.data)
                parameter.data = self._host_copies[parameter]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the engine, which allocates its own

    def unpark(self) -> None:
        """Bring the base back."""
        for parameter, host in self._host_copies.items():
            parameter.data = host.to(self.device, non_blocking=True)

    def statistics(self, batch: MicroBatch, differentiable_entropy: bool = False) -> TokenStatistics:
        """Log-probability (with gradient), entropy and collision probability of every completion token.

        Args:
            differentiable_entropy: give entropy a gradient too, by the recomputing LM head.

        Returns:
            TokenStatistics of [B, C] fp32, 0 where `completion_mask` is False.
        """
        return self.score(batch, self.hidden_states(batch), differentiable_entropy)

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """What predicts each completion token, [N, D] in the head's dtype; row after row."""
        with self.autocast(), self._keep_activations():
            hidden = self._causal_lm.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        # The causal shift, here and nowhere else: completion token t is predicted at prompt_length + t - 1.
        row, t = batch.completion_mask.nonzero(as_tuple=True)
        return hidden[row, batch.prompt_lengths[row] + t - 1].to(self._head.weight.dtype)

    def take_part(self) -> None:
        """Run both passes of the decoder on nothing, while other processes run them on something."""
        token = torch.full((1, 1), self.pad_token_id, device=self.device)
        with self.autocast(), self._keep_activations():
            hidden = self._causal_lm.get_decoder()(input_ids=token, use_cache=False).last_hidden_state
        if hidden.requires_grad:
            (0 * hidden).sum().backward()

    def score(self, batch: MicroBatch, hidden: Tensor, differentiable_entropy: bool = False) -> TokenStatistics:
        """`statistics` of a batch whose hidden states are known."""
        flat = token_statistics(
            hidden,
            self._head.weight,
            batch.completion_ids[batch.completion_mask],
            bias=self._head.bias,
            temperature=self._temperature,
            memory_bytes=self._lm_head_memory_bytes,
            differentiable_entropy=differentiable_entropy,
            triton=self._lm_head_triton,
        )
        blank = torch.zeros(batch.completion_ids.shape, device=hidden.device)
        return TokenStatistics(*(blank.masked_scatter(batch.completion_mask, values) for values in flat))

    def top_tokens(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable tokens for each of [n, D] hidden states: ids and probabilities, [n, k]."""
        return top_tokens(
            hidden,
            self._head.weight,
            k,
            bias=self._head.bias,
            temperature=self._temperature,
            memory_bytes=self._lm_head_memory_bytes,
        )

    @property
    def _head(self) -> Any:
        return self._causal_lm.get_output_embeddings()

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the base model, [B, C] fp32: the reference of the KL term is the adapter, disabled."""
        with self.model.disable_adapter():
            return self.statistics(batch).logprobs

    def autocast(self) -> torch.autocast:
        """The fp32 adapter computes in the base model's dtype, as it does in vLLM."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _keep_activations(self) -> AbstractContextManager:
        """Where the backward pass finds the inputs of the checkpointed layers."""
        if self._offload_activations and torch.is_grad_enabled():
            return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        return nullcontext()

    def adapter_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of the adapter's values in host memory, by the names under which PEFT saves them."""
        return {
            name.replace(".default.", "."): p.detach().to("cpu", dtype, copy=True)
            for name, p in self.parameters.items()
        }

    def save_adapter(self, folder: Path, values: dict[str, Tensor] | None = None) -> None:
        """Write the adapter in PEFT's format.

        Args:
            values: of `parameters`, where they are not those of now.
        """
        # "auto" would ask the Hub whether the embedding was resized; adapters here never touch it.
        self.model.save_pretrained(folder, save_embedding_layers=False, state_dict=values or self.parameters)

    def load_adapter(self, folder: Path) -> None:
        """Replace the adapter's values by those of a saved one of the same shape.

        Raises:
            InputError: it has values for other layers, or none for some.
        """
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        result: Any = set_peft_model_state_dict(self.model, load_file(folder / "adapter_model.safetensors"))
        wrong = [*result.unexpected_keys, *(name for name in result.missing_keys if "lora_" in name)]
        if wrong:
            raise InputError(f"{folder}: the adapter does not fit the model, {wrong[0]} is on one side only")


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
