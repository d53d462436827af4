"""The rows of a data set: from files, functions, folders and the Hub."""

import pkgutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from stapo_lite.config import Data
from stapo_lite.errors import InputError, explained
from stapo_lite.files import read_jsonl, read_table

ROW_FILES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".xz")
"""How the names of files of rows end."""


def load_rows(data: Data, key: str = "data.source") -> Sequence[dict[str, Any]]:
    """Load the rows of the data set. A dataset from the Hub stays on disk; each row is read on
    access.

    Args:
        key: the config key of the source, for messages.

    Raises:
        InputError: there is no such file or Hub dataset, or it has no rows.
    """
    where = f"{key}={data.source}"
    kinds = (
        "neither a readable file of rows (docs/data.md), nor a dataset on the Hub, nor a "
        "package.module:function that returns rows"
    )
    with explained(f"{where}: {kinds}"):
        rows = _read_files(data, where) if names_file(data.source) else _read_dataset(data)
    check_rows(rows, where)
    return rows


def _read_files(data: Data, where: str) -> Sequence[dict[str, Any]]:
    """Rows of a file, or of all files that a pattern (`*.jsonl`) matches; in every format the
    same."""
    paths = [data.source] if Path(data.source).is_file() else sorted(glob(data.source))
    if not paths:
        raise InputError(f"{where}: no such file")
    if data.source.lower().endswith(".parquet"):
        import datasets

        return datasets.load_dataset("parquet", data_files=paths, split="train")
    end = Path(data.source.lower().removesuffix(".gz").removesuffix(".xz")).suffix
    tables = {".csv": partial(read_table, ","), ".tsv": partial(read_table, "\t")}
    reader = tables.get(end, read_jsonl)
    return [row for path in paths for row in reader(path)]


def names_file(source: str) -> bool:
    """Whether a source ends like a file of rows; names on the Hub may have a dot, too."""
    return Path(source).suffix.lower() in ROW_FILES


def check_rows(rows: Sequence[Any], where: str) -> None:
    """Raise an InputError if there are no rows, or the first is no dictionary."""
    with explained(f"{where}: must be a list of rows, at least one, or a datasets.Dataset"):
        first = rows[0]
    if not isinstance(first, dict):
        raise InputError(f"{where}: rows must be dictionaries")


def _read_dataset(data: Data) -> Sequence[dict[str, Any]]:
    """Rows from a function, of a folder of `save_to_disk`, or of a dataset on the Hub."""
    if ":" in data.source:
        return list(pkgutil.resolve_name(data.source)())
    import datasets

    with suppress(FileNotFoundError):  # it is no such folder
        saved = datasets.load_from_disk(data.source)
        return saved[data.split] if isinstance(saved, dict) else saved
    return datasets.load_dataset(data.source, data.subset, split=data.split)
