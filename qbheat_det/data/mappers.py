# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dataset mappers by name."""

from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetMapper

from qbheat_det.errors import UserError

from .detr_mapper import DetrDatasetMapper

Mapper = Callable[[dict[str, Any]], dict[str, Any]]

DATASET_MAPPERS: dict[str, Callable[[CfgNode, bool], Mapper]] = {
    "default": DatasetMapper,
    "detr": DetrDatasetMapper,
}
"""What ``INPUT.DATASET_MAPPER_NAME`` can name: ``(cfg, is_train) -> mapper``.

To add one, before the data loader is built: ``DATASET_MAPPERS["mine"] = MyMapper``. A
subclass of Detectron2's ``DatasetMapper`` fits as it is.
"""


def build_mapper(cfg: CfgNode, is_train: bool) -> Mapper:
    """Returns the mapper that ``INPUT.DATASET_MAPPER_NAME`` names.

    Raises:
        UserError: there is no mapper of that name; the sentence lists the right ones.
    """
    name = cfg.INPUT.DATASET_MAPPER_NAME
    if name not in DATASET_MAPPERS:
        raise UserError(
            f"INPUT.DATASET_MAPPER_NAME is '{name}', but the mappers are "
            f"{', '.join(sorted(DATASET_MAPPERS))}"
        )
    return DATASET_MAPPERS[name](cfg, is_train)
