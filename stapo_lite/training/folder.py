"""The logs in a run folder: every `*.jsonl`, those of callbacks included. Each line has its `step`,
by which they are cut back if the run is resumed."""

import os
from pathlib import Path
from typing import Any

from stapo_lite.files import read_lines, size_up_to_step, sync

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
ENVIRONMENT_FILE = "environment.json"


def flush_logs(folder: Path) -> None:
    """Write all lines of the logs to the disk.

    Raises:
        OSError: they cannot be written.
    """
    for path in folder.glob("*.jsonl"):
        sync(path)


def drop_later_lines(folder: Path, step: int) -> None:
    """Drop the lines of later steps, which a resumed run writes again. Step 0 drops all lines, also
    those of an evaluation before the first step.

    Raises:
        InputError: a file is not a log; then none was changed.
    """
    sizes = {path: size_up_to_step(path, step or -1) for path in folder.glob("*.jsonl")}
    for path, size in sizes.items():
        os.truncate(path, size)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run; none if it has no metrics file."""
    return read_lines(folder / METRICS_FILE)
