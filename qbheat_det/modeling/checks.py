# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The check of config values in the constructors of models and their parts."""


def check_value(is_allowed: bool, key: str, value: object, allowed: str) -> None:
    """Raises a ``ValueError`` unless ``is_allowed``.

    The message names the config key ``MODEL.{key}``, its ``value``, and the ``allowed`` values.
    """
    if not is_allowed:
        raise ValueError(f"MODEL.{key} is {value}, but must be {allowed}")
