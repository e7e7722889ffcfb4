"""Typed configuration: frozen dataclasses filled from one TOML file and `--set a.b=value` overrides.

Defaults < file < overrides. Unknown keys, wrong types and broken rules are collected and reported together.
"""

import dataclasses
import datetime
import tomllib
import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from spd.errors import ConfigError

Config = TypeVar("Config")


def load_config(config_type: type[Config], path: str | None, overrides: Sequence[str]) -> Config:
    """Return a `config_type` from defaults, then the TOML file, then overrides like `train.lr=3e-4`.

    Raises ConfigError listing every problem at once. A config may define `problems() -> list[str]` for its own rules;
    they are asked once the types are right.
    """
    values = _read_toml(path) if path else {}
    for override in overrides:
        _apply_override(values, override)
    return build_config(config_type, values)


def build_config(config_type: type[Config], values: Mapping[str, object]) -> Config:
    """Return a `config_type` from nested plain values; raises ConfigError listing every problem at once."""
    problems: list[str] = []
    config = _build(config_type, values, "", problems)
    if not problems:
        problems = _rules(config, "")
    if problems:
        raise ConfigError("; ".join(problems))
    return cast(Config, config)


def config_to_dict(config: object) -> dict[str, object]:
    """Return a config as nested plain values, as a TOML or JSON file would hold it."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    return dataclasses.asdict(config)


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested values under dotted names, as MLflow parameters want them."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read_toml(path: str) -> dict[str, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config={path!r} cannot be read ({error.strerror}): name an existing TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config={path!r} is not UTF-8: save it as such") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config={path!r} is no valid TOML: {error}") from None


def _apply_override(values: dict[str, object], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} must read name=value, for example --set train.seed=1")
    node = values
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a table")
        node = child
    node[leaf] = _parse_value(text.strip())


def _parse_value(text: str) -> object:
    """Return the TOML value that `text` spells, or the text itself: `--set output=runs/a` needs no quotes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text == "null" else text
    return text if isinstance(value, datetime.date | datetime.time) else value  # output=2026-12-01 names a folder


def _build(config_type: type, values: Mapping[str, object], prefix: str, problems: list[str]) -> object:
    hints = get_type_hints(config_type)
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    problems.extend(_unknown_key(prefix, key, list(fields)) for key in values if key not in fields)
    arguments: dict[str, object] = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _convert(values[name], hints[name], f"{prefix}{name}", problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{name} is missing: set it in the file or with --set {prefix}{name}=...")
    return None if problems else config_type(**arguments)


def _unknown_key(prefix: str, key: str, known: list[str]) -> str:
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"{prefix}{key} is no known key: {hint}"


def _convert(value: object, hint: object, name: str, problems: list[str]) -> object:
    """Return `value` as the annotated type; a mismatch goes to `problems`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return _build(hint, value, f"{name}.", problems)
        problems.append(f"{name}={value!r} must be a table of settings")
        return None
    if (item := _table_item(hint)) is not None and isinstance(value, list):
        return tuple(_convert(one, item, f"{name}[{place}]", problems) for place, one in enumerate(value))
    if _accepts(value, hint):
        return float(cast(int, value)) if hint is float else tuple(value) if isinstance(value, list) else value
    problems.append(f"{name}={value!r} must be {_describe(hint)}")
    return None


def _table_item(hint: object) -> type | None:
    """Return the dataclass of `tuple[dataclass, ...]` (TOML's `[[name]]`), None for any other annotation."""
    args = get_args(hint) if get_origin(hint) is tuple else ()
    return args[0] if args and isinstance(args[0], type) and dataclasses.is_dataclass(args[0]) else None


def _accepts(value: object, hint: object) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_accepts(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_accepts(item, args[0]) for item in value)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def _describe(hint: object) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(arg) for arg in args)
    if origin is tuple:
        return f"a list of {_describe(args[0])}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(cast(type, hint), str(hint))


def _rules(config: object, prefix: str) -> list[str]:
    """Return what each (nested) config's own `problems()` says, its field names prefixed by where it stands."""
    found: list[str] = []
    assert dataclasses.is_dataclass(config)
    type_hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found.extend(_rules(value, f"{prefix}{field.name}."))
        if _table_item(type_hints[field.name]) is not None:
            for place, item in enumerate(value):
                found.extend(_rules(item, f"{prefix}{field.name}[{place}]."))
    own = getattr(type(config), "problems", None)
    if own is not None:
        found.extend(prefix + problem for problem in own(config))
    return found
