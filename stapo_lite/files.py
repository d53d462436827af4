"""JSON lines files, and atomic replacement of files."""

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock, Timeout

from stapo_lite.errors import InputError, RunError, explained

SURROGATES = "backslashreplace"
"""Error handler: writes lone surrogates, which UTF-8 cannot encode, as JSON escapes (`\\ud800`)."""


def lock(folder: Path) -> AbstractContextManager:
    """Create an output folder and lock it against other processes.

    The lock ends with its process, however that ends. On a file system without locks it is a plain
    file, which stays behind if the process is killed on another machine.

    Raises:
        InputError: another process writes to the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / ".lock").acquire(blocking=False)
    except Timeout:
        raise InputError(
            f"output_dir={folder}: another run writes to it now; choose another folder, or delete "
            ".lock if none does"
        ) from None
    except OSError as error:
        raise InputError(f"output_dir={folder}: cannot be written ({error.strerror})") from None


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read a user's file with one JSON object per line, or one array of them; it may be compressed.
    Values stay as they are; the `datasets` reader would turn text into dates, and large integers
    into floats.

    Raises:
        InputError: no such file, or a line is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    disk = fsspec.filesystem("file")
    with (
        explained(f"{path}: cannot be read"),
        disk.open(str(path), "rb", compression="infer") as file,
    ):
        for number, line in enumerate(file, start=1):
            if not rows and line.lstrip(b"\xef\xbb\xbf \t")[:1] == b"[":
                return _parse(line + file.read(), str(path), list)
            if line.strip():
                rows.append(_parse(line, f"{path}, line {number}"))
    return rows


def read_table(delimiter: str, path: str) -> list[dict[str, Any]]:
    """Read a CSV file, which may be compressed. Columns of numbers, all in Python's spelling, hold
    numbers, all others text."""
    import pandas as pd  # slow to import

    options: Any = {"sep": delimiter, "dtype": str, "na_filter": False, "index_col": False}
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        table = pd.read_csv(path, **options)  # a warning: rows have more cells than the head
    for name in table:
        cells = list(table[name])
        with suppress(ValueError):
            numbers = [int(cell) if cell.lstrip("-").isdigit() else float(cell) for cell in cells]
            # 007 and 0.50 stay text, as do nan and inf.
            if list(map(str, numbers)) == cells and all(cell[-1].isdigit() for cell in cells):
                table[name] = pd.Series(numbers, dtype=object)
    return table.to_dict("records")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON lines file; none if there is no file.

    Raises:
        InputError: a complete line is not a JSON object.
    """
    return [line for _, line in _complete_lines(path)] if path.exists() else []


def size_up_to_step(path: Path, step: int) -> int:
    """Bytes of a JSON lines file before the first line that is incomplete or of a later step.

    Raises:
        InputError: a line before that is not a JSON object, or has no step.
    """
    size = 0
    with explained(f"{path}: its lines must have a step", KeyError, TypeError):
        for end, line in _complete_lines(path):
            if line["step"] > step:
                break
            size = end
    return size


def _complete_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each complete line's end, as an offset in bytes, and its object."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            if line.endswith(b"\n"):
                yield end, _parse(line, f"{path}, line {number}")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    with explained(f"{path}: cannot be read", OSError):
        return _parse(path.read_bytes(), str(path))


def _parse(data: bytes, where: str, kind: type = dict) -> Any:
    with explained(f"{where}: not JSON", ValueError, RecursionError):  # bad UTF-8, too
        # NaN, which is not JSON but what pandas writes for a gap, becomes None.
        value = json.loads(data.decode("utf-8-sig"), parse_constant=lambda _: None)
    if not isinstance(value, kind):
        raise InputError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace a JSON lines file."""
    write_text(path, "".join(map(_dump, lines)))


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append to a JSON lines file.

    Raises:
        RunError: it cannot be written.
    """
    fix = "; make room, and go on with the same command (stapo train: with --resume)"
    with (
        explained(f"{path}: cannot be written", OSError, fix=fix, kind=RunError),
        path.open("a", encoding="utf-8", errors=SURROGATES) as file,
    ):
        file.writelines(map(_dump, lines))


def _dump(line: dict[str, Any]) -> str:
    # Values that JSON does not know, such as the dates of a Parquet file, become text.
    return json.dumps(line, ensure_ascii=False, default=str) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a process killed meanwhile leaves the old file."""
    path = path.resolve()  # a link stays one
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors=SURROGATES)
    sync(partial)
    partial.replace(path)


def open_to_others(folder: Path) -> None:
    """Give the folder's permissions to its weights; safetensors writes them for the user alone."""
    for path in folder.glob("*.safetensors"):
        path.chmod(folder.stat().st_mode & 0o666)


def sync(path: Path) -> None:
    """Flush a file or folder from the system's cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_new(folder: Path) -> None:
    """Raise an InputError if an output folder holds anything but hidden files, such as the `.lock`
    that a failed start left."""
    for path in folder.glob("[!.]*"):
        raise InputError(f"output_dir={folder} holds {path.name}: choose another folder")
