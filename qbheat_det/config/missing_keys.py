# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Explains the error of a config that lacks the keys of this package.

Detectron2's own ``get_cfg`` returns such a config. Reading a missing key raises an
``AttributeError`` or a ``KeyError`` that has only the key's name.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from detectron2.config import CfgNode
from detectron2.config import configurable as detectron2_configurable

from qbheat_det.core.errors import UserError

from .defaults import get_cfg

P = ParamSpec("P")
R = TypeVar("R")


def configurable(init: Callable[..., None]) -> Callable[..., None]:
    """Detectron2's ``configurable`` for constructors whose ``from_config`` reads our keys."""
    return reads_our_keys(detectron2_configurable(init))


def reads_our_keys(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that takes a config and reads keys of this package.

    If a key is missing, the function raises a ``UserError`` that names it and
    ``add_qbheat_config``. Other errors do not change.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (AttributeError, KeyError) as error:
            name = error.args[0] if error.args else None
            for value in (*args, *kwargs.values()):
                if not isinstance(value, CfgNode):
                    continue
                key = _find_missing_key(value, name)
                if key:
                    raise UserError(
                        f"the config has no {key}, a key of qbheat_det: call "
                        "qbheat_det.add_qbheat_config(cfg) after get_cfg() and before files are "
                        "merged, or use qbheat_det.get_cfg()"
                    ) from error
            raise

    return wrapped


def _find_missing_key(cfg: CfgNode, name: object, defaults: CfgNode | None = None) -> str:
    """Returns the dotted key ``name`` that ``cfg`` lacks and our defaults have; "" if none."""
    if defaults is None:
        defaults = get_cfg()
    for key, value in defaults.items():
        if key not in cfg:
            if key == name:
                return key
        elif isinstance(value, CfgNode):
            below = _find_missing_key(cfg[key], name, value)
            if below:
                return f"{key}.{below}"
    return ""
