"""Memory of the card: what vLLM gets of it, and how much a micro-batch may take.

Little is planned. vLLM gets all but the trainer's own tensors. For updates `count_activations`
proposes a setting, a rehearsal before the first step confirms it (`rehearsal.py`), and whenever
memory runs out, the run goes one step down a list:

    fewer tokens in a micro-batch; all layers checkpointed; fewer tokens; activations offloaded
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from stapo_lite.config import Config
from stapo_lite.errors import RunError, out_of_memory
from stapo_lite.method.microbatches import sequence_length, split_by_tokens
from stapo_lite.method.tokens import Tokens
from stapo_lite.model.policy import Policy
from stapo_lite.model.sizes import GIB, count_activations, count_sizes
from stapo_lite.progress import progress_bar
from stapo_lite.rollout.engine import RolloutEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")

MARGIN = 0.04
"""Share of the card that is left free, for fragmentation in the allocators."""
ENOUGH_TOKENS = 2048
"""Tokens of a micro-batch that keep a card busy: rather than use fewer, checkpoint the layers."""
VALUE_BYTES = 4
"""Of a trained parameter, in fp32."""
UPDATE_BYTES = 12
"""Of its gradient and AdamW's two states, which updates need besides."""


class MemorySetting(NamedTuple):
    """How updates use memory."""

    offload: bool
    """The inputs of layers wait in host memory for the backward pass."""
    checkpointing: bool
    """All layers recompute their activations in the backward pass."""
    tokens: int
    """Most tokens in a micro-batch, padding included; a longer sequence gets one of its own."""

    def next(self, alone: bool) -> "MemorySetting | None":
        """The next setting of the list; None at its end.

        Args:
            alone: whether the micro-batch is one sequence, so that fewer tokens change nothing.
        """
        # Halving costs little while a micro-batch still keeps the card busy.
        if not alone and (self.checkpointing or self.tokens > ENOUGH_TOKENS):
            return self._replace(tokens=self.tokens // 2)
        # Checkpointing computes every layer a second time: a third more.
        if not self.checkpointing:
            return self._replace(checkpointing=True)
        # Moving activations to the host and back costs most.
        if not self.offload:
            return self._replace(offload=True)
        return None

    def saved(self) -> tuple[bool, bool, int]:
        """How much memory it saves, to compare with other settings."""
        return self.offload, self.checkpointing, -self.tokens

    def __str__(self) -> str:
        layers = "layers checkpointed" if self.checkpointing else "no layer checkpointed"
        waiting = ", activations in host memory" if self.offload else ""
        return f"micro-batches of at most {self.tokens:,} tokens, {layers}{waiting}"


TOKENS = (16_384, 8192, 4096, ENOUGH_TOKENS)
PLAIN = MemorySetting(offload=False, checkpointing=False, tokens=ENOUGH_TOKENS)
CHECKPOINTED = PLAIN._replace(checkpointing=True)
PROPOSALS = [
    *(PLAIN._replace(tokens=tokens) for tokens in TOKENS),
    *(CHECKPOINTED._replace(tokens=tokens) for tokens in TOKENS),
    CHECKPOINTED._replace(offload=True),
]
"""The fastest first."""


class MemoryBudget:
    """Runs passes over a mini-batch in micro-batches that fit into memory.

    Args:
        setting: to begin with.
        save_memory: `Policy.save_memory`.
    """

    def __init__(self, setting: MemorySetting, save_memory: Callable[[bool, bool], None]):
        self._save_memory = save_memory
        self.use(setting)

    def use(self, setting: MemorySetting) -> None:
        """Use this setting from now on."""
        self.setting = setting
        self._save_memory(setting.checkpointing, setting.offload)

    def fit(
        self, tokens: Tokens, numbers: Sequence[int], work: Callable[[Iterable[list[int]]], T]
    ) -> T:
        """Run `work` on completions, split into micro-batches. If memory runs out, repeat all of it
        with the next setting.

        Args:
            numbers: indices of the completions.
            work: called with an iterator over the micro-batches, a list of indices each, and again
                from the start if memory runs out; its result is returned.

        Raises:
            RunError: a single sequence is too much.
        """
        lengths = [sequence_length(tokens.completions[number]) for number in numbers]
        while True:
            parts = split_by_tokens(lengths, self.setting.tokens)
            micro_batches = [[numbers[i] for i in part] for part in parts]
            try:
                return work(watched(tokens, micro_batches, sum(lengths)))
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                # The micro-batch of the most tokens, padding included, was the one that failed.
                largest = max(parts, key=lambda part: len(part) * max(lengths[i] for i in part))
                following = self.setting.next(alone=len(largest) == 1)
                if following is None:
                    raise RunError(
                        "memory ran out on a single sequence: lower rollout.max_completion_length "
                        "or train.lm_head_memory_gb, and continue with --resume --force"
                    ) from error
            # Only after the `except` block are the error and the tensors in its traceback freed.
            clear_device_cache(garbage_collection=True)
            logger.warning("memory ran out: from now on %s", following)
            self.use(following)


def watched(tokens: Tokens, micro_batches: Sequence[list[int]], total: int) -> Iterator[list[int]]:
    """The micro-batches, with a bar of the tokens done."""
    with progress_bar("trainer", "token", total) as bar:
        for numbers in micro_batches:
            yield numbers
            bar.update(sum(sequence_length(tokens.completions[number]) for number in numbers))


@contextmanager
def lent_device(
    engine: RolloutEngine, policy: Policy, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Wake the engine within the context; put it to sleep afterwards. If they share a card, the
    adapter and the optimiser's states wait in host memory meanwhile: the engine has an adapter of
    its own, and more room for its cache."""
    device = policy.device
    if engine.sleeps:
        move_trained(policy, optimizer, torch.device("cpu"))
    engine.wake()
    yield
    engine.sleep()
    if engine.sleeps:
        move_trained(policy, optimizer, device)


def move_trained(policy: Policy, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the adapter's values and the optimiser's states to a device."""
    for parameter in policy.parameters.values():
        parameter.data = moved(parameter.data, device)
    for state in optimizer.state.values():
        for name, values in state.items():
            state[name] = moved(values, device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; in host memory it is pinned, which a card copies several times as
    fast."""
    copy = torch.empty_like(values, device=device, pin_memory=device.type == "cpu")
    return copy.copy_(values)


def free_memory() -> tuple[int, int] | None:
    """Free bytes of the card, and all of them; None without a card."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()


def card_memory() -> float | None:
    """GiB in use on the card, including by CUDA itself and by other processes; None without a card.

    Torch's allocator keeps what an update allocated, so this is the update's peak until the cache
    is emptied. (Torch's own count would include memory that a sleeping vLLM has freed.)
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def vllm_share(config: Config) -> float | None:
    """The share of the card for an engine in this process: the config's, or all but a margin and
    what the trainer keeps on the card meanwhile (`kept_adapters`). None without a card.

    If the trainer loads a base of its own, it also needs that base and all that updates take.
    """
    share = config.rollout.gpu_memory_utilization
    memory = free_memory()
    if share is not None or memory is None:
        return share
    free, total = memory
    sizes = count_sizes(config)
    trainer = VALUE_BYTES * sizes.adapter * kept_adapters(config)
    if not config.may_share_base:
        tokens = max(ENOUGH_TOKENS, config.max_sequence_length)
        trainer += (VALUE_BYTES + UPDATE_BYTES) * sizes.adapter + sizes.base
        trainer += count_activations(config, tokens, checkpointing=True)
    return (free - trainer) / total - MARGIN


def kept_adapters(config: Config) -> int:
    """How many adapters besides the trained one the trainer keeps: a reference's, a teacher's."""
    objective = config.objective
    adapters = (config.lora.adapter if objective.beta else None, objective.teacher_adapter)
    return sum(adapter is not None for adapter in adapters)


def propose(config: Config, parameters: int) -> MemorySetting:
    """The first of the proposals, with the config's own values, whose activations fit the card of
    every process beside gradient and optimiser; the last one if none does. Without a card, the
    first one with checkpointed layers.

    Collective: every rank must call it, with the base loaded and the engine asleep.

    Args:
        parameters: how many are trained.
    """
    train = config.train
    memory = free_memory()
    keys: dict[str, Any] = {
        "offload": train.offload_activations,
        "checkpointing": train.gradient_checkpointing,
        "tokens": train.max_tokens_per_microbatch,
    }
    fixed = {name: value for name, value in keys.items() if value != "auto"}
    if memory is None:
        return PROPOSALS[0]._replace(**{"checkpointing": True} | fixed)
    free, total = memory
    # All processes cut their work alike, so that the fullest card decides.
    room = free - UPDATE_BYTES * parameters - int(MARGIN * total)
    room = min(gather_object([room]))
    for proposal in PROPOSALS:
        setting = proposal._replace(**fixed)
        if setting.offload:  # without checkpoints it would move everything, weights included
            setting = setting._replace(checkpointing=True)
        tokens = max(setting.tokens, config.max_sequence_length)
        if count_activations(config, tokens, setting.checkpointing) <= room:
            break
    return setting
