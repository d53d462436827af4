"""Line charts over steps, the probability-entropy plane and bars, as PNG."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

# the Okabe-Ito palette and two more
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999",
)  # fmt: skip
CANDIDATE_COLOURS = ("#d55e00", "#0072b2")
QUADRANT_COLOURS = ("#d55e00", "#009e73", "#0072b2", "#8c6bb1")
LONG = 100
"""Runs of more steps get smoothed curves, since a single step has few rewards."""


class Curve(NamedTuple):
    """One line of a chart, with a band if `low` and `high` are given. None marks a step without a
    value."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


def png(draw: Callable[..., None], *arguments: Any) -> bytes:
    """Draw a chart, as PNG, that fits a column of text and is readable on a phone.

    Args:
        draw: `lines`, `plane` or `bars`; called with axes and the arguments.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.4, linewidth=0.6)
    axes.set_axisbelow(True)
    draw(axes, *arguments)
    file = io.BytesIO()
    figure.savefig(file, dpi=150)
    return file.getvalue()


def lines(axes: Any, curves: Sequence[Curve], label: str, log: bool = False) -> None:
    """Draw curves over the steps. For a long run these are running means over a thirtieth of it,
    with each step's values pale behind them.

    Args:
        label: label of the vertical axis.
        log: use a logarithmic axis, without values of 0 or less.
    """
    for curve, colour, style in zip(curves, cycle(COLOURS), cycle(("-", "--", ":")), strict=False):
        values = _drawn(curve.values, log)
        if len(values) > LONG:
            axes.plot(curve.steps, values, color=colour, linewidth=0.6, alpha=0.25)
            values = _drawn(running_mean(curve.values, len(values) // 30), log)
        # Mark single steps if there are few, or gaps between them.
        marker = "." if len(values) < 40 or any(map(math.isnan, values)) else None
        look = {"color": colour, "linestyle": style, "linewidth": 1.6, "marker": marker}
        axes.plot(curve.steps, values, label=curve.label, **look)
        if curve.low is not None and curve.high is not None:
            low, high = _drawn(curve.low, log), _drawn(curve.high, log)
            axes.fill_between(curve.steps, low, high, color=colour, alpha=0.2, linewidth=0)
    if log and any(value for curve in curves for value in curve.values):
        axes.set_yscale("log")
    if all(value is None for curve in curves for value in curve.values):
        axes.set(yticks=[], xlim=(curves[0].steps[0], curves[0].steps[-1] + 1))
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center")
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="step", ylabel=label)
    if len(curves) > 1:
        axes.figure.legend(fontsize=8, loc="outside upper left", ncols=len(curves), frameon=False)
        axes.figure.set_figheight(axes.figure.get_figheight() + 0.17)  # for the legend's row


def plane(
    axes: Any, places: Mapping[str, Sequence[Sequence[float]]], tau_p: float, tau_h: float | None
) -> None:
    """Draw tokens by probability and entropy; the thresholds cut the plane into quadrants.

    Args:
        places: (probability, entropy) of tokens, by the label of their group: a sample of tokens
            with A > 0, silenced candidates, other candidates.
        tau_h: None if there were no candidates.
    """
    styles = zip(("#999999", *CANDIDATE_COLOURS), (4, 14, 14), strict=True)
    for (name, some), (colour, size) in zip(places.items(), styles, strict=True):
        if some:
            probabilities, entropies = zip(*some, strict=True)
            look = {"s": size, "color": colour, "linewidths": 0, "alpha": 0.7}
            axes.scatter(probabilities, entropies, label=name, rasterized=True, **look)
    axes.set_xscale("log")
    axes.axvline(tau_p, color=COLOURS[4], linewidth=1.2, linestyle="--", label="tau_p, mean")
    if tau_h is not None:
        axes.axhline(tau_h, color=COLOURS[3], linewidth=1.2, linestyle="--", label="tau_h, mean")
    axes.set(xlabel="probability of the token", ylabel="entropy [nats]")
    # The corner is empty: a probable token has low entropy.
    axes.legend(fontsize=8, loc="upper right")


def bars(
    axes: Any, labels: Sequence[str], values: Sequence[float], colours: Sequence[str], label: str
) -> None:
    """Draw horizontal bars, the first one on top.

    Args:
        label: of the horizontal axis.
    """
    axes.barh(labels, values, color=colours)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def running_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Means of the last `window` values, ignoring None; None if all are."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        found = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(sum(found) / len(found) if found else None)
    return means


def _drawn(values: Sequence[float | None], log: bool) -> list[float]:
    """Replace values that cannot be drawn by NaN, which matplotlib skips."""
    return [math.nan if value is None or (log and value <= 0) else value for value in values]
