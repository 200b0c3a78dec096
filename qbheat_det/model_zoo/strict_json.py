# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Frozen dataclasses from JSON that anyone may have written: what does not fit is named."""

import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

from qbheat_det.core.errors import UserError

T = TypeVar("T")
_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def parse_json(text: str, where: str) -> Any:
    """Returns the content of a JSON text.

    Raises:
        UserError: it is no JSON, names a field twice, or holds NaN or an infinity.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no sound JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field '{twice}' stands twice in one object")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """Builds a dataclass from what JSON gives; nothing is converted, guessed or passed over.

    Args:
        kind: the dataclass; its fields are texts, numbers, tuples, dataclasses, or None besides.
        value: a dict with exactly its fields; those with a default may be missing.
        where: what the sentence of an error calls the place, such as a file and an entry.

    Raises:
        UserError: a field is unknown, missing or of another kind.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where} is no object of named fields")
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(typing.cast(Any, kind))
    unknown = sorted(set(value) - {field.name for field in fields})
    if unknown:
        raise UserError(f"{where}: the field '{unknown[0]}' is not known")
    for field in fields:
        if field.name not in value and field.default is dataclasses.MISSING:
            raise UserError(f"{where}: the field '{field.name}' is missing")
    found = {name: _fit(hints[name], part, f"{where}: '{name}'") for name, part in value.items()}
    return kind(**found)


def to_plain(value: Any) -> Any:
    """Returns a dataclass as the dicts and lists that ``from_plain`` takes."""
    return json.loads(json.dumps(dataclasses.asdict(value), allow_nan=False))


def _fit(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_plain(typing.cast(type, kind), value, where)
    if isinstance(kind, types.UnionType):  # "X | None"
        (inner,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        return None if value is None else _fit(inner, value, where)
    if typing.get_origin(kind) is tuple:
        return _fit_tuple(typing.get_args(kind), value, where)
    if kind is float and type(value) is int:
        value = _to_float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise UserError(f"{where} is {value!r:.60}, where {_WORDS[kind]} is expected")
    return value


def _to_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON's whole numbers have no end
        return math.inf


def _fit_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise UserError(f"{where} is {value!r:.60}, where a list is expected")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        raise UserError(f"{where} has {len(value)} values, where {len(kinds)} are expected")
    parts = zip(kinds, value, strict=True)
    return tuple(_fit(kind, part, f"{where}[{i}]") for i, (kind, part) in enumerate(parts))
