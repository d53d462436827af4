"""Shared by all benchmarks: a clock, and a result that names its commit and versions."""

import json
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

QUICKSTART = Path(__file__).parent.parent / "configs/quickstart.yaml"


def now() -> float:
    """The time in seconds, once the card has done all work that was queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = now()
    call()
    return now() - start


def commit() -> str:
    """The commit of this file's checkout; "unknown" if it is in none, or git is missing."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def save(result: dict[str, Any], path: Path | None) -> None:
    """Print the result as JSON with the commit and the versions; write it to `path` too."""
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    text = json.dumps(result | {"commit": commit(), "versions": versions}, indent=1)
    print(text)
    if path:
        path.write_text(text + "\n", encoding="utf-8")
