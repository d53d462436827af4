"""Read configs from YAML and `key.sub=value` overrides.

Errors are one line each, with the key and the fix.
"""

import copy
import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from stapo_lite.config.schema import Config, EvalConfig, Section
from stapo_lite.errors import InputError, explained

S = TypeVar("S", bound=Section)
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of the YAML reader; a ValueError for bad UTF-8 and huge numbers."""
CONFIGS = Path(__file__).parents[1] / "configs"
"""Example configs, shipped with the package."""


def load_config(
    source: str | Path | dict[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """Read a YAML config and apply overrides.

    Args:
        source: a file, or its contents as nested dictionaries. If `configs/NAME.yaml` is missing,
            the package's example of that name is read.
        overrides: `key.sub=value` strings with YAML values, or a mapping from keys to values. Keys
            of a mapping need no section: `learning_rate` is `train.learning_rate`. Values that are
            dictionaries are merged.

    Raises:
        InputError: the file is missing or not a mapping; a key is unknown (with the nearest match);
            a value has the wrong type or range; the batch sizes do not fit together.
    """
    return _load(Config, source, overrides)


def load_eval_config(
    source: str | Path | dict[str, Any], overrides: Sequence[str] = ()
) -> EvalConfig:
    """Read an evaluation's config; arguments and errors as in `load_config`."""
    return _load(EvalConfig, source, overrides)


def _load(
    schema: type[S],
    source: str | Path | dict[str, Any],
    overrides: Sequence[str] | Mapping[str, Any],
) -> S:
    if isinstance(source, dict):
        path, tree = "config", copy.deepcopy(source)
    else:
        path, tree = str(source), _read_yaml(Path(source))
    if isinstance(overrides, Mapping):
        named = {_full_key(schema, key): value for key, value in overrides.items()}
        values = list(flatten(named).items())
    else:
        values = list(map(_read_override, overrides))
    for key, value in values:
        _set(tree, key, str(value) if isinstance(value, Path) else value)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(schema, error.errors())}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with the same key twice; YAML's own loader silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.parent == Path("configs") and not path.exists() and (CONFIGS / path.name).exists():
        path = CONFIGS / path.name
    with explained(f"{path}: cannot be read as YAML", OSError, *NOT_YAML):
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    if not isinstance(tree, dict):
        raise InputError(f"{path}: must be a YAML mapping of keys, as in configs/quickstart.yaml")
    return tree


def to_yaml(config: Section, given: bool = False) -> str:
    """A config as YAML that `load_config` reads back.

    Args:
        given: only the keys that were given, not those that presets and defaults set.
    """
    tree = config.model_dump(exclude_unset=given)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _read_override(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r}: write it as key.sub=value")
    with explained(f"override {override[:80]!r}: the value is not YAML", *NOT_YAML):
        # To YAML an asterisk begins an alias; here it begins a pattern of files.
        return key, text if text.startswith("*") else yaml.load(text, _Loader)


def _full_key(schema: type[Section], name: str) -> str:
    """The full key of a name without its section. Keys of `evaluation` have no short names, since
    other sections have many of the same names."""
    meant = [key for key in _by_name(schema).get(name, []) if not key.startswith("evaluation.")]
    return meant[0] if meant else name


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise InputError(f"override {key}={value}: {parent} is a value, not a section")
    node[last] = value


def _explain(schema: type[Section], errors: Sequence[Any]) -> str:
    """Render pydantic's errors as one line: all unknown keys, of which whoever comes from TRL has
    many, or else the first mistake: the key, what is wrong, what is allowed."""
    unknown = [".".join(e["loc"]) for e in errors if e["type"] == "extra_forbidden"]
    if unknown:
        return "; ".join(_unknown(schema, key) for key in unknown)
    error = errors[0]
    key = ".".join(map(str, error["loc"]))
    kind, value, message = error["type"], error["input"], error["msg"]
    if kind == "missing":
        return f"key {key!r} is required: add it"
    if kind == "value_error":  # from `conflicts`, which names the keys
        return str(error["ctx"]["error"])
    return f"key {key!r}: {message[0].lower()}{message[1:]}, got {reprlib.repr(value)}"


def _unknown(schema: type[Section], key: str) -> str:
    """Render an unknown key and what may be meant: keys of the same name in another section, or
    those with the most similar name."""
    by_name = _by_name(schema)
    name = key.rpartition(".")[2]
    near = [name] if name in by_name else difflib.get_close_matches(name, by_name, n=1, cutoff=0.83)
    meant = [repr(full) for one in near for full in by_name[one]]
    hint = f"did you mean {' or '.join(meant)}?" if meant else "docs/config.md lists all"
    return f"unknown key {key!r}: {hint}"


def _by_name(schema: type[Section]) -> dict[str, list[str]]:
    """Full keys by themselves and by their last part."""
    found: dict[str, list[str]] = {}
    for key in _keys(schema):
        for name in {key, key.rpartition(".")[2]}:
            found.setdefault(name, []).append(key)
    return found


def _keys(section: Any, prefix: str = "") -> Iterator[str]:
    """All keys of a section; those of nested sections are dotted."""
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def flatten(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
