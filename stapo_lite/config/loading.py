"""Read configs from YAML and `key.sub=value` overrides.

Each error is one line with the key and the fix.
"""

import copy
import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from stapo_lite.config.schema import Config, EvalConfig, Section
from stapo_lite.errors import InputError, explained

S = TypeVar("S", bound=Section)
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
        InputError: the file is missing or not a mapping; a key is unknown (the message has the
            nearest one); a value has the wrong type or range; values do not go together.
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
        name = "config"
        tree = copy.deepcopy(source)
    else:
        name = str(source)
        tree = _read_yaml(Path(source))
    values: Iterable[tuple[str, Any]]
    if isinstance(overrides, Mapping):
        full = {_full_key(schema, key): value for key, value in overrides.items()}
        values = flatten(full).items()
    else:
        values = map(_read_override, overrides)
    for key, value in values:
        _set(tree, key, str(value) if isinstance(value, Path) else value)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{name}: {_explain(schema, error.errors())}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice. YAML's own loader silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.parent == Path("configs") and not path.exists() and (CONFIGS / path.name).exists():
        path = CONFIGS / path.name
    with explained(f"{path}: cannot be read as YAML"):
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    if not isinstance(tree, dict):
        raise InputError(f"{path}: must be a YAML mapping of keys, as in configs/quickstart.yaml")
    return tree


def to_yaml(config: Section, given: bool = False) -> str:
    """Write a config as YAML that `load_config` reads back.

    Args:
        given: leave out the keys that presets and defaults set.
    """
    tree = config.model_dump(exclude_unset=given)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _read_override(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r}: write it as key.sub=value")
    if text.startswith("*"):  # a pattern of files; in YAML it would be an alias
        return key, text
    with explained(f"override {override[:80]!r}: the value is not YAML"):
        return key, yaml.load(text, _Loader)


def _full_key(schema: type[Section], name: str) -> str:
    """The key with its section: `learning_rate` -> `train.learning_rate`. Keys of `evaluation` have
    no short names, since other sections have many of the same names."""
    for key in _by_name(schema).get(name, []):
        if not key.startswith("evaluation."):
            return key
    return name


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise InputError(f"override {key}={value}: {parent} is a value, not a section")
    node[last] = value


def _explain(schema: type[Section], errors: Sequence[Any]) -> str:
    """Render pydantic's errors as one line: every unknown key (users coming from TRL have several),
    or else the first invalid value."""
    unknown = [".".join(e["loc"]) for e in errors if e["type"] == "extra_forbidden"]
    if unknown:
        return "; ".join(_unknown(schema, key) for key in unknown)
    error = errors[0]
    key = ".".join(map(str, error["loc"]))
    message = error["msg"]
    if error["type"] == "missing":
        return f"key {key!r} is required: add it"
    if error["type"] == "value_error":  # from `conflicts`, which names the keys
        return str(error["ctx"]["error"])
    return f"key {key!r}: {message[0].lower()}{message[1:]}, got {reprlib.repr(error['input'])}"


def _unknown(schema: type[Section], key: str) -> str:
    """Render an unknown key with what the user may mean: keys of the same name in another section,
    or those with the most similar name."""
    by_name = _by_name(schema)
    hint = "docs/config.md lists all (for TRL's names: docs/from_trl.md)"
    # A name is the closest match of itself.
    for match in difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.83):
        hint = f"did you mean {' or '.join(map(repr, by_name[match]))}?"
    return f"unknown key {key!r}: {hint}"


def _by_name(schema: type[Section]) -> dict[str, list[str]]:
    """Full keys by their names: {"r": ["lora.r"], "lora.r": ["lora.r"], ...}."""
    keys: dict[str, list[str]] = {}
    for key in _keys(schema):
        for name in {key, key.rpartition(".")[2]}:
            keys.setdefault(name, []).append(key)
    return keys


def _keys(section: Any, prefix: str = "") -> Iterator[str]:
    """All keys of a section; those of its sections are dotted."""
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def flatten(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
