"""What every benchmark needs: a clock, and a result with the commit and the versions it was measured with."""

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
    """Seconds, when everything started before is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    start = now()
    call()
    return now() - start


def commit() -> str:
    """Of the checkout this file is in; "unknown" where it is in none, or there is no git."""
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
