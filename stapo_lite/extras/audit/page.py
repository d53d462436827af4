"""A self-contained page about a run's tokens and what became of them.

Without `log.audit_tokens` the page shows only curves, no tokens.
"""

import base64
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Template

from stapo_lite.config import S2T, load_config
from stapo_lite.extras.audit.charts import curves, plane
from stapo_lite.extras.audit.report import read_log
from stapo_lite.extras.audit.token_log import thin
from stapo_lite.files import read_lines, write_text
from stapo_lite.training.folder import METRICS_FILE, TOKENS_FILE

MOST_TOKENS = 4000
"""Limit of the table of a page."""
CAPTIONS = {
    "reward": "Mean reward of the sampled completions.",
    "entropy": (
        "Entropy of the next-token distribution in completions with an advantage: mean, quantiles; "
        "and over all completions, estimated by what was sampled."
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
}


def audit(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's page and pictures into `out`, by default `audit` in the run folder; return the
    page.

    Raises:
        InputError: the folder holds no run.
    """
    folder = Path(run_folder)
    config = load_config(folder / "config.yaml")
    metrics = read_log(folder / METRICS_FILE).set_index("step")
    s2t = config.objective.s2t
    values: dict[str, Any] = {
        "title": f"Token audit of {folder.resolve().name}",
        "finding": find_spurious(metrics, s2t),
        "facts": {"algorithm": config.algorithm, "model": config.model, "steps": len(metrics)},
    }
    charts = {}
    if lines := read_lines(folder / TOKENS_FILE):
        tokens = pd.DataFrame(lines).astype({"tau_h": float})
        charts["plane"] = plane(tokens, s2t.tau_p, tokens.tau_h.mean())
        values["tokens"] = thin([line for line in lines if "token" in line], MOST_TOKENS)
    entropies = ["entropy", "entropy_p10", "entropy_p50", "entropy_p90", "sampled_nll"]
    shares = ["candidate_share", "spurious_share", "silenced_share"]
    charts["reward"] = curves(metrics, ["reward"], "mean reward")
    charts["entropy"] = curves(metrics, entropies, "nats")
    charts["silenced"] = curves(metrics, shares, "share", log=True)
    charts["tau_h"] = curves(metrics, ["tau_h"], "tau_h [nats]")
    return write_page(Path(out) if out else folder / "audit", charts, values)


def find_spurious(metrics: pd.DataFrame, s2t: S2T) -> str:
    """A sentence about a run's spurious tokens."""
    names = ["spurious_share", "spurious_gradient_share"]
    values = metrics.reindex(columns=names).astype(float)
    share, gradient = values.mean().fillna(0)
    fate = "S2T was off"
    if s2t.enabled:
        fate = f"S2T was on (silence={s2t.silence})"
    return (
        f"{share:.3%} of all tokens were spurious (rare, rewarded, and where the model was sure of "
        f"something else); {fate}. Their gradient was {gradient:.2%} of all, counted before any "
        "was silenced."
    )


def write_page(folder: Path, charts: dict[str, bytes], values: dict[str, Any]) -> Path:
    """Write the charts, and `index.html` with the charts in it."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = Template(text, autoescape=True, trim_blocks=True)
    pictures = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in charts.items():
        (folder / f"{name}.png").write_bytes(image)
        pictures[name] = (CAPTIONS[name], base64.b64encode(image).decode())
    page = template.render(pictures=pictures, version=version("stapo-lite"), **values)
    write_text(folder / "index.html", page)
    return folder / "index.html"
