"""The policy: a frozen base with a LoRA adapter, and the token statistics that the loss needs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from stapo_lite.config import Config, Train
from stapo_lite.files import open_to_others
from stapo_lite.method.lm_head import Head, token_statistics, top_tokens
from stapo_lite.method.tokens import send
from stapo_lite.model.adapter import add_adapter, load_adapter
from stapo_lite.model.fused import fuse
from stapo_lite.types import Completion, TokenStatistics


def make_policy(base: Any, config: Config, start: Path | None = None) -> "Policy":
    """Give a base model a LoRA adapter.

    Args:
        base: transformers' causal language model, from `load_weights`; it is changed in place.
        start: folder of the adapter to start from (`find_start`); None for a new adapter, drawn
            from `config.seed`.

    Raises:
        InputError: the adapter cannot be loaded, or lacks weights.
    """
    torch.manual_seed(config.seed)
    model = add_adapter(base, config.lora)
    fuse(model)
    policy = Policy(
        model,
        getattr(torch, config.dtype),
        config.rollout.temperature,
        int(config.train.lm_head_memory_gb * 2**30),
    )
    if start is not None:
        load_adapter(policy.model, start)
        if config.objective.beta:
            policy.reference = policy.copy_values()
    return policy


class Policy:
    """A base model, which never changes, and its adapter, which is never merged into it.

    Args:
        model: the PeftModel.
        dtype: of the base and of the forward pass.
        temperature: of sampling; the policy is the distribution at this temperature.
        head_memory: workspace of the LM head, in bytes.

    Attributes:
        parameters: the adapter's trainable parameters by name.
        reference: the values of the adapter that training started from, by the names in
            `parameters`, for the KL term; empty if that term refers to the base, or is off.
    """

    def __init__(self, model: Any, dtype: torch.dtype, temperature: float, head_memory: int):
        self.model = model
        self.dtype = dtype
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._causal_lm = model.get_base_model()
        self._offload = False
        self._temperature = temperature
        self._head_memory = head_memory
        self.reference: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """The adapter's device."""
        return next(iter(self.parameters.values())).device

    def save_memory(self, checkpointing: bool, offload: bool) -> None:
        """Set how passes with a gradient save memory, at the cost of time.

        Args:
            checkpointing: layers recompute their activations in the backward pass. Once on, it
                stays on.
            offload: saved tensors wait for the backward pass in host memory.
        """
        if checkpointing:
            checkpoint_layers(self._causal_lm)
        self._offload = offload

    def drop_base(self) -> None:
        """Drop the base at the end of a run, since its weights may belong to the engine. Only the
        adapter's values are left."""
        self.model = self._causal_lm = None
        clear_device_cache(garbage_collection=True)  # fused layers hold themselves

    def statistics(
        self, completions: Sequence[Completion], differentiable_entropy: bool = False
    ) -> TokenStatistics:
        """Log-probability, entropy and collision probability of every completion token, [n] fp32,
        completion by completion. The log-probability has a gradient.

        Args:
            differentiable_entropy: give the entropy a gradient, too.
        """
        targets = [token for completion in completions for token in completion.token_ids]
        return token_statistics(
            self.hidden_states(completions),
            self._lm_head,
            send(torch.tensor(targets, dtype=torch.int64), self.device),
            differentiable_entropy,
        )

    def hidden_states(self, completions: Sequence[Completion]) -> Tensor:
        """Hidden states that predict the completion tokens, [n, D] in the head's dtype, completion
        by completion.

        Padding and the causal shift happen here and nowhere else. Two prompts of two tokens (p, q),
        with completions (a, b, c) and (d), n = 4:

            p  q  a  b  c      the states at q, a, b predict a, b, c
            p  q  d  -  -      the state at q predicts d

        An attention mask is not needed: in a causal model no token sees the padding to its right.
        """
        sequences = [torch.tensor(c.prompt.token_ids + c.token_ids) for c in completions]
        input_ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        longest = input_ids.shape[1]
        places = []
        for row, completion in enumerate(completions):
            # The state before a token predicts it: begin at the prompt's last token.
            start = row * longest + len(completion.prompt.token_ids) - 1
            places.append(torch.arange(start, start + len(completion.token_ids)))
        hidden = self._decode(send(input_ids, self.device)).flatten(0, 1)
        hidden = hidden.index_select(0, send(torch.cat(places), self.device))
        return hidden.to(self._lm_head.weight.dtype)

    def _decode(self, input_ids: Tensor) -> Tensor:
        """Last hidden states, [rows, length, D]."""
        # The fp32 adapter computes in the base's dtype, as it does in vLLM.
        precision = torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype != torch.float32
        )
        storage: Any = nullcontext()
        if self._offload:
            storage = torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        with precision, storage:
            decoded = self._causal_lm.get_decoder()(input_ids=input_ids, use_cache=False)
        return decoded.last_hidden_state

    def top_tokens(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids and probabilities of the k most probable tokens, both [n, k], for [n, D] hidden
        states."""
        return top_tokens(hidden, self._lm_head, k)

    @property
    def _lm_head(self) -> Head:
        """The frozen head."""
        head = self._causal_lm.get_output_embeddings()
        return Head(head.weight, head.bias, self._temperature, self._head_memory)

    @torch.no_grad()
    def reference_logprobs(self, completions: Sequence[Completion]) -> Tensor:
        """Log-probabilities of the KL term's reference, [n] fp32: the adapter that training started
        from, if `lora.adapter` names one, else the base without an adapter."""
        with self.holding(self.reference) if self.reference else self.model.disable_adapter():
            return self.statistics(completions).logprobs

    @contextmanager
    def holding(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Give the adapter other values within the context.

        Args:
            values: by the names in `parameters`.
        """
        before = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = values[name]
            yield
        finally:  # also if memory runs out
            for name, parameter in self.parameters.items():
                parameter.data = before[name]

    def copy_values(self) -> dict[str, Tensor]:
        """Copies of the adapter's values, by the names in `parameters`."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def set_values(self, values: dict[str, Tensor]) -> None:
        """Overwrite the adapter's values.

        Args:
            values: by the names in `parameters`, on any device.
        """
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

    def adapter_tensors(self, dtype: str) -> dict[str, Tensor]:
        """Copies of the adapter's values in host memory, by PEFT's names in a saved adapter."""
        return {
            name.replace(".default.", "."): p.detach().to("cpu", getattr(torch, dtype), copy=True)
            for name, p in self.parameters.items()
        }

    def save_adapter(self, folder: Path, values: dict[str, Tensor] | None = None) -> None:
        """Write the adapter in PEFT's format.

        Args:
            values: to write, by the names in `parameters`; by default the current ones.
        """
        # By default PEFT asks the Hub whether the embedding was resized. It never is here.
        self.model.save_pretrained(
            folder, save_embedding_layers=False, state_dict=values or self.parameters
        )
        open_to_others(folder)


def checkpoint_layers(base: Any) -> None:
    """Let layers recompute their activations in the backward pass."""
    base.gradient_checkpointing_enable({"use_reentrant": False})
    # A layer checkpoints only in training mode, which also switches dropout on. So only the layer
    # itself is in that mode, not its submodules, and its own dropout rates become 0.
    for layer in base.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer.training = True
            for name, value in vars(layer).items():
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)


def make_optimizer(policy: Policy, train: Train) -> torch.optim.Optimizer:
    """Fused AdamW over the adapter."""
    return torch.optim.AdamW(
        policy.parameters.values(),
        lr=train.learning_rate,
        weight_decay=train.weight_decay,
        fused=True,
    )


def sum_gradients(policy: Policy) -> None:
    """Sum the adapter's gradients over all processes, in one call. DDP would take the mean, but
    each loss is already divided by the denominator of all processes.

    Collective: every rank must call it, even without gradients.
    """
    gradients = []
    for parameter in policy.parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    flat = parameters_to_vector(gradients)
    torch.distributed.all_reduce(flat)
    vector_to_parameters(flat, gradients)
