"""The methods that the paper compares, with seeds: what STAPO does to reward and entropy.

    python benchmarks/experiments.py [STUDY] [--only stapo justrl ...] [--seeds 0 1 2] [--at-once 2] [--results FOLDER]

A study is a task, its methods and what it changes in `experiments.yaml`. Runs what has no result yet, the methods of a
seed before those of the next, a few at once with one thread each. A run that is interrupted goes on from its checkpoint
in `runs/STUDY`. A finished one leaves in FOLDER/METHOD-SEED: `metrics.jsonl`, `held_out.jsonl` (what the adapter does
on prompts that it never trained on), `config.yaml`, and `environment.json` with the commit. `docs/results.md` says
which settings were set down before the first run and which after some.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

import alliteration
import torch
import writing
from common import commit

from stapo_lite.config import Config, load_config
from stapo_lite.data.prompts import Prompts
from stapo_lite.evaluation.exam import score
from stapo_lite.files import read_lines, write_lines
from stapo_lite.rollout import Decoding
from stapo_lite.training.lifecycle import end_on_sigterm
from stapo_lite.training.loop import assign_advantages, mini_batches, sample_groups
from stapo_lite.training.opening import open_run
from stapo_lite.training.run import Run
from stapo_lite.training.update import update
from stapo_lite.types import Completion, Prompt, derived_seed

HERE = Path(__file__).parent
CONFIG = HERE / "experiments.yaml"
METHODS = {
    "stapo": ["algorithm=stapo"],
    "justrl": ["algorithm=justrl"],
    "grpo": ["algorithm=grpo"],
    "20-entropy": ["algorithm=20-entropy"],
    # The paper's ablations of which candidates are silenced.
    "full": ["algorithm=stapo", "objective.s2t.preset=full"],
    "high-entropy": ["algorithm=stapo", "objective.s2t.preset=high-entropy"],
    "random": ["algorithm=stapo", "objective.s2t.preset=random"],
    # With its q = 0.75, low and high entropy have two thirds of their tokens in common; these two have none.
    "lower-half": ["algorithm=stapo", "objective.s2t.quantile=0.5"],
    "upper-half": ["algorithm=stapo", "objective.s2t.preset=high-entropy", "objective.s2t.quantile=0.5"],
    # Its two thresholds, 0.002 and 0.75.
    "tau_p=0.0005": ["algorithm=stapo", "objective.s2t.tau_p=0.0005"],
    "tau_p=0.008": ["algorithm=stapo", "objective.s2t.tau_p=0.008"],
    "q=0.9": ["algorithm=stapo", "objective.s2t.quantile=0.9"],
}
"""Overrides of each method."""


class Study(NamedTuple):
    """What is compared, on which task, with which other settings."""

    methods: Sequence[str]
    overrides: Sequence[str] = ()
    task: ModuleType = writing


STUDIES = {
    "writing": Study(
        ("stapo", "justrl", "grpo", "20-entropy", "full", "high-entropy", "random", "lower-half", "upper-half")
    ),
    "unstable": Study(("stapo", "justrl"), ["train.learning_rate=1.0e-3"]),
    "unstable-3e-3": Study(("stapo", "justrl"), ["train.learning_rate=3.0e-3"]),
    "alliteration": Study(("stapo", "justrl", "random"), task=alliteration),
    "sensitivity": Study(("tau_p=0.0005", "tau_p=0.008", "q=0.9"), ["train.max_steps=30"]),
}
"""The main one first; `sensitivity` is compared with the first steps of its `stapo` and `lower-half`."""
HELD_OUT_STEPS = 10
"""Steps between two looks at the held-out prompts."""


def prepare(
    study: Study, method: str, seed: int, folder: Path, overrides: Sequence[str]
) -> tuple[Config, list[dict[str, Any]]]:
    """Write the prompts to the run folder; return the config of the run and the rows held out."""
    rows, held_out = study.task.prompts()
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "prompts.jsonl", rows)
    own = [f"seed={seed}", f"output_dir={folder}", f"data.source={folder / 'prompts.jsonl'}"]
    own.append(f"reward.functions=[{study.task.__name__}:reward]")
    return load_config(CONFIG, [*METHODS[method], *study.overrides, *own, *overrides]), held_out


def render_held_out(rows: Sequence[dict[str, Any]], run: Run) -> Sequence[Prompt]:
    """The held-out prompts as the model reads them."""
    data = run.config.data.model_copy(update={"source": "held out", "filter_overlong_prompts": False})
    return Prompts(rows, run.tokenizer, data, graded=False)


def train_one(study: Study, method: str, seed: int, folder: Path, out: Path, overrides: Sequence[str]) -> None:
    """Train, or go on, and write the result."""
    config, held_out = prepare(study, method, seed, folder, overrides)
    looks = {line["step"]: line for line in read_lines(folder / "held_out.jsonl")}
    version = commit()

    def look(run: Run, step: int) -> None:
        """Note what the engine's adapter does on the held-out prompts, once a step; the clock stands."""
        if step not in looks:
            looks[step] = {"step": step} | judge(run, prompts)
            write_lines(folder / "held_out.jsonl", looks.values())
        run.clock.start()

    with open_run(config, resume=True) as run:
        prompts = render_held_out(held_out, run)
        for step in run.steps():
            rollouts = sample_groups(run, step)  # of the adapter after the step before, which the engine has now
            if (step - 1) % HELD_OUT_STEPS == 0:
                look(run, step - 1)
            assign_advantages(run, rollouts.batch)
            updates = [update(run.learner, batch) for batch in mini_batches(run, rollouts.batch)]
            run.record(step, rollouts, updates)
        run.engine.publish(run.policy, version=config.train.max_steps + 1)
        look(run, config.train.max_steps)
    keep(folder, out, version)


def keep(folder: Path, out: Path, version: str) -> None:
    """Write the result of a finished run, which `version` of the code has made."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "held_out.jsonl"):
        write_lines(out / name, map(short, read_lines(folder / name)))
    config_text = (folder / "config.yaml").read_text("utf-8").replace(str(Path.home()), "~")
    (out / "config.yaml").write_text(config_text, encoding="utf-8")
    environment = json.loads((folder / "environment.json").read_text("utf-8")) | {"commit": version}
    (out / "environment.json").write_text(json.dumps(environment, indent=1) + "\n", encoding="utf-8")


def answer(run: Run, prompts: Sequence[Prompt], temperature: float, salt: str = "held out") -> list[Completion]:
    """One answer to each prompt from the engine, with its reward; the same draws for the same salt."""
    decoding = Decoding(run.config.rollout.max_completion_length, temperature, top_p=1.0)
    seeds = [derived_seed(salt, number) for number in range(len(prompts))]
    answers = dict(run.engine.stream(prompts, seeds, [decoding] * len(prompts)))
    completions = [answers[number] for number in range(len(prompts))]
    score(completions, run.tokenizer, run.rewards, seed=0, step=run.progress.step + 1)
    return completions


def judge(run: Run, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """One answer to each prompt: mean reward, each answer's (for errors over prompts), the share of full rewards,
    length, and per token what the policy and the untrained base think of it, in nats: `nll`, `base_nll`, and `entropy`
    of the policy's whole distribution.
    `greedy_reward` is that of the likeliest tokens, which a policy that merely becomes surer leaves as they are."""
    completions = answer(run, prompts, run.config.rollout.temperature)
    greedy = answer(run, prompts, temperature=0.01)  # 0 in effect, which not every engine takes
    with torch.no_grad():
        parts = [completions[i : i + 20] for i in range(0, len(completions), 20)]
        now = [run.policy.statistics(part) for part in parts]
        base = torch.cat([run.policy.reference_logprobs(part) for part in parts])
    return {
        "reward": fmean(c.reward or 0.0 for c in completions),
        "greedy_reward": fmean(c.reward or 0.0 for c in greedy),
        "right_share": fmean(c.reward == 1 for c in completions),
        "completion_length": fmean(len(c.token_ids) for c in completions),
        "truncated_share": fmean(c.truncated for c in completions),
        "nll": -torch.cat([s.logprobs for s in now]).mean().item(),
        "base_nll": -base.mean().item(),
        "entropy": torch.cat([s.entropy for s in now]).mean().item(),
        "rewards": [round(c.reward or 0.0, 4) for c in completions],
        "samples": [[c.prompt.columns, c.text, c.reward] for c in completions[:4]],
    }


def short(line: dict[str, Any]) -> dict[str, Any]:
    """Six significant digits, for the file's sake."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in line.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=STUDIES, default="writing")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="these methods of the study")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/STUDY")
    parser.add_argument("--work", type=Path, help="run folders, with checkpoints; default: runs/STUDY")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of experiments.yaml")
    parser.add_argument("--here", action="store_true", help="train in this process, not in one for each run")
    given = parser.parse_args()
    study = STUDIES[given.study]
    results, work = given.results or HERE / "results" / given.study, given.work or Path("runs") / given.study
    wanted = [f"{method}-{seed}" for seed, method in itertools.product(given.seeds, given.only or study.methods)]
    names = [name for name in wanted if not (results / name / "environment.json").exists()]

    if given.here:
        end_on_sigterm()
        for name in names:
            method, _, seed = name.rpartition("-")
            train_one(study, method, int(seed), work / name, results / name, given.set)
        return

    def start(name: str) -> int:
        method, _, seed = name.rpartition("-")
        folders = ["--results", str(results), "--work", str(work), "--set", *given.set]
        command = [sys.executable, __file__, given.study, "--here", "--only", method, "--seeds", seed, *folders]
        work.mkdir(parents=True, exist_ok=True)
        with (work / f"{name}.log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            status = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
        print(f"{name}: {'finished' if status == 0 else f'failed, see {log.name}'}", flush=True)
        return status

    with ThreadPoolExecutor(given.at_once) as pool:
        raise SystemExit(max(pool.map(start, names), default=0))


if __name__ == "__main__":
    main()
