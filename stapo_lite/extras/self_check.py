"""Check before a run's first step: does the engine compute what the trainer computes?

vLLM has had bugs in which an adapter silently did nothing, or was lost while the engine slept
(vllm#49354, #34186, #53888). Such a run would sample from one policy and train another. The check
gives the adapter random values, samples a few tokens with the engine, and compares their
log-probabilities with those of the trainer's policy and of the base alone. Each kind of layer gets
values that matter, so that an engine which ignores the adapter in one kind does not pass.
"""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from stapo_lite.errors import RunError
from stapo_lite.method.tokens import pack
from stapo_lite.model.adapter import kind_of
from stapo_lite.rollout.engine import Decoding, RolloutEngine
from stapo_lite.training.learner import Learner
from stapo_lite.training.memory import lent_device
from stapo_lite.types import Completion, Prompt

PROMPTS = 8
PROMPT_TOKENS = 64
NEW_TOKENS = 16
EFFECT = 0.7
"""Mean change in nats that the random adapter makes to log-probabilities, about; at least half of
it, to stand out from rounding."""
LARGEST_GAP = 0.2
"""Limit of the mean difference between engine and trainer, as a share of the adapter's effect, if
both have the same weights."""
SCALINGS = 3
"""Passes to find the scale of a kind of layer, each of which may multiply it by LARGEST_FACTOR."""
LARGEST_FACTOR = 32.0
ROUNDING = 0.02
"""A gap of at most this many nats also passes if the engine is at least twice as far from the base.
The adapter moves nearly certain tokens no more than bfloat16 rounding does."""


def check_engine(
    engine: RolloutEngine,
    learner: Learner,
    prompts: Sequence[Prompt],
    temperature: float,
    same_weights: bool,
) -> float:
    """Sample with a random adapter, freshly loaded and after sleep and wake, and compare with the
    trainer.

    Collective: every rank must call it, while the engine sleeps. Afterwards the engine sleeps again
    and the adapter has its own values back.

    Args:
        prompts: the run's; sampling continues their first tokens.
        temperature: the run's.
        same_weights: whether engine and trainer have the base in the same format.

    Returns:
        The mean difference between the log-probabilities of engine and trainer, in nats.

    Raises:
        RunError: the engine ignores the adapter, loses it, or computes something else.
    """
    policy = learner.policy
    beginnings = [
        Prompt("", prompts[i % len(prompts)].token_ids[:PROMPT_TOKENS], None)
        for i in range(PROMPTS)
    ]
    decoding = Decoding(NEW_TOKENS, temperature, top_p=1.0, logprobs=True)
    gaps: list[float] = []
    # There is no room for two adapters on the card while the engine is awake.
    own = {name: values.cpu() for name, values in policy.copy_values().items()}
    policy.set_values(random_adapter(learner, beginnings))
    for moment in ("with a new adapter", "after sleep and wake"):
        with lent_device(engine, policy, learner.optimizer):
            if not gaps:
                engine.publish(policy, version=0)
            draws = engine.stream(beginnings, range(PROMPTS), [decoding] * PROMPTS)
            completions = [completion for _, completion in draws]
        gaps.append(measure_gap(learner, completions, moment, same_weights))
    policy.set_values(own)
    return max(gaps)


def random_adapter(learner: Learner, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Random values for the adapter, scaled so that each kind of layer has an effect, by the names
    of `Policy.parameters`.

    Raises:
        RunError: they have none.
    """
    policy = learner.policy
    generator = torch.Generator().manual_seed(0)
    adapter = {}
    for name, parameter in policy.parameters.items():
        values = torch.randn(parameter.shape, generator=generator).to(policy.device)
        adapter[name] = values / parameter.shape[1] ** 0.5
    first = Prompt("", prompts[0].token_ids[:1], None)
    texts = []
    for prompt in prompts[:3]:
        ids = prompt.token_ids
        texts.append(Completion(first, ids, [0.0] * len(ids), False, 0))
    base = logprobs(learner, texts, adapted=False)

    def effect_of(values: dict[str, Tensor]) -> float:
        with policy.holding(values):
            return (logprobs(learner, texts) - base).abs().mean().item()

    # Each kind of layer gets a scale with which it alone has its share of the effect.
    kinds = list(dict.fromkeys(map(kind_of, adapter)))
    share = EFFECT / len(kinds) ** 0.5
    for kind in kinds:
        others = [other for other in kinds if other != kind]
        for _ in range(SCALINGS):
            effect = effect_of(scaled(adapter, others, 0.0))
            # As long as it is small, the effect grows about linearly.
            adapter = scaled(adapter, [kind], min(share / max(effect, 1e-9), LARGEST_FACTOR))
    if effect_of(adapter) >= EFFECT / 2:
        return adapter
    raise RunError(
        "rollout.self_check: no random adapter moves the trainer's log-probabilities by "
        f"{EFFECT / 2} nats; check lora.target_modules, or, for a model without training, set "
        "rollout.self_check=false"
    )


def scaled(adapter: dict[str, Tensor], kinds: Sequence[str], factor: float) -> dict[str, Tensor]:
    """An adapter whose effect in some kinds of layers is multiplied by a factor."""
    return {
        name: values * factor if "lora_B" in name and kind_of(name) in kinds else values
        for name, values in adapter.items()
    }


def measure_gap(
    learner: Learner, completions: Sequence[Completion], moment: str, same_weights: bool
) -> float:
    """The mean difference between the engine's log-probabilities and the trainer's, in nats.

    Raises:
        RunError: the difference is too large.
    """
    sampled = torch.tensor(list(itertools.chain(*(c.rollout_logprobs for c in completions))))
    adapted = logprobs(learner, completions)
    base = logprobs(learner, completions, adapted=False)
    gap = (sampled - adapted).abs().mean().item()
    to_base = (sampled - base).abs().mean().item()
    effect = (adapted - base).abs().mean().item()
    limit = LARGEST_GAP * effect
    if not same_weights:
        # Another quantisation than the trainer's makes a larger gap. Training logs and corrects it;
        # the engine need only be nearer to the adapter than to the base.
        limit = to_base
    if gap <= limit or (gap <= ROUNDING and 2 * gap <= to_base):
        return gap
    fault = "it computes another model, another adapter or at another temperature"
    if to_base < gap / 4:
        fault = "it ignores the adapter"
    raise RunError(
        f"rollout.self_check: {moment}, the engine's log-probabilities are {gap:.3f} nats from the "
        f"trainer's and {to_base:.3f} from the base's: {fault}. Use another version of vLLM "
        "(0.32 is tested; vllm#34186 and #49354 are open), or rollout.engine=transformers; "
        "rollout.self_check=false starts the run all the same"
    )


def logprobs(learner: Learner, completions: Sequence[Completion], adapted: bool = True) -> Tensor:
    """The trainer's log-probabilities of the completions' tokens, [N] fp32 on the host, with or
    without the adapter."""
    policy = learner.policy
    tokens = pack(completions, policy.device, learner.settings.objective)
    with nullcontext() if adapted else policy.model.disable_adapter():
        return learner.measure(tokens, range(len(completions))).logprobs.cpu()
