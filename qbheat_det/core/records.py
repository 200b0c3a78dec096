# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dataclasses from JSON that anyone may have written: every field is checked by its type."""

import dataclasses
import typing
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from .errors import UserError


def parse_record(kind: Any, value: Any, where: str) -> Any:
    """Returns JSON data as a type: a dataclass, a tuple, ``X | None``, or a plain value.

    Fields and items are parsed by their types. Integers are not negative, floats finite. A
    ``UserError`` names the field of the value, called ``where``, that is unknown, missing or of
    another type.
    """
    arguments, origin = get_args(kind), get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return typing.cast(Any, kind)(**_parse_fields(kind, value, where))
    if origin is tuple and isinstance(value, list | tuple):
        if ... in arguments or len(value) == len(arguments):
            items = enumerate(value)
            return tuple(parse_record(arguments[0], v, f"{where}[{i}]") for i, v in items)
    elif origin is UnionType:
        return None if value is None else parse_record(arguments[0], value, where)
    elif value in arguments if origin is Literal else _is_plain(kind, value):
        return value
    raise UserError(f"{where} is {value!r:.60}, expected {getattr(kind, '__name__', kind)}")


def _parse_fields(kind: Any, value: dict[str, Any], where: str) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    unknown = value.keys() - {field.name for field in fields}
    for what, names in (("unknown", unknown), ("missing", required - value.keys())):
        if names:
            raise UserError(f"{where}: the field '{min(names)}' is {what}")
    types = typing.get_type_hints(kind)
    return {key: parse_record(types[key], v, f"{where}: '{key}'") for key, v in value.items()}


def _is_plain(kind: Any, value: Any) -> bool:
    if kind is float:  # NaN compares as false, and integers in JSON have no upper bound
        return type(value) in (int, float) and abs(value) < 1e300
    return type(value) is kind and (kind is not int or value >= 0)
