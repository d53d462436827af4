"""A run folder: what marks it, and its logs. Each line of a log has its `step`, by which the logs
are cut back if the run is resumed."""

import os
from pathlib import Path
from typing import Any

from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.files import read_lines, read_object, size_up_to_step, sync

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
TOKENS_FILE = "tokens.jsonl"
SYMPTOMS_FILE = "symptoms.jsonl"
LOGS = (METRICS_FILE, COMPLETIONS_FILE, EVALUATIONS_FILE, TOKENS_FILE, SYMPTOMS_FILE)
"""Other files in the folder are the user's, and stay as they are."""
ENVIRONMENT_FILE = "environment.json"


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has its environment or a checkpoint."""
    path = folder / ENVIRONMENT_FILE
    begun = path.exists() and "stapo_lite" in read_object(path)
    return begun or any(folder.glob("checkpoint-*/state.json"))


def check_place(config_file: str | Path, output_dir: str) -> None:
    """Raise InputError if a run's own config names another folder than the run's, as it does after
    the run was moved: --resume would begin a new run there."""
    home = Path(config_file).parent
    is_its_config = holds_run(home) and load_config(config_file).output_dir == output_dir
    if is_its_config and Path(output_dir).resolve() != home.resolve():
        raise InputError(
            f"--resume: the run of {config_file} is not in its output_dir={output_dir}: set "
            f"output_dir={home.resolve()}"
        )


def existing_logs(folder: Path) -> list[Path]:
    """The logs that a run has so far."""
    return [folder / name for name in LOGS if (folder / name).exists()]


def flush_logs(folder: Path) -> None:
    """Write all lines of the logs to the disk.

    Raises:
        OSError: they cannot be written.
    """
    for path in existing_logs(folder):
        sync(path)


def drop_later_lines(folder: Path, step: int) -> None:
    """Drop the lines of later steps, which a resumed run writes again. Step 0 drops all lines, also
    those of an evaluation before the first step.

    Raises:
        InputError: a file is not a log; then none was changed.
    """
    # Find all ends before the first cut: a file that is no log leaves the others whole.
    sizes = {path: size_up_to_step(path, step or -1) for path in existing_logs(folder)}
    for path, size in sizes.items():
        os.truncate(path, size)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run; none if it has no metrics file."""
    return read_lines(folder / METRICS_FILE)
