"""A page about a run's tokens and what became of them.

The page is self-contained. Without `log.audit_tokens` it shows only curves, no tokens.
"""

import base64
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from stapo_lite.config import S2T, load_config
from stapo_lite.errors import explained
from stapo_lite.extras.audit.charts import QUADRANT_COLOURS, Curve, bars, lines, plane, png
from stapo_lite.extras.audit.report import mean
from stapo_lite.extras.audit.token_log import QUADRANTS, thin
from stapo_lite.files import read_lines, write_text
from stapo_lite.training.folder import QUADRANTS_FILE, TOKENS_FILE, run_metrics
from stapo_lite.training.log import show

MOST_TOKENS = 4000
"""Most tokens in the table of a page."""
MOST_POINTS = 2000
"""Most points of each kind in the plane."""
MOST_FREQUENT = 15
"""Length of the list of most frequent tokens."""
MARKS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
"""Maps white space to visible signs."""
FATES = {
    "low-entropy": "silenced them",
    "high-entropy": "silenced candidates of high entropy",
    "random": "silenced a random share",
    "all": "silenced all candidates",
}
"""What S2T did with spurious tokens, by `objective.s2t.silence`."""
CAPTIONS = {
    "reward": "Mean reward of the sampled completions.",
    "entropy": (
        "Entropy of the next-token distribution in completions with an advantage: mean, median, "
        "and the band from its 10 % to its 90 % quantile; and over all completions, estimated by "
        "what was sampled."
    ),
    "silenced": (
        "Share of all tokens that are candidates (A > 0, pi < tau_p), spurious (also H < tau_h), "
        "and silenced."
    ),
    "tau_h": "Entropy threshold, mean over mini-batches.",
    "plane": (
        "Tokens of rewarded completions. STAPO silences the lower left: improbable, though the "
        "model was sure."
    ),
    "gradient": (
        "Mean norm of a token's gradient with respect to its logits, exact, at an advantage of 1, "
        "and the number of tokens: rare is pi < tau_p, sure is H < tau_h."
    ),
}
Lines = list[dict[str, Any]]
"""Lines of one of the run's files."""
Charts = dict[str, bytes]
"""PNGs by name, as in CAPTIONS."""


def audit(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's page and pictures into `out`, by default `audit` in the run folder; return the
    page.

    Raises:
        InputError: the folder holds no run; `out` cannot be written.
    """
    folder = Path(run_folder)
    metrics, config = run_metrics(folder), load_config(folder / "config.yaml")
    tokens, quadrants = read_lines(folder / TOKENS_FILE), read_lines(folder / QUADRANTS_FILE)
    s2t = config.objective.s2t
    kinds = ("silenced", "kept") if s2t.enabled else ("STAPO would silence", "other candidates")
    groups: dict[str, Lines] = {kind: [] for kind in kinds}
    for token in tokens:
        spared = token["kept"] if s2t.enabled else not token["spurious"]
        token["kind"] = kinds[spared]
        groups[token["kind"]].append(token)
    rewards = [show(metrics[i]["reward"], ".3g") for i in (0, -1)]
    facts = {
        "algorithm": config.algorithm,
        "model": config.model,
        "steps": len(metrics),
        "reward, first and last step": " → ".join(rewards),
        "tau_p": metrics[-1]["tau_p"],
    }
    charts, frequencies = run_charts(metrics), {}
    if quadrants:
        counts = count_tokens(quadrants)
        charts |= token_charts(groups, quadrants, counts)
        spurious, confident = counts[:2]
        logged = f"{spurious:,} of them spurious; {len(tokens):,} in the token log"
        facts["candidates"] = f"{spurious + confident:,}, {logged}"
        frequencies = {kind: frequent(group) for kind, group in groups.items()}
    return write_page(
        Path(out) if out else folder / "audit",
        charts,
        title=f"Token audit of {folder.resolve().name}",
        finding=find_spurious(metrics, s2t),
        facts=facts,
        tokens=thin(tokens, MOST_TOKENS),
        frequencies=frequencies,
    )


def find_spurious(metrics: Lines, s2t: S2T) -> str:
    """A sentence or two about a run's spurious tokens."""
    share = mean(metrics, "spurious_share")
    gradient = mean(metrics, "spurious_gradient_share")
    kind = "spurious (rare, rewarded, and where the model was sure of something else)"
    if not share:
        return f"No token was {kind}."
    fate = f"S2T {FATES[s2t.silence]}" if s2t.enabled else "S2T was off"
    finding = f"{100 * share:.2g} % of all tokens were {kind}; {fate}."
    if gradient:
        part = f"{100 * gradient:.2g} % of all"
        finding += f" Their gradient was {part}, counted before any was silenced."
    return finding


def run_charts(metrics: Lines) -> Charts:
    """Charts of metrics that every run logs."""
    steps = [line["step"] for line in metrics]

    def curve(label: str, *names: str) -> Curve:
        return Curve(label, steps, *([line[name] for line in metrics] for name in names))

    entropies = [
        curve("mean", "entropy", "entropy_p10", "entropy_p90"),
        curve("median", "entropy_p50"),
        curve("all completions", "sampled_nll"),
    ]
    shares = [curve(name, f"{name}_share") for name in ("candidate", "spurious", "silenced")]
    return {
        "reward": png(lines, [curve("reward", "reward")], "mean reward"),
        "entropy": png(lines, entropies, "nats"),
        "silenced": png(lines, shares, "share", True),
        "tau_h": png(lines, [curve("tau_h", "tau_h")], "tau_h [nats]"),
    }


def token_charts(groups: dict[str, Lines], quadrants: Lines, counts: list[int]) -> Charts:
    """Charts of the token log.

    Args:
        groups: candidates by kind, such as silenced and kept.
        counts: number of tokens in each quadrant.
    """
    points = [point[:2] for line in quadrants for point in line["points"]]
    places = {"tokens with A > 0": thin(points, MOST_POINTS)}
    for kind, group in groups.items():
        some = thin(group, MOST_POINTS)
        places[kind] = [(token["probability"], token["entropy"]) for token in some]
    names, means = [], []
    for i, count in enumerate(counts):
        names.append(f"{QUADRANTS[i]}\n{count:,}")
        norms = (line["tokens"][i] * (line["gradient_norm"][i] or 0.0) for line in quadrants)
        means.append(sum(norms) / max(count, 1))
    label = "mean gradient norm at an advantage of 1"
    return {
        "plane": png(plane, places, mean(quadrants, "tau_p"), mean(quadrants, "tau_h")),
        "gradient": png(bars, names, means, QUADRANT_COLOURS, label),
    }


def count_tokens(quadrants: Lines) -> list[int]:
    """Number of tokens in each quadrant, over all steps."""
    return [sum(counts) for counts in zip(*(line["tokens"] for line in quadrants), strict=True)]


def frequent(tokens: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """The most frequent tokens and their counts, with visible white space.

    Tokens that are only part of a character decode to the same text; their ids tell them apart.
    """
    counts = Counter((token["token"], token["token_id"]) for token in tokens)
    found = []
    for (text, token_id), count in counts.most_common(MOST_FREQUENT):
        part = f" #{token_id}" if "\ufffd" in text else ""
        found.append((text.translate(MARKS) + part, count))
    return found


def write_page(folder: Path, charts: Charts, **values: Any) -> Path:
    """Write the charts, and `index.html` with the charts in it.

    Raises:
        InputError: the folder cannot be written.
    """
    loader = PackageLoader("stapo_lite.extras.audit", "")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    template, pictures = environment.get_template("page.html"), {}
    with explained(f"{folder}: cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in charts.items():
            (folder / f"{name}.png").write_bytes(image)
            pictures[name] = CAPTIONS[name], base64.b64encode(image).decode()
        page = template.render(pictures=pictures, version=version("stapo-lite"), **values)
        write_text(folder / "index.html", page)
    return folder / "index.html"
