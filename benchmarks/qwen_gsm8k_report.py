"""Figure and tables of two runs of a real Qwen on GSM8K (docs/results.md).

    stapo train configs/qwen2.5-0.5b_gsm8k.yaml output_dir=runs/gsm8k/stapo
    stapo train configs/qwen2.5-0.5b_gsm8k.yaml output_dir=runs/gsm8k/justrl algorithm=justrl
    stapo evaluate configs/eval.yaml model=Qwen/Qwen2.5-Coder-0.5B-Instruct ...   (three times)
    python benchmarks/qwen_gsm8k_report.py runs/gsm8k/stapo runs/gsm8k/justrl
        --before runs/gsm8k/eval-base --after runs/gsm8k/eval-stapo runs/gsm8k/eval-justrl
        [--figure docs/gsm8k.png] [--results benchmarks/results/qwen_gsm8k]

The evaluations have the same problems. Intervals hold 95 % of 10,000 bootstrap samples over them;
the samples of a problem stay together, before and after.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame

from stapo_lite.files import read_lines

DRAWS = 10_000
WINDOW = 5
"""Steps of the running means that are drawn."""
CURVES = {
    "reward": "reward, 2 x share right - 1",
    "completion_length": "tokens of a completion",
    "entropy": "entropy [nats]",
    "silenced_share": "silenced, share of the tokens",
}
SCORES = ("right", "cut off", "tokens", "code")
SHOWN = 6
"""Problems whose first sample is shown, in the order of their ids."""


def samples(folder: Path) -> DataFrame:
    """An evaluation's samples: whether each is right, is cut off or has code, and its tokens."""
    lines = DataFrame(read_lines(folder / "samples-0.jsonl")).set_index(["id", "sample"])
    verdicts = DataFrame(read_lines(folder / "verdicts.jsonl")).set_index(["id", "sample"])
    scores = {
        "right": verdicts["correct"],
        "cut off": lines["truncated"],
        "tokens": lines["tokens"],
        "code": lines["response"].str.contains("```"),
    }
    return DataFrame(scores).astype(float)


def with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of the problems' values, and its interval."""
    generator = np.random.default_rng(0)
    known = np.asarray(values)
    means = generator.choice(known, (DRAWS, len(known))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return known.mean(), low, high


def compare(before: Path, after: Sequence[Path]) -> DataFrame:
    """For each evaluation and score, the mean and its change from the one before, paired by
    problem, with intervals."""
    first = samples(before).groupby("id").mean()
    rows = []
    for folder in (before, *after):
        own = samples(folder).groupby("id").mean()
        for score in SCORES:
            mean, change = with_interval(own[score]), with_interval(own[score] - first[score])
            rows.append([folder.name, score, *mean, *change])
    columns = ["evaluation", "score", "mean", "from", "to", "change", "change from", "change to"]
    return DataFrame(rows, columns=columns)


def side_by_side(folders: Sequence[Path]) -> str:
    """The first sample of some problems from each evaluation, as Markdown."""
    parts = ["# Samples, the first of each problem\n"]
    texts = {
        folder.name: DataFrame(read_lines(folder / "samples-0.jsonl")).set_index(["id", "sample"])
        for folder in folders
    }
    rights = {folder.name: samples(folder)["right"] for folder in folders}
    problems = sorted(texts[folders[0].name].index.unique("id"))[:SHOWN]
    for problem in problems:
        parts.append(f"## {problem}\n")
        for name, lines in texts.items():
            verdict = "right" if rights[name][problem, 0] else "wrong"
            quoted = [f"    {line}".rstrip() for line in lines["response"][problem, 0].splitlines()]
            parts.append("\n".join([f"{name}, {verdict}:\n", *quoted, ""]))
    return "\n".join(parts)


def metrics_table(runs: Sequence[Path]) -> DataFrame:
    """The drawn metrics of each step of the runs."""
    tables = []
    for run in runs:
        table = DataFrame(read_lines(run / "metrics.jsonl"))
        names = ["step", *CURVES, "candidate_share", "spurious_share", "spurious_gradient_share"]
        names += ["truncated_share", "sampler_gap_mean", "seconds_rollout", "seconds_update"]
        tables.append(table[names].assign(run=run.name))
    return pd.concat(tables)


def draw(metrics: DataFrame, path: Path) -> None:
    """Running means of the metrics over the steps, a line for each run."""
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(2, 2).flat, CURVES.items(), strict=True):
        for run, table in metrics.groupby("run", sort=False):
            smooth = table[name].astype(float).rolling(WINDOW, min_periods=1).mean()
            axes.plot(table["step"], smooth, label=run)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.4, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--before", type=Path, required=True, help="an evaluation's output_dir")
    parser.add_argument("--after", type=Path, nargs="+", required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    metrics, scores = metrics_table(given.runs), compare(given.before, given.after)
    print(scores.round(3).to_string(index=False))
    if given.figure:
        draw(metrics, given.figure)
    if given.results:
        given.results.mkdir(parents=True, exist_ok=True)
        folders = (given.before, *given.after)
        (given.results / "samples.md").write_text(side_by_side(folders), encoding="utf-8")
        rights = DataFrame({folder.name: samples(folder)["right"] for folder in folders})
        kept = {"metrics": metrics, "scores": scores, "right": rights.astype(int).reset_index()}
        for name, table in kept.items():
            path = given.results / f"{name}.parquet"
            table.to_parquet(path, index=False, compression="zstd")


if __name__ == "__main__":
    main()
