"""Time the training phase, from finished rollouts to the optimiser's step: ours against TRL's
GRPOTrainer.

    python benchmarks/update.py [--model FOLDER] [--zero 0 0.5 0.75] [--pairs 5] [--dtype bfloat16]
    [--out FILE]

On a GPU:

    python benchmarks/update.py --prompts 16 --prompt-length 256 --longest 4096 --max-tokens 32768

Under `accelerate launch` each process has its share of the rollouts; the peak is the first one's.

Both sides have the same rollouts, model and adapter, and make one update over all rollouts, with
truncated sampler correction, fused AdamW and gradient checkpointing. By default it is of `dapo`
(token mean, clip 0.2 and 0.28, no KL, no mask). `--algorithm` takes each method that TRL has, but
`gspo`: TRL applies the correction of tokens to whole sequences there. The learning rate is 0 and
the gradient is never clipped, so that every update does the same work and the gradients can be
compared with each other and with float32. Lengths of completions are log-normal, clipped. `--zero`
is the share of groups without advantage. Each pair runs both sides, in alternating order. Ratios
are TRL's seconds divided by ours within a pair; medians are over the pairs.

The dtype is by default bfloat16 where the card or the CPU has hardware for it, float32 elsewhere.
TRL runs `train()` for one step, with its adapter from `peft_config` and bf16 by its autocast.
`_generate` returns the rollouts and starts the clock, `on_step_end` stops it. In between are
padding, a forward pass for the old log-probabilities and the correction from them (as every user of
vLLM has it; the ratio without this part is reported too), advantages, micro-batches, metrics, clip
and step. TRL's chunked LM head, SDPA, shuffle and padding are left as they are. Every row is as
wide as the longest of the batch (`trl_arguments.py`). All prompts have the same length, which
spares TRL the padding on the left.

Ours runs `update` and the reduction of its metrics with the default settings. Advantages are
normalised as in TRL, with 1e-4 added to the standard deviation.
"""

import argparse
import itertools
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from common import now, save
from datasets import Dataset
from memory import peak_bytes
from torch import Tensor
from transformers import AutoConfig, PrinterCallback, TrainerCallback
from trl import GRPOTrainer
from trl_arguments import trl_arguments

from stapo_lite.assemble import update_settings
from stapo_lite.config import Config
from stapo_lite.extras.quickstart.model import fetch_model
from stapo_lite.method.advantages import group_advantages
from stapo_lite.method.microbatches import (
    count_work,
    deal,
    sequence_length,
    split_by_tokens,
)
from stapo_lite.method.tokens import is_trained, pack
from stapo_lite.model.loading import load_weights
from stapo_lite.model.policy import Policy, make_optimizer, make_policy
from stapo_lite.model.processes import resolve_dtype
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.learner import Learner
from stapo_lite.training.memory import MemoryBudget, MemorySetting
from stapo_lite.training.metrics import gather_metrics
from stapo_lite.training.update import update
from stapo_lite.types import Completion, Prompt

GAP = 0.3
"""Standard deviation of the difference between the log-probabilities of trainer and sampler, in
nats; the correction then truncates 1 % of the tokens."""


class Ours:
    """One update of ours at each `run`; keeps the gradient of the last one."""

    def __init__(
        self, rollouts: list[Completion], policy: Policy, config: Config, accelerator: Accelerator
    ):
        self.rollouts, self.gradient = rollouts, []
        optimizer = make_optimizer(policy, config.train)
        optimizer.register_step_pre_hook(self._keep_gradient)
        budget = make_budget(config, policy)
        self.learner = Learner(
            update_settings(config), policy, optimizer, budget, accelerator, Progress()
        )

    def _keep_gradient(self, *step: Any) -> None:
        self.gradient = [p.grad for p in self.learner.policy.parameters.values()]

    def run(self) -> dict[str, float]:
        """Make an update; return its loss and seconds."""
        start = now()
        self.learner.set_learning_rate(0.0)
        learner = self.learner
        objective = learner.settings.objective
        accelerator = learner.accelerator
        work = count_work(self.rollouts, objective, first=True)
        numbers = deal(work, accelerator.num_processes)[accelerator.process_index]
        share = [self.rollouts[number] for number in numbers]
        batch = pack(share, learner.policy.device, objective)
        done = update(learner, batch)
        metrics: Any = gather_metrics([done.metrics])
        return {"loss": metrics["loss"], "seconds": now() - start}


class Trl(GRPOTrainer, TrainerCallback):
    """TRL's trainer with finished rollouts in place of an engine: one step at each `run`; keeps the
    gradient of the last one."""

    def __init__(self, rollouts: list[Completion], **arguments: Any):
        self.gradient, self.times = [], {}
        super().__init__(reward_funcs=self.rewards, callbacks=[self], **arguments)
        size = len(rollouts) // self.accelerator.num_processes
        start = size * self.accelerator.process_index
        self.rollouts = rollouts[start : start + size]
        self.remove_callback(PrinterCallback)
        self.use_vllm = True  # only now, since the constructor would start vLLM
        # train() would empty the allocator's cache each time.
        self.accelerator.free_memory = lambda *objects: None

    def rewards(self, **columns: Any) -> list[float | None]:
        return [c.reward for c in self.rollouts]

    def _generate(self, prompts: list) -> tuple:
        self.times["generated"] = now()
        prompt_ids = [c.prompt.token_ids for c in self.rollouts]
        completion_ids = [c.token_ids for c in self.rollouts]
        logprobs = [c.rollout_logprobs for c in self.rollouts]
        return prompt_ids, completion_ids, None, prompts, logprobs, {}, None, []

    def _generate_and_score_completions(self, inputs: list) -> dict:
        result = super()._generate_and_score_completions(inputs)
        self.times["scored"] = now()
        return result

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        self.gradient = [p.grad for p in model.parameters() if p.requires_grad]

    def on_step_end(self, args, state, control, **others):
        self.times["stepped"] = now()

    def run(self) -> dict[str, float]:
        """Make a step; return its loss, its seconds, and those until the old log-probabilities and
        advantages are there (`scoring`)."""
        loss = self.train().training_loss
        start = self.times["generated"]
        return {
            "loss": loss,
            "seconds": self.times["stepped"] - start,
            "scoring": self.times["scored"] - start,
        }


def make_trl(rollouts: list[Completion], config: Config) -> Trl:
    """TRL's trainer for one step with the settings of the config."""
    arguments = trl_arguments(
        config,
        max_steps=1,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=config.objective.sampler_cap,
        learning_rate=0.0,
    )
    return Trl(
        rollouts,
        train_dataset=Dataset.from_dict({"prompt": ["any"] * config.train.batch_size}),
        **arguments,
    )


def make_rollouts(config: Config) -> list[Completion]:
    """Rollouts of random tokens: prompts of equal length, completions whose median length is a
    quarter of the longest."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = AutoConfig.from_pretrained(config.model).vocab_size
    generations, longest = config.rollout.num_generations, config.rollout.max_completion_length

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = []
    for _ in range(config.train.batch_size):
        prompts.append(Prompt("", draw(config.data.max_prompt_length), answer=""))
    normal = torch.randn(len(prompts) * generations, generator=generator)
    lengths = longest / 4 * torch.exp(0.9 * normal)
    lengths[lengths.argmax()] = longest
    rollouts = []
    for index, length in enumerate(lengths.long().clamp(1, longest).tolist()):
        prompt, truncated = prompts[index // generations], length == longest
        completion = Completion(prompt, draw(length), [], truncated=truncated, adapter_version=0)
        rollouts.append(completion)
    return rollouts


def give_rewards(rollouts: list[Completion], generations: int, zero: float) -> None:
    """Set rewards of 0 or 1, and the advantages. In a share `zero` of the groups all rewards are 1,
    so that these groups have no advantage."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(len(rollouts) // generations, generations, generator=generator).round()
    rewards[:, 0], rewards[:, 1] = 0, 1
    rewards[: round(zero * len(rewards))] = 1
    advantages = group_advantages(rewards, eps=1e-4)
    values = zip(rollouts, rewards.flatten(), advantages.flatten(), strict=True)
    for completion, reward, advantage in values:
        completion.reward, completion.advantage = reward.item(), advantage.item()


def make_budget(config: Config, policy: Policy) -> MemoryBudget:
    """Micro-batches of the config's size, with all layers checkpointed."""
    tokens: Any = config.train.max_tokens_per_microbatch
    setting = MemorySetting(offload=False, checkpointing=True, tokens=tokens)
    return MemoryBudget(setting, policy.save_memory)


def give_logprobs(rollouts: list[Completion], policy: Policy, config: Config) -> None:
    """Set the sampler's log-probabilities: those of the policy plus noise."""
    generator = torch.Generator().manual_seed(0)
    batch = pack(rollouts, policy.device, config.objective)
    learner: Any = SimpleNamespace(policy=policy, budget=make_budget(config, policy))
    measured = Learner.measure(learner, batch, range(len(rollouts))).logprobs.cpu()
    parts = measured.split([len(c.token_ids) for c in rollouts])
    for completion, logprobs in zip(rollouts, parts, strict=True):
        noise = GAP * torch.randn(len(logprobs), generator=generator)
        completion.rollout_logprobs = (logprobs + noise).tolist()


def share_adapter(policy: Policy, *models: torch.nn.Module) -> None:
    """Give the policy's adapter a B that is not zero, so that A has a gradient, and copy it to the
    models."""
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
            for model in models:
                model.get_parameter(name).copy_(parameter)


def flat(gradient: list[Tensor]) -> Tensor:
    """All entries of a gradient in float64."""
    return torch.cat([part.flatten().double() for part in gradient])


def make_config(given: argparse.Namespace) -> Config:
    """The config of a run with the sizes of the command line."""
    return Config(
        algorithm=given.algorithm,
        model=given.model,
        output_dir=tempfile.gettempdir(),
        dtype=given.dtype,
        data={"source": "unused", "max_prompt_length": given.prompt_length},
        rollout={
            "max_completion_length": given.longest,
            "num_generations": given.generations,
        },
        train={
            "max_grad_norm": 1e9,
            "batch_size": given.prompts,
            "mini_batch_size": given.prompts,
            "max_tokens_per_microbatch": given.max_tokens,
        },
    )


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Compare the two sides at each share of groups without advantage."""
    config = make_config(given)
    rollouts = make_rollouts(config)
    trl = make_trl(rollouts, config)
    device, exact_config = trl.accelerator.device, config.model_copy(update={"dtype": "float32"})
    policy = make_policy(load_weights(config.model, config.dtype, device), config)
    exact = make_policy(load_weights(config.model, "float32", device), exact_config)
    share_adapter(policy, trl.model, exact.model)
    give_logprobs(rollouts, policy, config)
    ours = Ours(rollouts, policy, config, trl.accelerator)
    reference = Ours(rollouts, exact, config, trl.accelerator)

    result: dict[str, Any] = {"rows of TRL's micro-batches": trl.args.per_device_train_batch_size}
    for share in given.zero:
        give_rewards(rollouts, given.generations, share)
        measured = measure_sides(ours, trl, reference, given.pairs)
        result[f"zero {share}"] = measured | count_tokens(rollouts, config)
    return result


def measure_sides(ours: Ours, trl: Trl, reference: Ours, pairs: int) -> dict[str, Any]:
    """Times, memory, losses and gradients of the two sides with the rollouts as they are now.

    Args:
        reference: ours in float32.
    """
    sides = {"ours": ours, "TRL": trl}
    # This warms both sides up, too.
    peaks = {name: round(peak_bytes(side.run) / 2**20, 1) for name, side in sides.items()}
    runs = []
    for pair in range(pairs):
        order = list(sides)[:: (-1) ** pair]  # the first one alternates
        runs.append({name: sides[name].run() for name in order})
    our_seconds = [run["ours"]["seconds"] for run in runs]
    trl_seconds = [run["TRL"]["seconds"] for run in runs]
    scoring = [run["TRL"]["scoring"] for run in runs]
    ratios, without_scoring = [], []
    for a, b, s in zip(our_seconds, trl_seconds, scoring, strict=True):
        ratios.append(b / a)
        without_scoring.append((b - s) / a)
    losses = runs[-1] | {"float32": reference.run()}
    gradients = {
        "ours": flat(ours.gradient),
        "TRL": flat(trl.gradient),
        "float32": flat(reference.gradient),
    }
    differences = {}
    for a, b in itertools.combinations(gradients, 2):
        difference = (gradients[a] - gradients[b]).norm() / gradients[b].norm()
        differences[f"{a}, {b}"] = difference.item()
    return {
        "TRL / ours": statistics.median(ratios),
        "TRL / ours of each pair": [round(ratio, 3) for ratio in ratios],
        "TRL from its first micro-batch on / ours": statistics.median(without_scoring),
        "seconds": {
            "ours": statistics.median(our_seconds),
            "TRL": statistics.median(trl_seconds),
            "TRL before its first": statistics.median(scoring),
        },
        "peak MiB beyond the models": peaks,
        "loss": {name: run["loss"] for name, run in losses.items()},
        "gradient norm": {name: gradient.norm().item() for name, gradient in gradients.items()},
        "relative difference of the gradients": differences,
    }


def count_tokens(rollouts: list[Completion], config: Config) -> dict[str, Any]:
    """Tokens of the rollouts, and those that each side runs through the model."""
    trained = [rollout for rollout in rollouts if is_trained(rollout, config.objective)]
    lengths = list(map(sequence_length, trained))
    microbatches = split_by_tokens(lengths, config.train.max_tokens_per_microbatch)
    longest = config.data.max_prompt_length + config.rollout.max_completion_length
    return {
        "tokens": sum(map(sequence_length, rollouts)),
        "completion tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "tokens with a gradient": sum(lengths),
        "tokens that run, padding included": {
            "ours": sum(len(rows) * lengths[rows[0]] for rows in microbatches),
            "TRL": len(rollouts) * longest,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder with weights and tokenizer; default: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--algorithm", default="dapo")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-length", type=int, default=16, help="tokens of every prompt")
    parser.add_argument("--longest", type=int, default=80, help="tokens of the longest completion")
    parser.add_argument(
        "--max-tokens", type=int, default=768, help="tokens of a micro-batch of ours"
    )
    parser.add_argument(
        "--zero",
        type=float,
        nargs="+",
        default=[0.0, 0.5, 0.75],
        help="shares of groups without advantage",
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.model = given.model or str(fetch_model())
    given.dtype = resolve_dtype(given.dtype, None)
    result = compare(given)
    settings = vars(given) | {"model": Path(given.model).name}
    path = settings.pop("out")
    setup = {"threads": torch.get_num_threads(), "TRL": version("trl")}
    if PartialState().is_main_process:
        save(settings | setup | result, path)


if __name__ == "__main__":
    main()
