"""JSON lines, and files that are replaced as a whole."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stapo_lite.config import InputError


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """A user's file: one JSON object per line, values as they are (the `datasets` reader turns text into dates).

    Raises:
        InputError: no such file, or a line is not a JSON object.
    """
    rows = []
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    with file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict | None):
                raise InputError(f"{path}, line {number}: must be a JSON object, got {type(row).__name__}")
            rows += [] if row is None else [row]
    return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON lines file that may have been cut off; none where there is no file."""
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace a JSON lines file."""
    write_text(path, "".join(map(_dump, lines)))


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add to a JSON lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(_dump, lines))


def _dump(line: dict[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: who is killed meanwhile leaves the old one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
