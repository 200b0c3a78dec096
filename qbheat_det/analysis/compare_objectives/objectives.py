# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The objectives of a comparison, each a config file, with one encoder and one image size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from qbheat_det.analysis.training_log import flatten
from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_IMAGES

RANDOM = "random"


@dataclass(frozen=True)
class Objective:
    """One row of a comparison; ``cfg`` is of ``config_file``, with the overrides of all."""

    name: str
    config_file: str
    cfg: CfgNode

    @property
    def labelled(self) -> bool:
        """Whether it is trained with labels."""
        return bool(self.cfg.INPUT.DATASET_MAPPER_NAME == "classify")


def list_objectives() -> list[str]:
    """Returns the names of the package's objectives, ``random`` first."""
    folder = Path(get_config_path("objectives/Base-Objective.yaml")).parent
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    return [RANDOM, *(name for name in names if not name.startswith("Base-"))]


def load_objectives(wanted: Sequence[str], opts: Sequence[str] = ()) -> list[Objective]:
    """Returns objectives by name or config file, all of ``list_objectives`` if none is wanted.

    Raises:
        UserError: an objective is unknown or named twice, a config is not valid, or two have
            different encoders or image sizes.
    """
    objectives = [_load_objective(word, opts) for word in wanted or list_objectives()]
    names = [objective.name for objective in objectives]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--objectives names {', '.join(twice)} twice")
    first = _describe_encoder(objectives[0].cfg)
    for objective in objectives:
        other = _describe_encoder(objective.cfg)
        if changed := [key for key, value in first.items() if other.get(key) != value]:
            key = changed[0]
            raise UserError(
                f"'{objectives[0].name}' and '{objective.name}' differ in {key} ({first[key]} and "
                f"{other.get(key)}): set it on the command line, for all"
            )
    return objectives


def _load_objective(word: str, opts: Sequence[str]) -> Objective:
    if word.endswith((".yaml", ".yml")):
        name, path = Path(word).stem, word
        if name == RANDOM:
            raise UserError(f"'{word}': '{RANDOM}' is the initialized encoder; rename the file")
    elif word in (known := list_objectives()):
        name = word
        path = get_config_path(f"objectives/{'Base-Objective' if word == RANDOM else word}.yaml")
    else:
        raise UserError(f"no objective '{word}': {', '.join(known)}, or a config file (.yaml)")
    cfg = load_config(path, opts)
    mapper = cfg.INPUT.DATASET_MAPPER_NAME
    if mapper not in (*MAPPERS_OF_IMAGES, "classify"):
        raise UserError(f"'{path}' does not pre-train: INPUT.DATASET_MAPPER_NAME is '{mapper}'")
    return Objective(name, path, cfg)


def _describe_encoder(cfg: CfgNode) -> dict[str, Any]:
    """Returns the keys that decide what the encoder is and which images it gets."""
    tree = {"INPUT.PRETRAIN.SIZE": cfg.INPUT.PRETRAIN.SIZE}
    tree |= {f"MODEL.{name}": cfg.MODEL[name] for name in ("BACKBONE", "MOBILE_FORMER")}
    return {k: v for k, v in flatten(tree).items() if not k.endswith(("DROP_PATH", "FREEZE_AT"))}
