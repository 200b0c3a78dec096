# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The check that constructors of models and their parts make of config values."""


def check_value(is_allowed: bool, key: str, value: object, allowed: str) -> None:
    """Raises a ``ValueError`` about ``MODEL.{key}`` and its value, unless ``is_allowed``."""
    if not is_allowed:
        raise ValueError(f"MODEL.{key} is {value}, but must be {allowed}")
