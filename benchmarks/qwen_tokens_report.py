"""Tables and figures of `qwen_tokens.py`, from what it sampled (docs/results.md).

    python benchmarks/qwen_tokens_report.py MODEL [--folder runs/qwen_tokens]
    [--results benchmarks/results/qwen_tokens]

All completions count as one mini-batch, whose tau_h is the quantile. A token's gradient is the norm
with respect to the logits, |A| sqrt(1 - 2 pi(y) + sum_v pi(v)^2), as in a run's first update.
Intervals hold 95 % of 1,000 bootstrap samples over problems; masks are made anew in each.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pandas import DataFrame

from stapo_lite.files import read_lines
from stapo_lite.method.advantages import group_advantages
from stapo_lite.method.loss import logit_gradient_norm

VERSIONS = {
    "paper": (0.002, 0.75, "candidates"),
    "paper-v1": (0.002, 0.8, "all"),
    "article": (0.01, 0.05, "all"),
}
"""tau_p, the quantile, and the population that tau_h is a quantile of (docs/deviations.md)."""
CURVE = [
    (tau_p, quantile, "candidates")
    for tau_p in (0.0005, 0.001, 0.002, 0.005, 0.01)
    for quantile in (0.25, 0.5, 0.75, 0.9)
]
RARE = 0.01
"""Probability below which a token is written with its context: the highest tau_p of the paper's
versions."""
DRAWS = 1000
CONTEXT = 24
"""Tokens shown before a rare token."""


def load(folder: Path) -> list[dict[str, Any]]:
    """All completions that were sampled, in order."""
    return list(chain(*map(read_lines, sorted(folder.glob("completions-*.jsonl")))))


def token_table(lines: Sequence[Mapping[str, Any]]) -> DataFrame:
    """A row for each token, in the order of the lines. `gradient` is the norm at the completion's
    advantage, `norm` at an advantage of 1."""
    size = sum(line["problem"] == lines[0]["problem"] for line in lines)
    rewards = torch.tensor([1.0 if line["right"] else -1.0 for line in lines]).view(-1, size)
    advantages = group_advantages(rewards).flatten().tolist()
    lengths = [len(line["token_ids"]) for line in lines]

    def spread(values: Sequence[Any]) -> np.ndarray:
        return np.repeat(values, lengths)

    def joined(name: str) -> np.ndarray:
        return np.fromiter(chain.from_iterable(line[name] for line in lines), float)

    tokens = DataFrame(
        {
            "problem": spread([line["problem"] for line in lines]),
            "completion": spread(range(len(lines))),
            "position": list(chain.from_iterable(map(range, lengths))),
            "right": spread([line["right"] for line in lines]),
            "advantage": spread(advantages),
            "p": np.exp(joined("logprobs")),
            "entropy": joined("entropy"),
        }
    )
    ones, logprobs = torch.ones(len(tokens)), torch.tensor(joined("logprobs"))
    norms = logit_gradient_norm(ones, logprobs, torch.tensor(joined("collision")))
    tokens["norm"] = norms.numpy()
    tokens["gradient"] = tokens["norm"] * tokens["advantage"].abs()
    return tokens


def find_spurious(tokens: DataFrame, tau_p: float, quantile: float, population: str) -> Any:
    """Candidates and spurious tokens (bool), and tau_h."""
    rare = tokens["p"] < tau_p
    candidates = rare & (tokens["advantage"] > 0)
    entropies = tokens["entropy"][candidates if population == "candidates" else slice(None)]
    tau_h = entropies.quantile(quantile)
    return candidates, candidates & (tokens["entropy"] < tau_h), tau_h


def shares(tokens: DataFrame, version: tuple[float, float, str]) -> dict[str, float]:
    """How many tokens a version of S2T finds, and what part of the gradient they have."""
    candidates, spurious, tau_h = find_spurious(tokens, *version)
    wrong = (tokens["p"] < version[0]) & (tokens["entropy"] < tau_h) & (tokens["advantage"] < 0)
    gradient, total = tokens["gradient"], tokens["gradient"].sum()
    trained = gradient[tokens["advantage"] != 0]
    return {
        "candidates, %": 100 * candidates.mean(),
        "spurious, %": 100 * spurious.mean(),
        "of the gradient, %": 100 * gradient[spurious].sum() / total,
        "times a token's gradient": gradient[spurious].mean() / trained.mean(),
        "tau_h": tau_h,
        "same kind in wrong answers, %": 100 * wrong.mean(),
        "their gradient, %": 100 * gradient[wrong].sum() / total,
    }


def with_intervals(
    tokens: DataFrame, statistic: Callable[[DataFrame], dict[str, float]]
) -> dict[str, float]:
    """A statistic's values, and the ends of their intervals."""
    places = list(tokens.groupby("problem").indices.values())
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        drawn = generator.integers(len(places), size=len(places))
        draws.append(statistic(tokens.iloc[np.concatenate([places[i] for i in drawn])]))
    low, high = (DataFrame(draws).quantile(end) for end in (0.025, 0.975))
    found = {}
    for name, value in statistic(tokens).items():
        found |= {name: value, f"{name} from": low[name], f"{name} to": high[name]}
    return found


def limits(p: Any, entropy: Any, vocabulary: int) -> tuple[Any, Any]:
    """The paper's lower and upper bound on the gradient norm at an advantage of 1 (theorem 3)."""
    c = (vocabulary - 1) / (vocabulary * np.log(vocabulary) ** 2)
    lower = np.sqrt(np.maximum(1 - 2 * p + np.exp(-entropy), 0))
    return lower, np.sqrt(np.maximum(2 - 2 * p - c * entropy**2, 0))


def bounds(tokens: DataFrame, vocabulary: int) -> DataFrame:
    """How tight the paper's bounds on the gradient norm are, by probability and entropy: medians of
    norm / lower bound and upper bound / norm; and the share of tokens whose lower bound is 0."""
    lower, upper = limits(tokens["p"], tokens["entropy"], vocabulary)
    known = tokens.assign(lower=tokens["norm"] / lower, upper=upper / tokens["norm"])
    known["empty"] = lower == 0
    known.loc[known["empty"], "lower"] = np.nan
    by = [
        pd.cut(known["p"], [0, 0.002, 0.01, 0.1, 0.5, 0.9, 1]),
        pd.cut(known["entropy"], [0, 0.1, 0.5, 1, 2, 4]),
    ]
    groups = known.groupby(by, observed=True)
    return groups.agg(
        tokens=("norm", "size"),
        norm=("norm", "median"),
        norm_by_lower=("lower", "median"),
        upper_by_norm=("upper", "median"),
        lower_is_0=("empty", "mean"),
    ).reset_index()


def spurious_and_others(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, int]]]:
    """(completion, position) of the rare tokens of right answers: `spurious`, with an entropy below
    the paper's tau_h, and `open`, above it. They have p < RARE, since a small model's right answers
    have few below tau_p. Groups without advantage count, too; a token that ends its completion does
    not."""
    tokens = token_table(lines)
    _, _, tau_h = find_spurious(tokens, *VERSIONS["paper"])
    last = tokens.groupby("completion")["position"].transform("max")
    rare = tokens[tokens["right"] & (tokens["p"] < RARE) & (tokens["position"] < last)]
    sure = rare["entropy"] < tau_h
    return {
        name: list(zip(part["completion"], part["position"], strict=True))
        for name, part in (("spurious", rare[sure]), ("open", rare[~sure]))
    }


def describe_rare(
    tokens: DataFrame, lines: Sequence[Mapping[str, Any]], tokenizer: Any
) -> DataFrame:
    """The tokens whose alternatives are known, in context."""
    rows = []
    _, spurious, _ = find_spurious(tokens, *VERSIONS["paper"])
    starts = tokens.groupby("completion").head(1).index
    for number, line in enumerate(lines):
        ids = line["token_ids"]
        for key, (best, probabilities) in line["best"].items():
            at = int(key)
            token = tokens.iloc[starts[number] + at]
            alternatives = [
                f"{tokenizer.decode([one])}|{p:.4f}"
                for one, p in zip(best[:3], probabilities, strict=False)
            ]
            rows.append(
                {
                    "problem": line["problem"],
                    "completion": number,
                    "position": at,
                    "right": line["right"],
                    "advantage": round(token["advantage"], 3),
                    "probability": float(f"{token['p']:.3g}"),
                    "entropy": round(token["entropy"], 4),
                    "norm": round(token["norm"], 4),
                    "spurious": spurious.iloc[starts[number] + at],
                    "before": tokenizer.decode(ids[max(0, at - CONTEXT) : at]),
                    "token": tokenizer.decode([ids[at]]),
                    "after": tokenizer.decode(ids[at + 1 : at + 1 + CONTEXT // 2]),
                    "alternatives": "\t".join(alternatives),
                }
            )
    return DataFrame(rows)


def effects_table(effects: DataFrame) -> DataFrame:
    """The share of right answers from just before and from just after a token, by kind, with
    intervals over tokens."""
    rows = []
    generator = np.random.default_rng(0)
    for kind, part in effects.groupby("kind"):
        shares = part[["right_before", "right_after"]].to_numpy() / 8
        values = np.column_stack([shares, shares[:, 1] - shares[:, 0]])
        draws = values[generator.integers(len(values), size=(10 * DRAWS, len(values)))].mean(1)
        low, high = np.quantile(draws, [0.025, 0.975], axis=0)
        row = {"kind": kind, "tokens": len(part)}
        for i, name in enumerate(("before", "after", "difference")):
            row |= {name: values[:, i].mean(), f"{name} from": low[i], f"{name} to": high[i]}
        rows.append(row)
    return DataFrame(rows)


def draw_tokens(rare: DataFrame, path: Path) -> None:
    """Four silenced tokens, from where the model was most sure, and four candidates that are kept,
    from where it was least sure; one of a problem. Tokens that matplotlib's font may lack are left
    out.

    Args:
        rare: of `describe_rare`, or its file.
    """
    silenced = rare[rare["spurious"]].sort_values("entropy")
    tau_p, _, _ = VERSIONS["paper"]
    candidates = rare[(rare["probability"] < tau_p) & (rare["advantage"] > 0)]
    kept = candidates[~candidates["spurious"]].sort_values("entropy", ascending=False)
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(4, 2, sharex=True)
    for column, part, colour in ((0, silenced, "#d55e00"), (1, kept, "#0072b2")):
        shown = (
            part[part["token"].str.isascii()].drop_duplicates("problem").head(4).to_dict("records")
        )
        for ax, token in zip(axes[:, column], shown, strict=False):
            words = [one.rsplit("|", 1) for one in token["alternatives"].split("\t")]
            words = [word for word in words if word[0] != token["token"]]
            words.append([token["token"], token["probability"]])
            texts, probabilities = [repr(word) for word, _ in words], [float(p) for _, p in words]
            places = range(len(words))
            ax.barh(places, probabilities, color=["#bbbbbb"] * len(words[1:]) + [colour])
            ax.set_yticks(places, texts, fontsize=9, parse_math=False)
            ax.get_yticklabels()[-1].set(color=colour, fontweight="bold")
            ax.text(0.02, places[-1], f"{probabilities[-1]:.1e}", va="center", color=colour)
            ax.set_xlim(0, 1)
            before = " ".join(token["before"].split())[-34:]
            title = f"... {before} ?   H = {token['entropy']:.2f}"
            ax.set_title(title, fontsize=9, loc="left", parse_math=False)
            ax.invert_yaxis()
    for ax in axes[-1]:
        ax.set_xlabel("probability of the next token")
    axes[0, 0].annotate("silenced: the model was sure", (0, 1.25), xycoords="axes fraction")
    axes[0, 1].annotate("kept: several ways to go on", (0, 1.25), xycoords="axes fraction")
    figure.savefig(path, dpi=100)


def draw_bounds(tokens: DataFrame, vocabulary: int, path: Path) -> None:
    """The gradient norm of each token in the plane of probability and entropy, and that of rare
    tokens between the paper's bounds."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    tau_p, _, _ = VERSIONS["paper"]
    is_rare = tokens["p"] < RARE
    common = tokens[~is_rare]
    points = pd.concat([common.sample(min(4000, len(common)), random_state=0), tokens[is_rare]])
    drawn = left.scatter(points["p"], points["entropy"], c=points["norm"], s=4, linewidths=0)
    figure.colorbar(drawn, ax=left, label="gradient norm at an advantage of 1")
    left.set(xscale="log", xlabel="probability of the token", ylabel="entropy [nats]")
    rare = tokens[tokens["p"] < tau_p]
    entropy = np.linspace(0, max(1.0, rare["entropy"].max()), 100)
    lower, upper = limits(np.full(100, tau_p / 2), entropy, vocabulary)
    right.scatter(rare["entropy"], rare["norm"], s=5, color="#0072b2", linewidths=0)
    right.plot(entropy, lower, color="#999999", label=f"the paper's bounds, p = {tau_p / 2}")
    right.plot(entropy, upper, color="#999999")
    right.set(xlabel="entropy [nats]", ylabel=f"gradient norm, p < {tau_p}")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def report(folder: Path, out: Path, tokenizer: Any) -> None:
    """Write tables and figures, and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    lines = load(folder)
    tokens = token_table(lines)
    trained, sampled = np.log(tokens["p"]), chain(*(line["rollout_logprobs"] for line in lines))
    summary = {
        "problems": tokens["problem"].nunique(),
        "completions": len(lines),
        "tokens": len(tokens),
        "right, %": 100 * np.mean([line["right"] for line in lines]),
        "cut off, %": 100 * np.mean([line["truncated"] for line in lines]),
        "entropy": tokens["entropy"].mean(),
        "gap between engine and trainer, nats": (trained - list(sampled)).abs().mean(),
    }
    tables = {
        "summary": DataFrame([summary]),
        "shares": DataFrame(
            [
                {"version": name} | with_intervals(tokens, lambda t, v=version: shares(t, v))
                for name, version in VERSIONS.items()
            ]
        ),
        "curve": DataFrame([{"tau_p": v[0], "quantile": v[1]} | shares(tokens, v) for v in CURVE]),
        "bounds": bounds(tokens, len(tokenizer)).astype({"p": str, "entropy": str}),
    }
    effects = DataFrame(read_lines(folder / "effects.jsonl"))
    if len(effects):
        tables["effects"] = effects_table(effects)
    for name, table in tables.items():
        table.to_parquet(out / f"{name}.parquet", index=False, compression="zstd")
        print(f"\n{name}\n{table.T.to_string() if len(table) < 5 else table.to_string()}")
    rare = describe_rare(tokens, lines, tokenizer)
    of_right = rare[rare["right"]]  # few of all, and what docs and notebook show
    of_right.to_parquet(out / "rare.parquet", index=False, compression="zstd")
    draw_tokens(rare, out / "tokens.png")
    draw_bounds(tokens, len(tokenizer), out / "bounds.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="whose tokenizer is read")
    parser.add_argument("--folder", type=Path, default=Path("runs/qwen_tokens"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/qwen_tokens"))
    given = parser.parse_args()
    from transformers import AutoTokenizer

    report(given.folder, given.results, AutoTokenizer.from_pretrained(given.model))


if __name__ == "__main__":
    main()
