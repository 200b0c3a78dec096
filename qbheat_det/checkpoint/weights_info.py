# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The description inside every file of weights: classes, pixel statistics, config, origin."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from detectron2.config import CfgNode

from qbheat_det.config import dump_config

# The type of each field, or of its items where it is a tuple.
_KINDS: dict[str, type] = {
    "class_names": str,
    "category_ids": int,
    "pixel_format": str,
    "pixel_mean": float,
    "pixel_std": float,
    "config": str,
    "commit": str,
    "iteration": int,
    "pretrain_only_modules": str,
}


@dataclass(frozen=True)
class WeightsInfo:
    """Metadata that travels inside a file of weights.

    ``class_names`` and ``category_ids`` are in contiguous order; ``pixel_mean`` and ``pixel_std``
    in the order of ``pixel_format``; ``config`` is the whole config as YAML. No other model loads
    the children in ``pretrain_only_modules``.
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
        """Takes everything else from a run's resolved config."""
        return cls(
            class_names=tuple(map(str, cfg.MODEL.CLASS_NAMES)),
            category_ids=tuple(map(int, cfg.MODEL.CATEGORY_IDS)),
            pixel_format=str(cfg.INPUT.FORMAT),
            pixel_mean=tuple(map(float, cfg.MODEL.PIXEL_MEAN)),
            pixel_std=tuple(map(float, cfg.MODEL.PIXEL_STD)),
            config=dump_config(cfg),
            commit=commit,
            iteration=iteration,
            pretrain_only_modules=tuple(pretrain_only_modules),
        )

    def value_of(self, key: str) -> object:
        """Returns the value of a key such as "MODEL.DEVICE" in the stored config, or None."""
        try:
            found = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return None
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns strings, numbers and lists of them, for JSON and checkpoints."""
        fields = dataclasses.asdict(self).items()
        return {key: list(value) if isinstance(value, tuple) else value for key, value in fields}

    @classmethod
    def from_dict(cls, content: object) -> "WeightsInfo | None":
        """Reads the output of ``to_dict`` from an untrusted file.

        Returns:
            None if the content or a field has another type. Missing fields are empty; unknown
            fields are ignored.
        """
        if not isinstance(content, dict):
            return None
        known: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name not in content:
                continue
            value, is_tuple = content[field.name], isinstance(field.default, tuple)
            if is_tuple != isinstance(value, list | tuple):
                return None
            items = tuple(value) if is_tuple else (value,)
            if not all(_is_of_type(item, _KINDS[field.name]) for item in items):
                return None
            known[field.name] = items if is_tuple else value
        return cls(**known)


def _is_of_type(value: object, kind: type) -> bool:
    if kind is float:  # NaN compares as false, and integers in JSON have no upper bound
        return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e38
    return type(value) is kind
