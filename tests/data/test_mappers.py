# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mappers by name."""

import pytest
from detectron2.data import DatasetMapper

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import DATASET_MAPPERS, DetrDatasetMapper, build_mapper


def test_the_default_is_detectron2s_own_mapper() -> None:
    assert type(build_mapper(get_cfg(), True).mapper) is DatasetMapper


def test_each_name_builds_its_class_for_training_and_inference() -> None:
    cfg = get_cfg()
    for name, class_ in {"default": DatasetMapper, "detr": DetrDatasetMapper}.items():
        cfg.INPUT.DATASET_MAPPER_NAME = name
        for is_train in (True, False):
            mapper = build_mapper(cfg, is_train).mapper
            assert type(mapper) is class_
            assert mapper.is_train is is_train


def test_a_wrong_name_lists_the_right_ones() -> None:
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME = "dert"
    with pytest.raises(UserError, match=r"INPUT\.DATASET_MAPPER_NAME"):
        build_mapper(cfg, True)


def test_a_mapper_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(DatasetMapper):  # type: ignore[misc]
        pass

    monkeypatch.setitem(DATASET_MAPPERS, "mine", Mine)
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME = "mine"
    assert type(build_mapper(cfg, True).mapper) is Mine
