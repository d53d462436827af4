"""The training phase, from finished rollouts to the optimiser's step: ours against TRL's GRPOTrainer.

    python benchmarks/update.py [--model FOLDER] [--zero 0 0.5 0.75] [--pairs 5] [--dtype bfloat16] [--out FILE]
    python benchmarks/update.py --prompts 16 --prompt-length 256 --longest 4096 --max-tokens 32768  # on a GPU

Same rollouts, model and adapter; one update of `dapo` (token mean, clip 0.2 and 0.28, no KL, no mask) over all of them
with truncated sampler correction, fused AdamW, gradient checkpointing. The learning rate is 0 and the gradient's clip
far away, so that every update does the same work and the gradients can be compared, with each other and with float32.
Completions are log-normal in length, clipped; `--zero` is the share of groups without advantage. Both run in each pair,
in alternating order; ratios are TRL's seconds divided by ours, within a pair; medians are over the pairs.

TRL: `train()` of one step, its adapter from `peft_config`, bf16 by its autocast. `_generate` returns the rollouts and
starts the clock, `on_step_end` stops it: padding, a forward pass for the old log-probabilities and the correction from
them (as for every user of vLLM; the ratio without that part is reported too), advantages, micro-batches, metrics, clip,
step. Its chunked LM head, SDPA, shuffle and padding are left as they are. Every row is as wide as the batch's longest
(`trl_arguments.py`). Prompts of equal length spare it the padding on the left.

Ours: `update` and the reduction of its metrics, with the default settings. Advantages are normalised as TRL does it,
with 1e-4 added to the standard deviation.
"""

import argparse
import itertools
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from common import now, save
from datasets import Dataset
from memory import peak_bytes
from torch import Tensor
from transformers import AutoConfig, PrinterCallback, TrainerCallback
from trl import GRPOTrainer
from trl_arguments import trl_arguments

from stapo_lite.algorithm.advantages import group_advantages
from stapo_lite.algorithm.microbatches import TokenBudget, pack, sequence_length, split_by_tokens
from stapo_lite.config import Config
from stapo_lite.model.policy import Policy, load_policy, make_optimizer
from stapo_lite.tools.quickstart import fetch_model
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.update import Learner, measure, update, with_gradient
from stapo_lite.types import Completion, Prompt

GAP = 0.3  # standard deviation between the log-probabilities of trainer and sampler: 1 % of the tokens are truncated


class Ours:
    """One update a run; keeps the gradient of the last."""

    def __init__(self, rollouts: list[Completion], policy: Policy, config: Config, accelerator: Accelerator):
        self.rollouts, self.gradient = rollouts, []
        optimizer = make_optimizer(policy, config.train)
        optimizer.register_step_pre_hook(self._keep_gradient)
        budget = TokenBudget(config.train.max_tokens_per_microbatch)
        self.learner = Learner(config, policy, optimizer, budget, accelerator, Progress(config.objective.s2t.tau_p))

    def _keep_gradient(self, *step: Any) -> None:
        self.gradient = [p.grad for p in self.learner.policy.parameters.values()]

    def run(self) -> dict[str, float]:
        start = now()
        self.learner.begin_step(learning_rate=0.0)
        update(self.learner, pack(self.rollouts, self.learner.policy.device))
        loss = self.learner.tally.reduce(self.learner.accelerator)["loss"]
        return {"loss": loss, "seconds": now() - start}


class Trl(GRPOTrainer, TrainerCallback):
    """TRL's trainer with finished rollouts in place of an engine; one step a run; keeps the gradient of the last."""

    def __init__(self, rollouts: list[Completion], **arguments: Any):
        self.rollouts, self.gradient, self.times = rollouts, [], {}
        super().__init__(reward_funcs=self.rewards, callbacks=[self], **arguments)
        self.remove_callback(PrinterCallback)
        self.use_vllm = True  # not before: it would start one
        self.accelerator.free_memory = lambda *objects: None  # train() would empty the allocator's cache each time

    def rewards(self, **columns: Any) -> list[float | None]:
        return [c.reward for c in self.rollouts]

    def _generate(self, prompts: list) -> tuple:
        self.times["generated"] = now()
        prompt_ids, completion_ids = [c.prompt.token_ids for c in self.rollouts], [c.token_ids for c in self.rollouts]
        return prompt_ids, completion_ids, None, prompts, [c.rollout_logprobs for c in self.rollouts], {}, None, []

    def _generate_and_score_completions(self, inputs: list) -> dict:
        result = super()._generate_and_score_completions(inputs)
        self.times["scored"] = now()
        return result

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        self.gradient = [p.grad for p in model.parameters() if p.requires_grad]

    def on_step_end(self, args, state, control, **others):
        self.times["stepped"] = now()

    def run(self) -> dict[str, float]:
        loss, start = self.train().training_loss, self.times["generated"]
        return {"loss": loss, "seconds": self.times["stepped"] - start, "scoring": self.times["scored"] - start}


def make_trl(rollouts: list[Completion], config: Config) -> Trl:
    arguments = trl_arguments(
        config,
        max_steps=1,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=config.objective.sampler_cap,
        learning_rate=0.0,
    )
    return Trl(rollouts, train_dataset=Dataset.from_dict({"prompt": ["any"] * config.train.batch_size}), **arguments)


def make_rollouts(config: Config) -> list[Completion]:
    """Random tokens: prompts of equal length, completions of a quarter of the greatest length at the median."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = AutoConfig.from_pretrained(config.model).vocab_size
    generations, longest = config.rollout.num_generations, config.rollout.max_completion_length

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = [Prompt("", draw(config.data.max_prompt_length), answer="") for _ in range(config.train.batch_size)]
    lengths = longest / 4 * torch.exp(0.9 * torch.randn(len(prompts) * generations, generator=generator))
    lengths[lengths.argmax()] = longest
    return [
        Completion(prompts[index // generations], draw(n), [], truncated=n == longest, adapter_version=0)
        for index, n in enumerate(lengths.long().clamp(1, longest).tolist())
    ]


def give_rewards(rollouts: list[Completion], generations: int, zero: float) -> None:
    """Right or wrong; all right in a share `zero` of the groups."""
    rewards = torch.rand(len(rollouts) // generations, generations, generator=torch.Generator().manual_seed(0)).round()
    rewards[:, 0], rewards[:, 1] = 0, 1
    rewards[: round(zero * len(rewards))] = 1
    advantages = group_advantages(rewards, eps=1e-4)
    for completion, reward, advantage in zip(rollouts, rewards.flatten(), advantages.flatten(), strict=True):
        completion.reward, completion.advantage = reward.item(), advantage.item()


def give_logprobs(rollouts: list[Completion], policy: Policy, max_tokens: int) -> None:
    """The sampler's: those of the policy and some noise."""
    generator = torch.Generator().manual_seed(0)
    batch = pack(rollouts, policy.device)
    measured = measure(policy, batch, range(len(rollouts)), TokenBudget(max_tokens)).logprobs.cpu()
    for completion, logprobs in zip(rollouts, measured.split([len(c.token_ids) for c in rollouts]), strict=True):
        noise = GAP * torch.randn(len(logprobs), generator=generator)
        completion.rollout_logprobs = (logprobs + noise).tolist()


def share_adapter(policy: Policy, *models: torch.nn.Module) -> None:
    """The policy's, with a B that is not zero, so that A has a gradient."""
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
            for model in models:
                model.get_parameter(name).copy_(parameter)


def flat(gradient: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten().double() for part in gradient])


def compare(
    model: str,
    *,
    prompts: int,
    generations: int,
    prompt_length: int,
    longest: int,
    max_tokens: int,
    zero: list[float],
    pairs: int,
    dtype: str,
    **train: Any,
) -> dict[str, Any]:
    """Arguments as on the command line; `train` has more keys of the config's section of that name."""
    train |= {"batch_size": prompts, "mini_batch_size": prompts, "max_tokens_per_microbatch": max_tokens}
    sections = {
        "data": {"source": "unused", "max_prompt_length": prompt_length},
        "rollout": {"max_completion_length": longest, "num_generations": generations},
        "train": {"max_grad_norm": 1e9} | train,
    }
    config = Config(algorithm="dapo", model=model, output_dir=tempfile.gettempdir(), dtype=dtype, **sections)
    rollouts = make_rollouts(config)
    trl = make_trl(rollouts, config)
    policy, exact = (
        load_policy(config.model_copy(update={"dtype": name}), trl.accelerator.device) for name in (dtype, "float32")
    )
    share_adapter(policy, trl.model, exact.model)
    give_logprobs(rollouts, policy, max_tokens)
    sides = {"ours": Ours(rollouts, policy, config, trl.accelerator), "TRL": trl}
    reference = Ours(rollouts, exact, config, trl.accelerator)

    result: dict[str, Any] = {"rows of TRL's micro-batches": trl.args.per_device_train_batch_size}
    for share in zero:
        give_rewards(rollouts, generations, share)
        peaks = {name: round(peak_bytes(side.run) / 2**20, 1) for name, side in sides.items()}  # warms up too
        runs = [{name: sides[name].run() for name in list(sides)[:: (-1) ** pair]} for pair in range(pairs)]
        ours, theirs = ([run[name]["seconds"] for run in runs] for name in sides)
        scoring = [run["TRL"]["scoring"] for run in runs]
        runs[-1]["float32"] = reference.run()
        gradients = {name: flat(side.gradient) for name, side in (sides | {"float32": reference}).items()}
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        lengths = [sequence_length(rollouts[row]) for row in with_gradient(rollouts, config.objective)]
        result[f"zero {share}"] = {
            "TRL / ours": statistics.median(ratios),
            "TRL / ours of each pair": [round(ratio, 3) for ratio in ratios],
            "TRL from its first micro-batch on / ours": statistics.median(
                (b - s) / a for a, b, s in zip(ours, theirs, scoring, strict=True)
            ),
            "seconds": {
                "ours": statistics.median(ours),
                "TRL": statistics.median(theirs),
                "TRL before its first": statistics.median(scoring),
            },
            "peak MiB beyond the models": peaks,
            "tokens": sum(map(sequence_length, rollouts)),
            "tokens with a gradient": sum(lengths),
            "tokens that run, padding included": {
                "ours": sum(len(rows) * lengths[rows[0]] for rows in split_by_tokens(lengths, max_tokens)),
                "TRL": len(rollouts) * (prompt_length + longest),
            },
            "loss": {name: run["loss"] for name, run in runs[-1].items()},
            "gradient norm": {name: gradient.norm().item() for name, gradient in gradients.items()},
            "relative difference of the gradients": {
                f"{a}, {b}": ((gradients[a] - gradients[b]).norm() / gradients[b].norm()).item()
                for a, b in itertools.combinations(gradients, 2)
            },
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with weights and tokenizer; SmolLM2-135M-Instruct where left out")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-length", type=int, default=16, help="of every prompt")
    parser.add_argument("--longest", type=int, default=80, help="of the completions")
    parser.add_argument("--max-tokens", type=int, default=768, help="of a micro-batch of ours")
    parser.add_argument("--zero", type=float, nargs="+", default=[0.0, 0.5, 0.75], help="shares without advantage")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path)
    arguments = vars(parser.parse_args())
    path = arguments.pop("out")
    arguments["model"] = arguments["model"] or str(fetch_model())
    result = compare(**arguments)
    arguments["model"] = Path(arguments["model"]).name
    save(arguments | {"threads": torch.get_num_threads(), "TRL": version("trl")} | result, path)


if __name__ == "__main__":
    main()
