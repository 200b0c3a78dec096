# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mappers by name, and the records that a mapper may ask for."""

from typing import Any

import pytest
from detectron2.data import DatasetMapper

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import DATASET_MAPPERS, DetrDatasetMapper, build_mapper


class Mine:
    """A mapper of one's own that asks for all records."""

    def __init__(self, cfg: Any, is_train: bool) -> None:
        self.is_train = is_train
        self.prepared: list[dict[str, Any]] = []

    def prepare(self, dataset_dicts: Any) -> None:
        self.prepared = list(dataset_dicts)

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        return dataset_dict


@pytest.mark.parametrize("is_train", [True, False])
def test_each_name_builds_its_class(is_train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASET_MAPPERS, "mine", Mine)
    cfg = get_cfg()
    assert cfg.INPUT.DATASET_MAPPER_NAME == "default"
    for name, class_ in {"default": DatasetMapper, "detr": DetrDatasetMapper, "mine": Mine}.items():
        cfg.INPUT.DATASET_MAPPER_NAME = name
        mapper = build_mapper(cfg, is_train)
        mapper.prepare([{"image_id": 1}])
        assert type(mapper.mapper) is class_
        assert mapper.mapper.is_train is is_train
    assert mapper.mapper.prepared == [{"image_id": 1}]


def test_a_wrong_name_is_refused() -> None:
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME = "dert"
    with pytest.raises(UserError, match=r"INPUT\.DATASET_MAPPER_NAME"):
        build_mapper(cfg, True)
