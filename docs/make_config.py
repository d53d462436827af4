"""The config reference as Markdown, generated from the fields' docstrings: `make docs` writes
docs/config.md."""

import json
import re
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stapo_lite.config import Config, EvalConfig


def reference() -> str:
    """docs/config.md"""
    lines = ["# Config reference", "", "Each key with its default, and other values.", ""]

    def add(section: type[BaseModel], prefix: str, title: str = "") -> None:
        lines.extend(
            [
                f"## {title}{prefix.rstrip('.') or 'top level'}",
                "",
                " ".join((section.__doc__ or "").split()),
                "",
            ]
        )
        nested, rows, as_before = [], [], []
        own = section.__annotations__
        fields = sorted(section.model_fields.items(), key=lambda item: item[0] not in own)
        for name, field in fields:
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                nested.append((kind, f"{prefix}{name}."))
                continue
            meaning = " ".join((field.description or "").split())
            meaning = re.sub(r"docs/(\w+\.md)(#[\w-]+)?", r"[\1](\1\2)", meaning)
            row = f"- {_values(prefix + name, field)}: {meaning}"
            if row in lines:
                as_before.append(f"`{prefix}{name}`")
            else:
                rows.append(row)
        if as_before:
            lines.extend([f"As in a run: {', '.join(as_before)}.", ""])
        lines.extend([*rows, ""])
        for kind, path in nested:
            add(kind, path, title)

    add(Config, "")
    add(EvalConfig, "", "evaluate: ")
    return "\n".join(lines).rstrip() + "\n"


def _values(key: str, field: FieldInfo) -> str:
    """A key with its default, as in YAML, and what else can be chosen."""
    if field.is_required():
        return f"`{key}` (required)"
    default = f"{key}: {json.dumps(field.default)}"
    others = [choice for choice in _choices(field.annotation) if choice != field.default]
    return ", ".join(f"`{value}`" for value in (default, *others))


def _choices(kind: Any) -> list[Any]:
    """The values of a type's literals: of `Literal["nf4"] | None` "nf4"."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]


if __name__ == "__main__":
    print(reference(), end="")
