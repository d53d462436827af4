"""Is our baseline handicapped? TRL's GRPOTrainer on the task, settings and budget of the experiments.

    python benchmarks/experiments_trl.py [--seed 0] [--results FOLDER]

TRL's `loss_type="dapo"` is `justrl`: token mean, clip 0.2 and 0.28, no KL, no mask. Model, adapter, batches, optimiser
and learning rates are those of the experiments. What differs: TRL generates with transformers, the engine that it has
on a CPU, and does not correct for it; it shuffles completions before it cuts mini-batches, where ours keep groups; it
draws prompts in another order, so that seeds are not pairs; it divides an update's loss by half of the step's tokens,
ours by the update's own; and its entropy is exact, and taken during the updates. The trained adapter answers the
held-out prompts through our engine, as those of all runs do. Leaves `trl-dapo-SEED` beside the results of
`experiments.py`; begins anew where it was interrupted.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import writing
from common import commit
from datasets import Dataset
from experiments import HERE, STUDIES, judge, keep, prepare, render_held_out
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback
from trl import GRPOTrainer
from trl_arguments import trl_arguments

from stapo_lite.config import Config
from stapo_lite.files import write_lines
from stapo_lite.training.opening import open_run
from stapo_lite.training.run import learning_rate


def train(config: Config) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """TRL's run: a line of metrics for each step of ours, and the adapter."""
    train = config.train
    updates = train.batch_size // train.mini_batch_size
    arguments = trl_arguments(
        config,
        seed=config.seed,
        max_steps=updates * train.max_steps,
        logging_steps=updates,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
    )
    dataset = Dataset.from_list(writing.prompts()[0])
    trainer = GRPOTrainer(reward_funcs=writing.reward, train_dataset=dataset, **arguments)
    trainer.remove_callback(PrinterCallback)
    trainer.create_optimizer()
    rates = [learning_rate(train, step) / train.learning_rate for step in range(train.max_steps)]
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda update: rates[min(update // updates, len(rates) - 1)])
    trainer.train()
    logged = [line for line in trainer.state.log_history if "reward" in line]
    metrics = [
        {"step": step, "reward": line["reward"], "sampled_nll": line["entropy"], "learning_rate": line["learning_rate"]}
        for step, line in enumerate(logged, start=1)
    ]  # TRL's entropy is over all tokens, as ours of the samples
    return metrics, {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results/writing")
    parser.add_argument("--work", type=Path, default=Path("runs/writing"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of experiments.yaml")
    given = parser.parse_args()
    name, version = f"trl-dapo-{given.seed}", commit()
    folder = given.work / name
    shutil.rmtree(folder, ignore_errors=True)
    config, held_out = prepare(STUDIES["writing"], "justrl", given.seed, folder, given.set)
    metrics, adapter = train(config)
    with open_run(config) as run, torch.no_grad():
        for parameter_name, parameter in run.policy.parameters.items():
            parameter.copy_(adapter[parameter_name])
        run.engine.publish(run.policy, version=1)
        judged = {"step": config.train.max_steps} | judge(run, render_held_out(held_out, run))
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "held_out.jsonl", [judged])
    keep(folder, given.results / name, version)


if __name__ == "__main__":
    main()
