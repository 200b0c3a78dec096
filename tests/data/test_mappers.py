# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mappers by name, and the records that a mapper may ask for."""

import re
from pathlib import Path
from typing import Any

import pytest
from detectron2.data import DatasetMapper

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import DATASET_MAPPERS, DataError, FixedViews, build_mapper
from qbheat_det.data.mappers import DetrDatasetMapper


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


BAD: list[tuple[str, str, Any]] = [
    ("dert", "INPUT.DATASET_MAPPER_NAME", "dert"),
    ("detr", "INPUT.DETR_CROP_RANGE", [600, 384]),
    ("detr", "INPUT.DETR_CROP_RANGE", [384]),
    ("detr", "INPUT.DETR_CROP_RESIZE", [400, 0]),
    ("pretrain", "INPUT.PRETRAIN.SIZE", 0),
    *(("pretrain", "INPUT.PRETRAIN.SCALE", v) for v in ([0.0, 1.0], [0.5, 0.2], [0.5, 1.5], [0.5])),
    ("pretrain", "INPUT.PRETRAIN.RATIO", [2.0, 0.5]),
    ("pretrain", "INPUT.PRETRAIN.MEMORY_GB", -1.0),
    ("pretrain", "INPUT.RANDOM_FLIP", "diagonal"),
    ("pretrain", "INPUT.FORMAT", "L"),
    *(
        ("classify", "INPUT.CLASSIFY.RAND_AUGMENT", v)
        for v in ([9.0], [9.5, 0.5], [11.0, 0.5], [9.0, -1.0])
    ),
    ("classify", "INPUT.CLASSIFY.RANDOM_ERASING", 1.5),
    *(("classify", "INPUT.CLASSIFY.TEST_CROP", v) for v in (0.0, 1.1)),
    *(
        ("two_views", "INPUT.TWO_VIEWS.JITTER", v)
        for v in ([0.4, 0.4, 0.4], [0.4, 0.4, 0.4, 0.6], [0.4, -0.4, 0.4, 0.1])
    ),
    *(("two_views", "INPUT.TWO_VIEWS.BLUR_SIGMA", v) for v in ([0.0, 2.0], [2.0, 1.0])),
    ("two_views", "INPUT.TWO_VIEWS.BLUR_PROBABILITY", 1.5),
    ("two_views", "INPUT.TWO_VIEWS.GREY_PROBABILITY", -0.1),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD)
def test_values_that_make_no_sense_are_refused_by_key(name: str, key: str, value: Any) -> None:
    cfg = get_cfg()
    cfg.merge_from_list([key, value, "INPUT.DATASET_MAPPER_NAME", name])
    with pytest.raises(UserError, match=re.escape(key)):
        build_mapper(cfg, True)


@pytest.mark.parametrize(("count", "seed", "key"), [(0, 0, "COUNT"), (1, -1, "SEED")])
def test_fixed_views_without_sense_are_refused(count: int, seed: int, key: str) -> None:
    with pytest.raises(UserError, match=rf"INPUT\.FIXED_VIEWS\.{key}"):
        FixedViews(dict, count, seed)


def test_an_image_that_cannot_be_read_stops_a_detector_and_is_an_error_elsewhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    record = {"file_name": str(tmp_path / "a.jpg"), "label": 0}
    cfg = get_cfg()
    cfg.INPUT.FORMAT = "RGB"
    with pytest.raises(UserError, match=r"a\.jpg"):
        build_mapper(cfg, True)(record)
    for cfg.INPUT.DATASET_MAPPER_NAME in ("pretrain", "classify", "two_views"):
        assert isinstance(build_mapper(cfg, True)(record), DataError)
