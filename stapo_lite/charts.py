"""Line charts over steps, the probability-entropy plane and bars, as PNG for a light and a dark page."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

THEMES: dict[str, dict[str, Any]] = {
    "light": {"ink": "#1f2328", "paper": "#ffffff", "grid": "#d0d7de"},
    "dark": {"ink": "#e6edf3", "paper": "#0d1117", "grid": "#30363d"},
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")  # Okabe and Ito's
CANDIDATE_COLOURS = ("#d55e00", "#0072b2")
QUADRANT_COLOURS = ("#d55e00", "#009e73", "#0072b2", "#8c6bb1")

Draw = Callable[[Any], None]
"""Draws on matplotlib axes, in the theme's colours, which are then the default."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart, with a band around it if there is one; None where a step has no value."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


def png(draw: Draw, theme: str, height: float = 3.2) -> bytes:
    """A picture for a column of text, readable on a phone too."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, paper, grid = (THEMES[theme][name] for name in ("ink", "paper", "grid"))
    style: Any = {"font.size": 11, "font.family": "DejaVu Sans"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), paper)
    style |= dict.fromkeys(("axes.edgecolor", "legend.edgecolor", "grid.color"), grid)
    with rc_context(style):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.6, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes)
        file = io.BytesIO()
        figure.savefig(file, dpi=150)
    return file.getvalue()


def lines(curves: Sequence[Curve], label: str, log: bool = False) -> Draw:
    """Curves over the steps.

    Args:
        label: of the vertical axis.
        log: logarithmic; zeros are left out.
    """

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        for curve, colour, style in zip(curves, cycle(COLOURS), cycle(("-", "--", ":")), strict=False):
            values = [_number(value, log) for value in curve.values]
            # A point for each step where there are few, or gaps between them.
            marker = "." if len(values) < 40 or any(map(math.isnan, values)) else None
            axes.plot(
                curve.steps, values, color=colour, linestyle=style, label=curve.label, linewidth=1.6, marker=marker
            )
            if curve.low is not None and curve.high is not None:
                high = [_number(value, log) for value in curve.high]
                # On a logarithmic axis a band that reaches zero goes down to the curve's smallest value.
                floor = min((value for value in values if value == value), default=math.nan)
                low = [math.nan if v is None else floor if log and v <= 0 else v for v in curve.low]
                axes.fill_between(curve.steps, low, high, color=colour, alpha=0.2, linewidth=0)
        if log and any(value for curve in curves for value in curve.values):
            axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        if len(curves) > 1:
            for text in axes.legend(fontsize=9).get_texts():
                text.set_parse_math(False)

    return draw


def plane(places: Mapping[str, Sequence[Sequence[float]]], tau_p: float, tau_h: float | None) -> Draw:
    """Tokens by probability and entropy; the thresholds cut the plane into quadrants.

    Args:
        places: (probability, entropy) of some tokens, of the candidates that are silenced and of the others, under
            what they are called.
        tau_h: None where there were no candidates.
    """

    def draw(axes: Any) -> None:
        styles = zip(("#999999", *CANDIDATE_COLOURS), (4, 14, 14), strict=True)
        for (name, some), (colour, size) in zip(places.items(), styles, strict=True):
            if some:
                x, y = zip(*((p, h) for p, h, *_ in some), strict=True)
                axes.scatter(x, y, s=size, color=colour, label=name, linewidths=0, alpha=0.7, rasterized=True)
        axes.set_xscale("log")
        axes.axvline(tau_p, color=COLOURS[4], linewidth=1.2, linestyle="--", label="tau_p, mean")
        if tau_h is not None:
            axes.axhline(tau_h, color=COLOURS[3], linewidth=1.2, linestyle="--", label="tau_h, mean")
        axes.set_xlabel("probability of the token")
        axes.set_ylabel("entropy [nats]")
        axes.legend(fontsize=8)

    return draw


def bars(labels: Sequence[str], values: Sequence[float], colours: Sequence[str], label: str) -> Draw:
    """Horizontal bars, the first one on top.

    Args:
        label: of the horizontal axis.
    """

    def draw(axes: Any) -> None:
        axes.barh(range(len(values)), values, color=colours)
        axes.set_yticks(range(len(labels)), [_drawable(text) for text in labels])
        for text in axes.get_yticklabels():
            text.set_parse_math(False)
        axes.invert_yaxis()
        axes.set_xlabel(label)

    return draw


def _number(value: float | None, log: bool) -> float:
    """NaN, which matplotlib leaves out, where there is nothing to draw."""
    return math.nan if value is None or (log and value <= 0) else value


def _drawable(text: str) -> str:
    """Characters that matplotlib's own font lacks, as escapes."""
    from matplotlib.font_manager import findfont, get_font

    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(c if ord(c) in glyphs or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
