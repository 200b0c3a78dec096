# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The ways to pre-train that a comparison is between, each a config file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode

from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_IMAGES

RANDOM = "random"
BASE = "Base-Objective"
# What a table lists, from what costs nothing to what the package is about; others follow by name.
_ORDER = (
    RANDOM,
    "supervised",
    "moco_v2",
    "wasserstein_dual",
    "wasserstein_contrastive",
    "mask_token",
    "interpolation",
    "qb_heat",
)


@dataclass(frozen=True)
class Objective:
    """One row of a comparison.

    Attributes:
        name: of the row and of its folder.
        config_file: what is trained; of ``random``, whose backbone is initialised.
        cfg: that file with the overrides of all objectives.
    """

    name: str
    config_file: str
    cfg: CfgNode

    @property
    def trained(self) -> bool:
        """Whether anything is learned."""
        return self.name != RANDOM

    @property
    def labelled(self) -> bool:
        """Whether it learns from labels."""
        return self.trained and self.cfg.INPUT.DATASET_MAPPER_NAME == "classify"


def list_objectives() -> list[str]:
    """Returns the names of all objectives that come with the package, ``random`` first."""
    folder = Path(get_config_path(f"objectives/{BASE}.yaml")).parent
    found = {path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("Base-")}
    found.add(RANDOM)
    first = [name for name in _ORDER if name in found]
    return [*first, *sorted(found - set(first))]


def load_objectives(wanted: Sequence[str], opts: Sequence[str] = ()) -> list[Objective]:
    """Returns objectives by name or by the path of a config file.

    Args:
        wanted: in this order; all of ``list_objectives`` where empty.
        opts: overrides of every config, ``KEY VALUE``.

    Raises:
        UserError: there is no such objective, two have one name, a config is not sound, or two
            have different encoders or sizes of images.
    """
    objectives = [_load(word, opts) for word in wanted or list_objectives()]
    names = [objective.name for objective in objectives]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--objectives names {', '.join(twice)} twice")
    for objective in objectives:
        _check_alike(objectives[0], objective)
    return objectives


def _load(word: str, opts: Sequence[str]) -> Objective:
    if word.endswith((".yaml", ".yml")):
        name, path = Path(word).stem, word
        if name == RANDOM:
            raise UserError(f"'{word}': '{RANDOM}' is the encoder as initialised; rename the file")
    elif word not in (known := list_objectives()):
        raise UserError(
            f"there is no objective '{word}', but {', '.join(known)}; a config of your own is "
            "named by its path (.yaml)"
        )
    else:
        name = word
        path = get_config_path(f"objectives/{BASE if word == RANDOM else word}.yaml")
    cfg = load_config(path, opts)
    mapper = cfg.INPUT.DATASET_MAPPER_NAME
    if mapper not in (*MAPPERS_OF_IMAGES, "classify"):
        raise UserError(
            f"'{path}' is no objective: INPUT.DATASET_MAPPER_NAME '{mapper}' does not take images "
            "as pre-training does"
        )
    return Objective(name, path, cfg)


def _check_alike(first: Objective, other: Objective) -> None:
    """Refuses what would compare encoders or images instead of objectives."""
    if other.cfg.INPUT.PRETRAIN.SIZE != first.cfg.INPUT.PRETRAIN.SIZE:
        raise UserError(
            f"'{first.name}' and '{other.name}' see images of different sizes "
            f"({first.cfg.INPUT.PRETRAIN.SIZE} and {other.cfg.INPUT.PRETRAIN.SIZE} pixels): say "
            "INPUT.PRETRAIN.SIZE on the command line, for all"
        )
    for key in ("BACKBONE", "MOBILE_FORMER"):
        mine, others = dict(first.cfg.MODEL[key]), dict(other.cfg.MODEL[key])
        # What the encoder is, not how it is trained.
        shaping = sorted(mine.keys() - {"DROP_PATH", "FREEZE_AT"})
        if differing := [name for name in shaping if mine[name] != others.get(name)]:
            raise UserError(
                f"'{first.name}' and '{other.name}' have different encoders (MODEL.{key}."
                f"{differing[0]} {mine[differing[0]]} and {others.get(differing[0])}): say it on "
                "the command line, for all"
            )
