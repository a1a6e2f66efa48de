"""Configs as JSON and back, by their type hints: the config.json of runs and of exported models."""

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from unisono_models.training.distributed.object_collectives import Json

T = TypeVar("T")
TAG = "class"  # a keyword of Python, so no field can have this name


def config_to_json(config: object) -> Json:
    """Convert a dataclass to JSON: nested dataclasses become objects, paths strings, tuples lists. Floats stay exact.

    If a field can have one of several dataclasses, its object names the class under "class".

    Example:
        >>> from unisono_models.training.config import CheckpointConfig
        >>> config_to_json(CheckpointConfig(every=100))
        {'every': 100, 'keep': 2}
    """
    return _to_json(config, type(config), "")


def config_from_json(cls: type[T], value: Json) -> T:
    """Convert what config_to_json returned back to a `cls`. A field that is absent gets its default.

    Hints may be dataclasses, bool, int, float, str, Path, None, Literal, tuple, list, dict with str keys, unions of these, and
    Any. Numbers and strings are not converted into each other; only an int is accepted for a float.

    Raises: ValueError that names the field by its dotted path if it is unknown, missing, or of the wrong type.

    Example:
        >>> from unisono_models.training.config import CheckpointConfig
        >>> config_from_json(CheckpointConfig, {"every": 100})
        CheckpointConfig(every=100, keep=2)
        >>> config_from_json(CheckpointConfig, {"evry": 100})
        Traceback (most recent call last):
        ValueError: config_from_json: evry: CheckpointConfig has no such field, only every, keep
    """
    return cast(T, _from_json(cls, value, ""))


def read_json(path: Path) -> Json:
    """Read the JSON file `path`. Raises: ValueError that names the file if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _to_json(value: object, hint: Any, where: str) -> Json:
    if is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        tag = {TAG: type(value).__name__} if len(_dataclasses(hint)) > 1 else {}
        return tag | {
            field.name: _to_json(getattr(value, field.name), hints[field.name], _below(where, field.name))
            for field in fields(value)
            if field.init
        }
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        inner = (get_args(hint) or (Any, Any))[-1]
        return {key: _to_json(item, inner, _below(where, key)) for key, item in value.items()}
    if isinstance(value, Sequence):
        hints_of = _items(hint, len(value))
        return [_to_json(item, hints_of[i], _below(where, str(i))) for i, item in enumerate(value)]
    raise ValueError(f"config_to_json: {where or 'the config'}: {type(value).__name__} cannot be converted to JSON")


def _from_json(hint: Any, value: Json, where: str) -> object:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _dataclass_from_json(cast(type, hint), value, where)
    if origin in (Union, types.UnionType):
        return _union_from_json(hint, value, where)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
            return value
        raise _wrong(where, value, "one of " + ", ".join(repr(choice) for choice in get_args(hint)))
    if hint in (None, type(None), bool, int, str):
        kind = type(None) if hint is None else hint
        if type(value) is not kind:
            raise _wrong(where, value, "null" if kind is type(None) else kind.__name__)
        return value
    if hint is float:
        if type(value) not in (int, float):
            raise _wrong(where, value, "a number")
        return float(value)
    if isinstance(hint, type) and issubclass(hint, Path):
        if not isinstance(value, str):
            raise _wrong(where, value, "a path")
        return hint(value)
    kind = origin or hint
    if kind in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        inner = (get_args(hint) or (str, Any))[1]
        return {key: _from_json(inner, item, _below(where, key)) for key, item in value.items()}
    if kind in (tuple, list, Sequence):
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        hints = _items(hint, len(value))
        if len(hints) != len(value):
            raise _wrong(where, value, f"a list of {len(hints)}")
        items = [_from_json(hints[i], item, _below(where, str(i))) for i, item in enumerate(value)]
        return items if kind is list else tuple(items)
    raise TypeError(f"config_from_json: {where or 'the config'}: fields of type {hint} are not supported")


def _dataclass_from_json(cls: type, value: Json, where: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(where, value, f"the fields of {cls.__name__}")
    known = {field.name: field for field in fields(cls) if field.init}
    hints = get_type_hints(cls)
    for name in value:
        if name not in known and name != TAG:
            only = ", ".join(known)
            raise ValueError(f"config_from_json: {_below(where, name)}: {cls.__name__} has no such field, only {only}")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"config_from_json: {_below(where, name)}: {cls.__name__} needs this field")
    given = {name: _from_json(hints[name], item, _below(where, name)) for name, item in value.items() if name != TAG}
    return cls(**given)


def _union_from_json(hint: Any, value: Json, where: str) -> object:
    classes = _dataclasses(hint)
    if isinstance(value, dict) and len(classes) > 1:
        named = [cls for cls in classes if cls.__name__ == value.get(TAG)]
        if not named:
            raise _wrong(_below(where, TAG), value.get(TAG), "one of " + ", ".join(cls.__name__ for cls in classes))
        return _from_json(named[0], value, where)
    members = [member for member in get_args(hint) if member is not type(None)]
    if value is None and len(members) < len(get_args(hint)):
        return None
    errors = []
    for member in members:
        try:
            return _from_json(member, value, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else _wrong(where, value, " or ".join(getattr(m, "__name__", str(m)) for m in members))


def _dataclasses(hint: Any) -> list[type]:
    """List the dataclasses among the members of a union."""
    return [member for member in get_args(hint) if is_dataclass(member) and isinstance(member, type)]


def _items(hint: Any, count: int) -> list[Any]:
    """Return the type hints of the `count` items of a sequence."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next((member for member in get_args(hint) if (get_origin(member) or member) in (tuple, list, Sequence)), Any)
    inner = get_args(hint) or (Any, ...)
    if get_origin(hint) is tuple and Ellipsis not in inner:
        return list(inner)
    return [inner[0]] * count


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _wrong(where: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"config_from_json: {where or 'the config'}: {value!r} is not {wanted}")
