"""Progress bars of what takes long: rollouts, updates, evaluations."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

from stapo_lite.types import Completion


def progress_bar(task: str, unit: str, total: int, steps: Iterable[Any] | None = None) -> tqdm:
    """A progress bar of the first process, removed when done. Without a terminal, such as in a log
    file or a notebook, it is a line each minute."""
    options: dict[str, Any] = {"disable": os.environ.get("RANK", "0") != "0"}
    if not sys.stderr.isatty():
        line = "{desc}: {n_fmt} of {total_fmt} {unit}s in {elapsed}{postfix}\n"
        options |= {"mininterval": 60, "delay": 60, "bar_format": line}
    return tqdm(steps, task, total, leave=False, unit=unit, miniters=0, **options)


def show_speed(bar: tqdm, completions: Iterable[Completion]) -> None:
    """Show the tokens per second of the finished completions behind a bar."""
    tokens = sum(len(completion.token_ids) for completion in completions)
    seconds = bar.format_dict["elapsed"] or 1
    bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s", refresh=False)
