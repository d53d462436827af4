"""A page about a run's tokens and what became of them.

The page holds everything it shows and needs no network. A run with `log.audit_tokens` shows its tokens, any other its
curves alone.
"""

import base64
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from stapo_lite import __version__
from stapo_lite.config import S2T, load_config
from stapo_lite.errors import explained
from stapo_lite.files import read_lines, write_text
from stapo_lite.training.charts import QUADRANT_COLOURS, Curve, bars, lines, plane, png
from stapo_lite.training.report import mean
from stapo_lite.training.token_log import QUADRANTS, thin
from stapo_lite.training.tracking import QUADRANTS_FILE, TOKENS_FILE, run_metrics, show

MOST_TOKENS = 4000
"""Tokens in the table of a page."""
MOST_POINTS = 2000
"""Points of each kind in the plane."""
MOST_FREQUENT = 15
MARKS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
"""Visible signs in place of white space."""
Metrics = list[dict[str, Any]]
Charts = dict[str, tuple[str, bytes]]
"""Caption and PNG by file name."""


def audit(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's page and pictures into `out`, by default `audit` in the run folder; return the page.

    Raises:
        InputError: the folder holds no run; `out` cannot be written.
    """
    folder = Path(run_folder)
    metrics, config = run_metrics(folder), load_config(folder / "config.yaml")
    tokens, quadrants = read_lines(folder / TOKENS_FILE), read_lines(folder / QUADRANTS_FILE)
    silences = config.objective.s2t.enabled
    kinds = ("silenced", "kept") if silences else ("STAPO would silence", "other candidates")
    groups: dict[str, Metrics] = {kind: [] for kind in kinds}
    for token in tokens:
        token["kind"] = kinds[token["kept"] if silences else not token["spurious"]]
        groups[token["kind"]].append(token)
    charts = run_charts(metrics) | (token_charts(groups, quadrants) if quadrants else {})
    facts = {
        "algorithm": config.algorithm,
        "model": config.model,
        "steps": len(metrics),
        "reward, first and last step": " → ".join(show(metrics[i]["reward"], ".3g") for i in (0, -1)),
        "tau_p": metrics[-1]["tau_p"],
    }
    if quadrants:
        counts = token_counts(quadrants)
        facts["candidates"] = f"{sum(counts[:2]):,}, {counts[0]:,} of them spurious; {len(tokens):,} in the token log"
    return write_page(
        Path(out) if out else folder / "audit",
        charts,
        title=f"Token audit of {folder.resolve().name}",
        finding=find_spurious(metrics, config.objective.s2t),
        facts=facts,
        tokens=thin(tokens, MOST_TOKENS),
        frequencies={kind: frequent(group) for kind, group in groups.items()} if quadrants else {},
    )


def find_spurious(metrics: Metrics, s2t: S2T) -> str:
    """A sentence or two about a run's spurious tokens."""
    share, gradient = (mean(metrics, f"spurious_{name}") for name in ("share", "gradient_share"))
    kind = "spurious (rare, rewarded, and where the model was sure of something else)"
    if not share:
        return f"No token was {kind}."
    fates = {"low-entropy": "silenced them", "all": "silenced all candidates", "random": "silenced a random share"}
    fate = f"S2T {fates.get(s2t.silence, 'silenced candidates of high entropy')}" if s2t.enabled else "S2T was off"
    weight = f" Their gradient was {100 * gradient:.2g} % of all, counted before any was silenced." if gradient else ""
    return f"{100 * share:.2g} % of all tokens were {kind}; {fate}.{weight}"


def run_charts(metrics: Metrics) -> Charts:
    """Charts of what every run logs."""

    def curve(metric: str, label: str, *band: str) -> Curve:
        steps = [line["step"] for line in metrics]
        return Curve(label, steps, *([line[name] for line in metrics] for name in (metric, *band)))

    entropies = [
        curve("entropy", "mean", "entropy_p10", "entropy_p90"),
        curve("entropy_p50", "median"),
        curve("sampled_nll", "all completions"),
    ]
    shares = [curve(f"{name}_share", name) for name in ("candidate", "spurious", "silenced")]
    return {
        "reward": ("Mean reward of the sampled completions.", png(lines, [curve("reward", "reward")], "mean reward")),
        "entropy": (
            "Entropy of the next-token distribution in completions with an advantage: mean, median, and the band from "
            "its 10 % to its 90 % quantile; and over all completions, estimated by what was sampled.",
            png(lines, entropies, "nats"),
        ),
        "silenced": (
            "Share of all tokens that are candidates (A > 0, pi < tau_p), spurious (also H < tau_h), and silenced.",
            png(lines, shares, "share", True),
        ),
        "tau_h": ("Entropy threshold, mean over mini-batches.", png(lines, [curve("tau_h", "tau_h")], "tau_h [nats]")),
    }


def token_charts(groups: dict[str, Metrics], quadrants: Metrics) -> Charts:
    """Charts of what the token log notes.

    Args:
        groups: candidates by kind, such as silenced and kept.
    """
    points = [(probability, entropy) for line in quadrants for probability, entropy, _ in line["points"]]
    places = {"tokens with A > 0": thin(points, MOST_POINTS)}
    for kind, group in groups.items():
        places[kind] = [(token["probability"], token["entropy"]) for token in thin(group, MOST_POINTS)]
    counts = token_counts(quadrants)
    sums = [sum(line["tokens"][i] * (line["gradient_norm"][i] or 0.0) for line in quadrants) for i in range(4)]
    means = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
    names = [f"{name}\n{count:,}" for name, count in zip(QUADRANTS, counts, strict=True)]
    return {
        "plane": (
            "Tokens of rewarded completions. STAPO silences the lower left: improbable, though the model was sure.",
            png(plane, places, mean(quadrants, "tau_p"), mean(quadrants, "tau_h")),
        ),
        "gradient": (
            "Mean norm of a token's gradient with respect to its logits, exact, at an advantage of 1, and the number "
            "of tokens: rare is pi < tau_p, sure is H < tau_h.",
            png(bars, names, means, QUADRANT_COLOURS, "mean gradient norm at an advantage of 1"),
        ),
    }


def token_counts(quadrants: Metrics) -> list[int]:
    """Tokens in each quadrant, over all steps."""
    return [sum(counts) for counts in zip(*(line["tokens"] for line in quadrants), strict=True)]


def frequent(tokens: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """The most frequent tokens, with white space to be seen; parts of a character are told apart by their id."""
    counts = Counter((token["token"], token["token_id"]) for token in tokens)
    return [
        (text.translate(MARKS) + (f" #{token_id}" if "\ufffd" in text else ""), count)
        for (text, token_id), count in counts.most_common(MOST_FREQUENT)
    ]


def write_page(folder: Path, charts: Charts, **values: Any) -> Path:
    """Write the charts, and `index.html` with them in it.

    Raises:
        InputError: the folder cannot be written.
    """
    environment = Environment(loader=PackageLoader("stapo_lite"), autoescape=True, trim_blocks=True)
    pictures = {name: (caption, base64.b64encode(image).decode()) for name, (caption, image) in charts.items()}
    with explained(f"{folder}: cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for name, (_, image) in charts.items():
            (folder / f"{name}.png").write_bytes(image)
        page = environment.get_template("audit.html").render(pictures=pictures, version=__version__, **values)
        write_text(folder / "index.html", page)
    return folder / "index.html"
