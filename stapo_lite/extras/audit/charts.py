"""Charts as PNG: curves over steps, and the probability-entropy plane."""

import io
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

COLOURS = {"silenced": "#d55e00", "kept": "#0072b2", "other": "#009e73"}


def axes() -> Any:
    """The axes of a chart that fits a column of text and is readable on a phone."""
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    chart = figure.subplots()
    chart.grid(alpha=0.4, linewidth=0.6)
    chart.spines[["top", "right"]].set_visible(False)
    return chart


def png(chart: Any) -> bytes:
    """A chart as a PNG file, from its axes."""
    file = io.BytesIO()
    chart.figure.savefig(file, dpi=200)
    return file.getvalue()


def curves(metrics: pd.DataFrame, names: list[str], label: str, log: bool = False) -> bytes:
    """Metrics over the steps. The curves of a long run are running means over a thirtieth of it.

    Args:
        metrics: indexed by step; columns that were never measured may be missing.
    """
    window = max(1, len(metrics) // 30)
    values = metrics.reindex(columns=names).astype(float)
    smooth = values.rolling(window, min_periods=1).mean()
    marker = None
    if window == 1:  # a short run, whose single steps show
        marker = "."
    chart = smooth.plot(ax=axes(), logy=log, ylabel=label, marker=marker)
    return png(chart)


def plane(points: pd.DataFrame, tau_p: float, tau_h: float) -> bytes:
    """Tokens by probability and entropy; the thresholds cut the plane into quadrants.

    Args:
        points: columns probability, entropy, kind.
    """
    chart = axes()
    for kind, tokens in points.groupby("kind", sort=False):
        chart.scatter(
            tokens.probability,
            tokens.entropy,
            s=8,
            alpha=0.7,
            linewidths=0,
            color=COLOURS[kind],
            label=kind,
        )
    chart.axvline(tau_p, linestyle="--", color="#999999", label="tau_p, tau_h")
    chart.axhline(tau_h, linestyle="--", color="#999999")
    chart.set(xscale="log", xlabel="probability of the token", ylabel="entropy [nats]")
    chart.legend(fontsize=8, loc="upper right")
    return png(chart)
