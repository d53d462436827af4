"""Time a whole training step (rollouts, reward, update, sync): ours against TRL's GRPOTrainer.

    python benchmarks/step.py [--pairs 5] [--out FILE]
    [--set model=FOLDER train.max_tokens_per_microbatch=16384 ...]

The task is `writing.py` with the settings of `experiments.yaml`, one update per step and the
objective of `justrl`, which is TRL's `loss_type="dapo"`. The learning rate is next to nothing, so
that both sides sample from the same policy throughout. Each side has a process of its own, which
waits while the other works. Steps alternate; the first one of each side does not count.

Ours samples with vLLM. TRL does so on a GPU, colocated; on a CPU, where it cannot push weights into
vLLM, it samples with transformers' `generate`. Each step draws new completions of other lengths, so
the time per completion token is reported too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import now, save
from experiments import STUDIES, prepare

from stapo_lite.config import Config

SETTINGS = [
    "train.learning_rate=1.0e-12",
    "train.warmup_steps=0",
    "train.mini_batch_size=8",
    "log.save_steps=0",
]
RESULT = "step: "
"""Prefix of the line that a side prints for each step."""


def our_steps(config: Config) -> Iterator[dict[str, float]]:
    """Seconds and completion tokens of each step of `train`; the first step includes the start of
    the run."""
    from stapo_lite import Trainer

    completions = config.train.batch_size * config.rollout.num_generations
    start = now()
    for metrics in Trainer(config=config):
        yield {
            "seconds": now() - start,
            "tokens": round(completions * metrics["completion_length"]),
            "seconds of rollouts": metrics["seconds_rollout"],
        }
        start = now()


def trl_steps(config: Config) -> None:
    """Run `GRPOTrainer.train`, with a callback that reports each step."""
    import writing
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer
    from trl_arguments import trl_arguments

    drawn = {"tokens": 0, "start": 0.0}

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            drawn["tokens"], drawn["start"] = 0, now()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            answer({"seconds": now() - drawn["start"], "tokens": drawn["tokens"]})

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        drawn["tokens"] += sum(map(len, completion_ids))
        return writing.reward(**columns)

    engine: dict[str, Any] = {}
    if torch.cuda.is_available():
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
        engine["vllm_gpu_memory_utilization"] = config.rollout.gpu_memory_utilization
        engine["vllm_max_model_length"] = config.max_sequence_length
    arguments = trl_arguments(
        config, max_steps=config.train.max_steps, learning_rate=config.train.learning_rate, **engine
    )
    dataset = Dataset.from_list(writing.prompts()[0])
    trainer = GRPOTrainer(
        reward_funcs=reward, train_dataset=dataset, callbacks=[Stopwatch()], **arguments
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class Side:
    """A process that trains with one of the two trainers, one step at each call."""

    def __init__(self, name: str, given: argparse.Namespace):
        command = [sys.executable, __file__, "--side", name, "--pairs", str(given.pairs)]
        command += ["--set", *given.set]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()  # the first step, which does not count

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        raise SystemExit(f"a side ended with status {self._process.wait()}")

    def step(self) -> dict[str, float]:
        """Make one step; return its seconds and tokens."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Let the process finish after its last step."""
        self._process.communicate()


def answer(result: dict[str, float]) -> None:
    """Report a step to the parent process, and wait until it asks for the next one."""
    print(RESULT + json.dumps(result), flush=True)
    sys.stdin.readline()


def run_side(name: str, given: argparse.Namespace) -> None:
    """Run one side in this process."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*SETTINGS, f"train.max_steps={given.pairs + 1}", *given.set]
        config, _ = prepare(STUDIES["writing"], "justrl", 0, Path(folder, "run"), overrides)
        if name == "ours":
            for result in our_steps(config):
                answer(result)
        else:
            trl_steps(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of experiments.yaml"
    )
    parser.add_argument(
        "--side", choices=["ours", "TRL"], help="run this side only, as the child of a comparison"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.side:
        return run_side(given.side, given)
    sides = {name: Side(name, given) for name in ("ours", "TRL")}
    pairs = []
    for pair in range(given.pairs):
        order = list(sides)[:: (-1) ** pair]  # the first one alternates
        pairs.append({name: sides[name].step() for name in order})
    for side in sides.values():
        side.end()
    per_step, per_token = [], []
    for pair in pairs:
        ours, theirs = pair["ours"], pair["TRL"]
        ratio = theirs["seconds"] / ours["seconds"]
        per_step.append(ratio)
        per_token.append(ratio * ours["tokens"] / theirs["tokens"])
    result = {
        "TRL / ours, a completion token": statistics.median(per_token),
        "of each pair": [round(ratio, 3) for ratio in per_token],
        "TRL / ours, a step": statistics.median(per_step),
        "TRL's engine": "vLLM, colocated" if torch.cuda.is_available() else "transformers",
        "steps": pairs,
    }
    save(result, given.out)


if __name__ == "__main__":
    main()
