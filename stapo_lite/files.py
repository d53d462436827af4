"""JSON lines, and files that are replaced as a whole."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from stapo_lite.errors import InputError, RunError, explained

SURROGATES = "backslashreplace"
"""Half of a surrogate pair, which UTF-8 cannot hold, is written as JSON's escape (`\\ud800`)."""


def lock(folder: Path) -> AbstractContextManager:
    """Make an output folder and keep other processes out of it.

    The lock ends with its process, whatever ends that. On a file system without locks it is a mark,
    which a process that was killed on another machine leaves behind.

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


def check_nothing_overwritten(folder: Path, patterns: Iterable[str]) -> None:
    """Check that nothing in an output folder would be overwritten.

    Args:
        patterns: names of files and folders to come, as `Path.glob` takes them.

    Raises:
        InputError: one of them is there.
    """
    for pattern in patterns:
        if there := sorted(folder.glob(pattern)):
            raise InputError(
                f"output_dir={folder}: {there[0].name} is there already and would be overwritten: "
                "choose another folder, or move it away"
            )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """A user's file: one JSON object per line, values as they are (the `datasets` reader turns text
    into dates).

    Raises:
        InputError: no such file, or a line is not a JSON object.
    """
    objects = []
    with explained(f"{path}: cannot be read", OSError), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                objects.append(_parse(line, f"{path}, line {number}"))
    return objects


def check_writable(path: Path) -> None:
    """Check, before the work whose result it is to hold, that the file of `--out` can be written.

    Raises:
        InputError: it cannot.
    """
    with explained(f"--out={path}: cannot be written", OSError):
        path.open("a").close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON lines file that may have been cut off; none if there is no file.

    Raises:
        InputError: one is not a JSON object.
    """
    return list(stream_lines(path))


def stream_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Like `read_lines`, but lazy: the file may be larger than memory."""
    if path.exists():
        yield from (line for _, line in _complete_lines(path))


def size_up_to_step(path: Path, step: int) -> int:
    """Bytes of a JSON lines file up to the first line that is of a later step, or not complete.

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
    """The offset in bytes at which each line ends, and its object; a last line that was cut off is
    left out."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            if line.endswith(b"\n"):
                yield end, _parse(line, f"{path}, line {number}")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    with explained(f"{path}: cannot be read", OSError):
        return _parse(path.read_bytes(), str(path))


def _parse(data: bytes, where: str) -> dict[str, Any]:
    with explained(f"{where}: not JSON", ValueError, RecursionError):  # bad UTF-8, too
        value = json.loads(data.decode("utf-8-sig"))
    if not isinstance(value, dict):
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
    """Replace a file as a whole: a process that is killed meanwhile leaves the old file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors=SURROGATES)
    sync(partial)
    partial.replace(path)


def sync(path: Path) -> None:
    """Write what the system still holds of a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
