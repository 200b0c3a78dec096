# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a file of weights says of itself: classes, pixels, config, and where it comes from."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from detectron2.config import CfgNode

from qbheat_det.config import dump_config

T = TypeVar("T")


@dataclass(frozen=True)
class WeightsInfo:
    """Travels inside every file of weights that the package writes.

    ``class_names`` and ``category_ids`` (the annotation file's) stand in contiguous order;
    ``pixel_mean`` and ``pixel_std`` are those of ``pixel_format``'s channels; ``config`` is the
    whole config as YAML; ``iteration`` is the last one that went into the weights. ``pretrain_only_modules``
    are the beginnings of names that belong to the training itself: no other model takes them over.
    """

    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    pixel_format: str = ""
    pixel_mean: tuple[float, ...] = ()
    pixel_std: tuple[float, ...] = ()
    config: str = ""
    commit: str = ""
    iteration: int = 0
    pretrain_only_modules: tuple[str, ...] = ()

    @classmethod
    def from_config(
        cls, cfg: CfgNode, *, iteration: int, commit: str, pretrain_only_modules: Sequence[str] = ()
    ) -> "WeightsInfo":
        """Takes everything from a run's config.

        Args:
            cfg: resolved config, with ``MODEL.CLASS_NAMES`` and ``MODEL.CATEGORY_IDS`` set.
            iteration: the last iteration that went into the weights.
            commit: of the code that trained them; empty where it is not known.
            pretrain_only_modules: children of the model that no other model takes over.
        """
        return cls(
            class_names=tuple(str(name) for name in cfg.MODEL.CLASS_NAMES),
            category_ids=tuple(int(number) for number in cfg.MODEL.CATEGORY_IDS),
            pixel_format=str(cfg.INPUT.FORMAT),
            pixel_mean=tuple(float(value) for value in cfg.MODEL.PIXEL_MEAN),
            pixel_std=tuple(float(value) for value in cfg.MODEL.PIXEL_STD),
            config=dump_config(cfg),
            commit=commit,
            iteration=iteration,
            pretrain_only_modules=tuple(pretrain_only_modules),
        )

    def value_of(self, key: str) -> object:
        """Returns what the config inside has under a key such as "MODEL.DEVICE", or None."""
        try:
            found = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return None
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns strings, numbers and lists of them: what JSON and a checkpoint can hold."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, content: object) -> "WeightsInfo | None":
        """Reads what ``to_dict`` gave, from a file that anyone may have written.

        Returns:
            None where the content is of another kind or a field is of another type; fields that
            are missing are empty, and unknown ones are passed over.
        """
        if not isinstance(content, dict):
            return None
        known = {key: content[key] for key in _READERS if key in content}
        try:
            return cls(**{key: _READERS[key](value) for key, value in known.items()})
        except (TypeError, ValueError, OverflowError):
            return None


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _tuple_of(read: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    def read_all(value: object) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(read(item) for item in value)

    return read_all


_READERS: dict[str, Callable[[object], Any]] = {
    "class_names": _tuple_of(_string),
    "category_ids": _tuple_of(_integer),
    "pixel_format": _string,
    "pixel_mean": _tuple_of(_number),
    "pixel_std": _tuple_of(_number),
    "config": _string,
    "commit": _string,
    "iteration": _integer,
    "pretrain_only_modules": _tuple_of(_string),
}
