"""The tokens of a run and what became of them, as one page to look at, and runs over each other.

    python -m stapo_lite.audit runs/x                         -> runs/x/audit/index.html, and PNGs
    python -m stapo_lite.audit compare runs/a runs/b ...      -> runs/compare/index.html, and PNGs

The pages hold everything they show and ask no network. A run with `audit.enabled` shows its tokens, any other its
curves alone.
"""

import argparse
import base64
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from stapo_lite import __version__
from stapo_lite.charts import CANDIDATE_COLOURS, QUADRANT_COLOURS, THEMES, Curve, Draw, bars, lines, plane, png
from stapo_lite.checkpoint import flatten
from stapo_lite.config import Config, InputError, load_config, one_line_errors
from stapo_lite.files import read_lines, write_text
from stapo_lite.token_log import QUADRANTS, thin
from stapo_lite.tracking import QUADRANTS_FILE, TOKENS_FILE, run_metrics

MOST_TOKENS = 4000
"""In the table of a page."""
MOST_POINTS = 2000
"""Of each kind in the plane."""
MOST_FREQUENT = 15
FREQUENCIES = ("silenced_tokens", "kept_tokens")
"""Their pictures; the page itself has bars that can show any script."""

Metrics = list[dict[str, Any]]


def audit(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's page and pictures into `out`, by default `audit` in the run folder; return the page.

    Raises:
        InputError: the folder holds no run; `out` cannot be written.
    """
    folder = Path(run_folder)
    config, metrics = read_run(folder)
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
        "reward, first and last step": " → ".join(_text(metrics[i]["reward"]) for i in (0, -1)),
        "tau_p": metrics[-1]["tau_p"],
    }
    if quadrants:
        counts = token_counts(quadrants)
        facts["candidates"] = f"{sum(counts[:2]):,}, {counts[0]:,} of them spurious; {len(tokens):,} in the token log"
    return write_page(
        Path(out) if out else folder / "audit",
        charts,
        title=f"Token audit of {folder.resolve().name}",
        facts=facts,
        tokens=thin(tokens, MOST_TOKENS),
        frequencies={kind: frequent(group) for kind, group in groups.items()} if quadrants else {},
    )


def compare(run_folders: Sequence[str | Path], out: str | Path) -> Path:
    """Runs over each other; those that differ in their seed alone are one curve, the mean, in a band of one standard
    deviation to either side. Returns the page.

    Raises:
        InputError: there are fewer than two folders, or one holds no run; `out` cannot be written.
    """
    folders = list(dict.fromkeys(Path(folder).resolve() for folder in run_folders))
    if len(folders) < 2:
        raise InputError("compare: give two run folders or more")
    groups: dict[str, list[Metrics]] = defaultdict(list)
    runs = [read_run(folder) for folder in folders]
    for label, (_, metrics) in zip(run_labels([config for config, _ in runs]), runs, strict=True):
        groups[label].append(metrics)
    charts = {
        name: (caption, lines([seed_curve(label, group, metric) for label, group in groups.items()], axis, log))
        for name, metric, axis, log, caption in COMPARED
    }
    table = [["", "seeds", "steps", *(axis for _, _, axis, _, _ in COMPARED)]]
    for label, group in groups.items():
        steps = min(map(len, group))
        cells = [last_mean([run[:steps] for run in group], metric) for _, metric, _, _, _ in COMPARED]
        table.append([label, str(len(group)), str(steps), *cells])
    return write_page(Path(out), charts, title="Runs compared", table=table)


COMPARED = (
    # file, metric, axis, logarithmic, caption
    ("reward", "reward", "mean reward", False, "Reward."),
    ("entropy", "entropy", "entropy [nats]", False, "Entropy: collapse and explosion show here first."),
    ("spurious", "spurious_share", "spurious share", True, "Tokens that STAPO silences, or would silence."),
    (
        "spurious_gradient",
        "spurious_gradient_share",
        "their gradient share",
        True,
        "Their share of the gradient mass, counted as if nothing were silenced.",
    ),
    ("grad_norm", "grad_norm", "gradient norm", False, "Norm of the adapter's gradient before clipping."),
    ("length", "completion_length", "tokens", False, "Mean length of a completion."),
)


def read_run(folder: Path) -> tuple[Config, Metrics]:
    """A run's config and metrics.

    Raises:
        InputError: the folder holds none.
    """
    metrics = run_metrics(folder)
    return load_config(folder / "config.yaml"), metrics


def run_labels(configs: Sequence[Config]) -> list[str]:
    """The algorithm of each run, with the fields that differ where runs of one algorithm differ in more than seed and
    length."""
    fields = []
    for config in configs:
        free = {"seed": True, "output_dir": True, "log": True, "audit": True, "evaluation": True}
        fields.append(flatten(config.model_dump(exclude=free | {"train": {"max_steps"}})))
    labels = []
    for mine in fields:
        others = [other for other in fields if other["algorithm"] == mine["algorithm"]]
        keys = dict.fromkeys(key for other in others for key in other)
        differing = [key for key in keys if any(other.get(key) != mine.get(key) for other in others)]
        labels.append(", ".join([mine["algorithm"], *(f"{key}={mine.get(key)!s:.30}" for key in differing)]))
    return labels


def seed_curve(label: str, runs: Sequence[Metrics], metric: str) -> Curve:
    """Mean of a metric over runs, and a band of a standard deviation; over the steps that all have."""
    steps = range(1, min(len(run) for run in runs) + 1)
    means, low, high = [], [], []
    for index in range(len(steps)):
        values = [run[index][metric] for run in runs if run[index][metric] is not None]
        mean = statistics.fmean(values) if values else None
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        means.append(mean)
        low.append(None if mean is None else mean - spread)
        high.append(None if mean is None else mean + spread)
    if len(runs) == 1:
        return Curve(label, steps, means)
    return Curve(f"{label} ({len(runs)} seeds)", steps, means, low, high)


def last_mean(runs: Sequence[Metrics], metric: str, window: int = 5) -> str:
    """Mean over the last steps of each run, and the standard deviation over runs."""
    values = []
    for run in runs:
        last = [line[metric] for line in run[-window:] if line[metric] is not None]
        values += [statistics.fmean(last)] if last else []
    if not values:
        return "-"
    spread = f" ± {_text(statistics.stdev(values))}" if len(values) > 1 else ""
    return _text(statistics.fmean(values)) + spread


def run_charts(metrics: Metrics) -> dict[str, tuple[str, Draw]]:
    """Caption and chart by file name, of what every run logs."""

    def curve(metric: str, label: str, *band: str) -> Curve:
        steps = [line["step"] for line in metrics]
        return Curve(label, steps, *([line[name] for line in metrics] for name in (metric, *band)))

    return {
        "reward": ("Mean reward of the sampled completions.", lines([curve("reward", "reward")], "mean reward")),
        "entropy": (
            "Entropy of the next-token distribution: mean, median, and the band from its 10 % to its 90 % quantile.",
            lines([curve("entropy", "mean", "entropy_p10", "entropy_p90"), curve("entropy_p50", "median")], "nats"),
        ),
        "silenced": (
            "Share of all tokens that are candidates (A > 0, pi < tau_p), spurious (also H < tau_h), and silenced.",
            lines([curve(f"{name}_share", name) for name in ("candidate", "spurious", "silenced")], "share", log=True),
        ),
        "tau_h": ("Entropy threshold, anew in each mini-batch.", lines([curve("tau_h", "tau_h")], "tau_h [nats]")),
    }


def token_charts(groups: dict[str, Metrics], quadrants: Metrics) -> dict[str, tuple[str, Draw]]:
    """The same, of what the token log notes.

    Args:
        groups: the candidates, silenced and kept.
    """
    places = {"tokens with A > 0": thin([point for line in quadrants for point in line["points"]], MOST_POINTS)}
    for kind, group in groups.items():
        places[kind] = [(token["probability"], token["entropy"]) for token in thin(group, MOST_POINTS)]
    thresholds = [line["tau_h"] for line in quadrants if line["tau_h"] is not None]
    tau_p = statistics.fmean(line["tau_p"] for line in quadrants)
    tau_h = statistics.fmean(thresholds) if thresholds else None
    counts = token_counts(quadrants)
    sums = [sum(line["tokens"][i] * (line["gradient_norm"][i] or 0.0) for line in quadrants) for i in range(4)]
    means = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
    names = [f"{name}\n{count:,}" for name, count in zip(QUADRANTS, counts, strict=True)]
    charts = {
        "plane": (
            "Tokens of rewarded completions. STAPO silences the lower left: improbable, though the model was sure.",
            plane(places, tau_p, tau_h),
        ),
        "gradient": (
            "Mean norm of a token's gradient with respect to its logits, exact, and the number of tokens: rare is "
            "pi < tau_p, sure is H < tau_h.",
            bars(names, means, QUADRANT_COLOURS, "mean gradient norm"),
        ),
    }
    for name, colour, (kind, group) in zip(FREQUENCIES, CANDIDATE_COLOURS, groups.items(), strict=True):
        most = frequent(group)
        chart = bars([text for text, _ in most], [n for _, n in most], [colour], "occurrences in the token log")
        charts[name] = (f"Most frequent: {kind}.", chart)
    return charts


def token_counts(quadrants: Metrics) -> list[int]:
    """Tokens in each quadrant, over all steps."""
    return [sum(counts) for counts in zip(*(line["tokens"] for line in quadrants), strict=True)]


def frequent(tokens: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """The most frequent tokens, with white space to be seen; parts of a character are told apart by their id."""
    counts = Counter((token["token"], token["token_id"]) for token in tokens)
    return [
        (visible(text) + (f" #{token_id}" if "\ufffd" in text else ""), count)
        for (text, token_id), count in counts.most_common(MOST_FREQUENT)
    ]


def visible(text: str) -> str:
    """White space as marks."""
    return text.translate({ord(" "): "␣", ord("\n"): "⏎", ord("\t"): "⇥", ord("\r"): "␍"})


def write_page(folder: Path, charts: dict[str, tuple[str, Draw]], **values: Any) -> Path:
    """Draw the charts as PNGs, and write `index.html` with them in it.

    Raises:
        InputError: the folder cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("stapo_lite"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    pictures = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (caption, draw) in charts.items():
            images = {theme: png(draw, theme, height=4.2 if name in FREQUENCIES else 3.2) for theme in THEMES}
            (folder / f"{name}.png").write_bytes(images["light"])
            encoded = {theme: base64.b64encode(image).decode("ascii") for theme, image in images.items()}
            if name not in FREQUENCIES:
                pictures.append({"name": name, "caption": caption} | encoded)
        page = environment.get_template("audit.html").render(pictures=pictures, version=__version__, **values)
        write_text(folder / "index.html", page)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder / "index.html"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stapo_lite.audit", description="A page about a run's tokens, or about several runs."
    )
    parser.add_argument("folders", nargs="+", metavar="RUN", help="a run folder; or `compare` and several")
    parser.add_argument("--out", type=Path, help="folder of page and PNGs; by default RUN/audit, or runs/compare")
    arguments = parser.parse_args()
    with one_line_errors():
        if arguments.folders[0] == "compare":
            page = compare(arguments.folders[1:], arguments.out or Path("runs/compare"))
        elif len(arguments.folders) == 1:
            page = audit(arguments.folders[0], arguments.out)
        else:
            raise InputError(f"one run folder, or: compare {' '.join(arguments.folders)}")
        print(f"page: {page}")


if __name__ == "__main__":
    main()
