"""The policy: a frozen base model with a LoRA adapter, and the token statistics the loss needs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stapo_lite.algorithm.lm_head import token_statistics, top_tokens
from stapo_lite.algorithm.microbatches import send
from stapo_lite.config import Config, Train
from stapo_lite.model.loading import add_adapter, load_adapter, load_weights
from stapo_lite.types import Completion, TokenStatistics


def load_policy(config: Config, device: torch.device, start: Path | None = None) -> "Policy":
    """Load the base model and give it a LoRA adapter: a new one, drawn from `config.seed`, or one to start from.

    Args:
        start: folder of that one (`find_start`).

    Raises:
        InputError: the model or the adapter cannot be loaded, does not fit on the device, or lacks weights.
    """
    base = load_weights(config.model, config.dtype, device, config.quantization)
    torch.manual_seed(config.seed)
    peft_model = add_adapter(base, config.lora, config.train.gradient_checkpointing)
    if config.train.compile:  # one by one: all have the same code, and checkpointing stays outside
        module: Any
        for module in base.get_decoder().layers:
            module.compile(dynamic=True)
    policy = Policy(peft_model, config)
    if start is not None:
        load_adapter(policy.model, start)
        if config.objective.beta:
            policy.refer_to_now()
    return policy


class Policy:
    """Base model and adapter. The base is never merged into and never changes.

    Attributes:
        model: the PeftModel.
        parameters: the adapter's trainable parameters by name.
        dtype: of the base and of the forward pass.
    """

    def __init__(self, model: Any, config: Config):
        self.model = model
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._causal_lm = model.get_base_model()
        self._offload_activations = config.train.offload_activations
        workspace = int(config.train.lm_head_memory_gb * 2**30)
        self._lm_head: dict[str, Any] = {"temperature": config.rollout.temperature, "memory_bytes": workspace}
        self._host_copies: dict[nn.Parameter, Tensor] = {}
        self._reference: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """The device that the adapter lives on."""
        return next(iter(self.parameters.values())).device

    def park(self) -> None:
        """Move the frozen base to pinned host memory. It never changes, so it is copied there only once."""
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                if parameter not in self._host_copies:
                    host = torch.empty_like(parameter.data, device="cpu", pin_memory=parameter.is_cuda)
                    self._host_copies[parameter] = host.copy_(parameter.data)
                parameter.data = self._host_copies[parameter]
        torch.cuda.empty_cache()  # for the engine, which allocates its own

    def unpark(self) -> None:
        """Bring the base back."""
        for parameter, host in self._host_copies.items():
            parameter.data = host.to(self.device, non_blocking=True)

    def statistics(self, completions: Sequence[Completion]) -> TokenStatistics:
        """Log-probability (with gradient), entropy and collision probability of every completion token, [n] fp32, one
        completion after the other."""
        return self.score(completions, self.hidden_states(completions))

    def hidden_states(self, completions: Sequence[Completion]) -> Tensor:
        """Hidden states that predict each completion token, [n, D] in the head's dtype, one completion after the other.

        The decoder's input is padded here and nowhere else: prompt, completion, padding. On the right it needs no
        attention mask: in a causal model no real token sees it.
        """
        sequences = [torch.tensor(c.prompt.token_ids + c.token_ids) for c in completions]
        input_ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        # The causal shift, here and nowhere else: a token is predicted at the place before its own.
        places = [
            torch.arange(len(sequence) - len(c.token_ids), len(sequence)) + row * input_ids.shape[1] - 1
            for row, (c, sequence) in enumerate(zip(completions, sequences, strict=True))
        ]
        hidden = self._decode(send(input_ids, self.device)).flatten(0, 1)
        return hidden.index_select(0, send(torch.cat(places), self.device)).to(self._head.weight.dtype)

    def _decode(self, input_ids: Tensor) -> Tensor:
        # The fp32 adapter computes in the base model's dtype, as it does in vLLM.
        precision = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with precision, self._keep_activations():
            return self._causal_lm.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state

    def score(
        self, completions: Sequence[Completion], hidden: Tensor, differentiable_entropy: bool = False
    ) -> TokenStatistics:
        """`statistics` of completions whose hidden states are known.

        Args:
            differentiable_entropy: give entropy a gradient too; the logits are then computed twice.
        """
        targets = torch.tensor(list(itertools.chain(*(c.token_ids for c in completions))), dtype=torch.int64)
        return token_statistics(
            hidden,
            self._head.weight,
            send(targets, self.device),
            bias=self._head.bias,
            differentiable_entropy=differentiable_entropy,
            **self._lm_head,
        )

    def top_tokens(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable tokens for each of [n, D] hidden states: ids and probabilities, [n, k]."""
        return top_tokens(hidden, self._head.weight, k, bias=self._head.bias, **self._lm_head)

    @property
    def _head(self) -> Any:
        return self._causal_lm.get_output_embeddings()

    @torch.no_grad()
    def reference_logprobs(self, completions: Sequence[Completion]) -> Tensor:
        """Log-probabilities of the KL term's reference, [n] fp32: the adapter that training started from, where
        `lora.adapter` names one, else the base model (the adapter is disabled for the pass)."""
        if not self._reference:
            with self.model.disable_adapter():
                return self.statistics(completions).logprobs
        with self.holding(self._reference):
            return self.statistics(completions).logprobs

    @contextmanager
    def holding(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Give the adapter other values within a context.

        Args:
            values: by the names of `parameters`.
        """
        now = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = values[name]
            yield
        finally:  # also if memory runs out
            for name, parameter in self.parameters.items():
                parameter.data = now[name]

    def refer_to_now(self) -> None:
        """Keep a copy of the adapter as it is now, as the reference of the KL term."""
        self._reference = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def _keep_activations(self) -> AbstractContextManager:
        """A context that decides where the inputs of checkpointed layers wait for the backward pass."""
        if self._offload_activations and torch.is_grad_enabled():
            return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        return nullcontext()

    def adapter_tensors(self, dtype: str) -> dict[str, Tensor]:
        """Copies of the adapter's values in host memory, by the names under which PEFT saves them."""
        return {
            name.replace(".default.", "."): p.detach().to("cpu", getattr(torch, dtype), copy=True)
            for name, p in self.parameters.items()
        }

    def save_adapter(self, folder: Path, values: dict[str, Tensor] | None = None) -> None:
        """Write the adapter in PEFT's format.

        Args:
            values: to write in place of those that `parameters` have now.
        """
        # "auto" would ask the Hub whether the embedding was resized; adapters here never touch it.
        self.model.save_pretrained(folder, save_embedding_layers=False, state_dict=values or self.parameters)


def make_optimizer(policy: Policy, train: Train) -> torch.optim.Optimizer:
    """Fused AdamW over the adapter, or bitsandbytes' paged 8-bit AdamW."""
    parameters = list(policy.parameters.values())
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    if train.optim == "paged_adamw_8bit":
        from bitsandbytes.optim import PagedAdamW8bit

        optimizer = PagedAdamW8bit
    return optimizer(parameters, lr=train.learning_rate, betas=(0.9, 0.999), weight_decay=train.weight_decay)


def sum_gradients(policy: Policy) -> None:
    """Add the adapter's gradients up over processes in one collective, to which one without gradients gives zeros."""
    parameters = list(policy.parameters.values())
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    torch.distributed.all_reduce(flat)
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)
