"""Train with each of the paper's methods and several seeds: what STAPO does to reward and entropy.

    python benchmarks/experiments.py [STUDY] [--only stapo justrl ...] [--seeds 0 1 2] [--at-once 2]

A study is a task, its methods and a config. Each run has a process of its own with one thread, a
few at a time, the methods of one seed before those of the next. Runs that are in
`results/STUDY.parquet` already are skipped, and an interrupted one continues from its checkpoint in
`runs/STUDY/METHOD-SEED`. A finished run is added to that file (`study_file.py`).
"""

import argparse
import itertools
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

import countdown
import torch
import writing
from common import commit
from study_file import RESULT, add_results_option, collect_results, finished_runs, keep_result

from stapo_lite.assemble import PythonInputs, open_run
from stapo_lite.config import Config, load_config
from stapo_lite.data.prompts import make_prompts
from stapo_lite.files import read_lines, write_lines
from stapo_lite.rollout.engine import Decoding
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.lifecycle import end_on_sigterm
from stapo_lite.training.loop import decode_and_score, train
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Prompt, derived_seed

HERE = Path(__file__).parent
METHODS = {
    "stapo": ["algorithm=stapo"],
    "justrl": ["algorithm=justrl"],
    "grpo": ["algorithm=grpo"],
    "20-entropy": ["algorithm=20-entropy"],
    # The paper's ablations: which candidates are silenced.
    "full": ["algorithm=stapo", "objective.s2t.preset=full"],
    "high-entropy": ["algorithm=stapo", "objective.s2t.preset=high-entropy"],
    "random": ["algorithm=stapo", "objective.s2t.preset=random"],
    # With the paper's q = 0.75, the masks of low and of high entropy share two thirds of their
    # tokens. These two masks share none.
    "lower-half": ["algorithm=stapo", "objective.s2t.quantile=0.5"],
    "upper-half": [
        "algorithm=stapo",
        "objective.s2t.preset=high-entropy",
        "objective.s2t.quantile=0.5",
    ],
}
"""Overrides of a study's config for each method."""


class Study(NamedTuple):
    """Methods to compare, on which task."""

    methods: Sequence[str]
    task: ModuleType = writing
    config: str = "experiments.yaml"
    held_out_steps: int = 10
    """Steps between two evaluations on the held-out prompts."""


STUDIES = {
    "writing": Study(
        (
            "stapo",
            "justrl",
            "grpo",
            "20-entropy",
            "full",
            "high-entropy",
            "random",
            "lower-half",
            "upper-half",
        )
    ),
    # Its rules are in break_report.py.
    "break": Study(
        ("justrl", "stapo", "random", "full"),
        task=countdown,
        config="countdown.yaml",
        held_out_steps=200,
    ),
}


def prepare(
    study: Study, method: str, seed: int, folder: Path, overrides: Sequence[str]
) -> tuple[Config, list[dict[str, Any]]]:
    """Write the training prompts beside the run folder; return the run's config and the held-out
    rows."""
    rows, held_out = study.task.prompts()
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = folder.with_name(f"{folder.name}-prompts.jsonl")
    write_lines(source, rows)
    own = [f"seed={seed}", f"output_dir={folder}", f"data.source={source}"]
    own.append(f"reward.functions=[{study.task.__name__}:reward]")
    keys = [*METHODS[method], *own, *overrides]
    return load_config(HERE / study.config, keys), held_out


def run_one(study: Study, method: str, seed: int, folder: Path, overrides: Sequence[str]) -> None:
    """Train one method with one seed, or continue, and keep the result in the run folder."""
    version = commit()  # of the code that is loaded now; the checkout may move on
    config, held_out = prepare(study, method, seed, folder, overrides)
    inputs = PythonInputs(callbacks=[HeldOut(study, held_out)])
    with open_run(config, resume=True, python=inputs) as run:
        for _ in train(run):
            pass
    given = shlex.join([*METHODS[method], *overrides])
    facts = {"method": method, "seed": seed, "overrides": given, "commit": version}
    keep_result(folder, facts)


class HeldOut(Callback):
    """Judges the adapter on held-out prompts every `held_out_steps` steps and at the end.

    Leaves `held_out.jsonl` in the run folder, with one line for each of these steps.

    Args:
        rows: the held-out ones.
    """

    def __init__(self, study: Study, rows: Sequence[dict[str, Any]]):
        self._study, self._rows = study, rows

    def on_train_begin(self, run: Run) -> None:
        data = run.config.data.model_copy(
            update={"source": "held out", "filter_overlong_prompts": False}
        )
        self._prompts = make_prompts(self._rows, run.tokenizer, data, graded=False)
        lines = read_lines(run.folder / "held_out.jsonl")
        self._judged = {line["step"]: line for line in lines}

    def on_step_begin(self, run: Run, step: int) -> None:
        if (step - 1) % self._study.held_out_steps == 0:
            self._judge(run)

    def on_train_end(self, run: Run) -> None:
        with run.sampling(run.progress.step + 1):
            self._judge(run)

    def _judge(self, run: Run) -> None:
        """Judge the adapter that the engine has, unless this was done before."""
        step = run.progress.step
        if step not in self._judged:
            self._judged[step] = {"step": step} | judge(run, self._prompts)
            if self._study.task is countdown:
                self._judged[step]["wrong_sums"] = wrong_sums(run, self._rows)
            write_lines(run.folder / "held_out.jsonl", self._judged.values())


def answer(
    run: Run, prompts: Sequence[Prompt], temperature: float, salt: str = "held out"
) -> list[Completion]:
    """One answer of the engine to each prompt, with its reward. The same salt gives the same
    draws."""
    decoding = Decoding(run.config.rollout.max_completion_length, temperature, top_p=1.0)
    seeds = [derived_seed(salt, number) for number in range(len(prompts))]
    answers = dict(run.engine.stream(prompts, seeds, [decoding] * len(prompts)))
    completions = [answers[number] for number in range(len(prompts))]
    decode_and_score(run, completions, seed=0, step=run.progress.step + 1)
    return completions


def judge(run: Run, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Sample one answer to each prompt and measure the answers.

    Returns:
        `reward` (mean), `rewards` (of each answer), `right_share` (share of full rewards),
        `greedy_reward` (mean with the likeliest tokens, which does not grow if a policy merely
        becomes surer), `completion_length` in tokens, `truncated_share`; per token in nats `nll`
        under the policy, `base_nll` under the untrained base, and `entropy` of the policy's whole
        distribution; `samples`, the first four answers.
    """
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


@torch.no_grad()
def wrong_sums(run: Run, rows: Sequence[dict[str, Any]]) -> float:
    """The probability that the policy gives to all but the right result of a sum, its mean over the
    sums of fixed answers."""
    generator, completions, places = random.Random(2), [], []
    for row in rows:
        words = countdown.trace(row, generator, noise=0.0)
        ids = run.tokenizer.convert_tokens_to_ids(words)
        prompt = Prompt("", run.tokenizer(row["prompt"])["input_ids"], answer=None)
        completions.append(Completion(prompt, ids, [0.0] * len(ids), False, 0))
        places += [False, *(word == "=" for word in words[:-1])]
    right = run.policy.statistics(completions).logprobs[torch.tensor(places)]
    return -torch.expm1(right).mean().item()


def start(name: str, work: Path, given: argparse.Namespace) -> int:
    """Make one run in a process of its own; return its exit status."""
    method, _, seed = name.rpartition("-")
    command = [sys.executable, __file__, given.study, "--here", "--only", method, "--seeds", seed]
    command += ["--results", str(given.results), "--work", str(work), "--set", *given.set]
    work.mkdir(parents=True, exist_ok=True)
    with (work / f"{name}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        status = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    print(f"{name}: {'finished' if status == 0 else f'failed, see {log.name}'}", flush=True)
    return status


def run_side_by_side(names: Sequence[str], work: Path, given: argparse.Namespace) -> bool:
    """Make the runs, a few at a time, and add each to the study's file when it ends; return
    whether all have finished."""
    pool = ThreadPoolExecutor(given.at_once)
    all_finished = True
    try:
        running = [pool.submit(start, name, work, given) for name in names]
        for run in as_completed(running):
            if run.result() != 0:
                all_finished = False
            collect_results(given.results, given.study, work)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no further run may start
    return all_finished


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", nargs="?", choices=STUDIES, default="writing")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="these methods of the study")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    add_results_option(parser)
    parser.add_argument(
        "--work", type=Path, help="run folders, with checkpoints; default: runs/STUDY"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config"
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="train in this process; the next call without this adds the results to the file",
    )
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    study = STUDIES[given.study]
    work = given.work or Path("runs") / given.study
    if not given.here:
        # Runs may have finished after the last call was killed.
        collect_results(given.results, given.study, work)
    finished = finished_runs(given.results, given.study)
    missing = [
        (method, seed)
        for seed, method in itertools.product(given.seeds, given.only or study.methods)
        if (method, seed) not in finished
    ]
    if given.here:
        end_on_sigterm()
        for method, seed in missing:
            folder = work / f"{method}-{seed}"
            if not (folder / RESULT).exists():
                run_one(study, method, seed, folder, given.set)
        return
    names = [f"{method}-{seed}" for method, seed in missing]
    if not run_side_by_side(names, work, given):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
