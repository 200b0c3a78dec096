# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Random files that are nearly COCO: each ends in a sentence, or in images ready for training.

The way is that of tools/train_net.py: check, register, load, check records and image files, map.
"""

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper, check_coco_json, raise_first, register_coco_json
from qbheat_det.data.checks import find_record_errors
from qbheat_det.data.images import find_image_errors

NAME = "qbheat_test_random"
WIDTH, HEIGHT = 24, 16

# Twelve by sixteen pixels, the left half of an image, in three notations.
SEGMENTATIONS: list[Any] = [
    [[0, 0, 12, 0, 12, 16, 0, 16]],
    {"size": [HEIGHT, WIDTH], "counts": [0, 192, 192]},
    {"size": [HEIGHT, WIDTH], "counts": "0P6P6"},
]
NUMBERS = (
    st.integers(-3, 40)
    | st.floats(width=32)
    | st.sampled_from([0, 2**31, 2**53, 2**64, 10**400, -(10**400), 1e308, 1e-308])
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS | st.sampled_from(SEGMENTATIONS),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["id", "bbox", "counts", "size"]), inner, max_size=3)
    ),
    max_leaves=8,
).map(copy.deepcopy)  # what is drawn may be changed afterwards
KEYS = {
    "images": ["id", "file_name", "width", "height"],
    "annotations": [
        *("id", "image_id", "category_id", "bbox", "iscrowd", "ignore", "area"),
        *("segmentation", "keypoints"),
    ],
    "categories": ["id", "name", "supercategory"],
}


def good() -> dict[str, Any]:
    """Returns a file of two images and three objects in which everything is right."""
    annotations = [
        {"id": i, "image_id": 1 + i % 2, "category_id": 5, "bbox": [0, 0, 12, 16], "iscrowd": 0}
        for i in (1, 2, 3)
    ]
    annotations[0]["segmentation"] = SEGMENTATIONS[0]
    annotations[1]["segmentation"] = SEGMENTATIONS[0]
    annotations[2] |= {"segmentation": SEGMENTATIONS[1], "iscrowd": 1}
    names = ("a.png", "b.png")
    return {
        "images": [
            {"id": i, "file_name": name, "width": WIDTH, "height": HEIGHT}
            for i, name in enumerate(names, start=1)
        ],
        "annotations": annotations,
        "categories": [{"id": 5, "name": "cat"}, {"id": 9, "name": "dog"}],
    }


@st.composite
def nearly_coco(draw: st.DrawFn) -> Any:
    """Draws the good file with a few fields replaced, removed, or entries added."""
    content = good()
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(KEYS)))
        change = draw(st.sampled_from(["field", "field", "number", "remove", "entry", "list"]))
        entries = content[key]
        if change == "list" or not isinstance(entries, list) or not entries:
            content[key] = draw(VALUES)
            continue
        entry = entries[draw(st.integers(0, len(entries) - 1))]
        field = draw(st.sampled_from(KEYS[key]))
        if change == "entry" or not isinstance(entry, dict):
            entries.append(draw(VALUES | st.just(copy.deepcopy(entry))))
        elif change == "remove":
            entry.pop(field, None)
        elif change == "number" and isinstance(entry.get(field), list) and entry[field]:
            entry[field] = list(entry[field])
            entry[field][draw(st.integers(0, len(entry[field]) - 1))] = draw(VALUES)
        else:
            entry[field] = draw(VALUES)
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    (path / "images").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (WIDTH, HEIGHT), "grey").save(path / "images" / name)
    return path


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def go_to_training(folder: Path, content: object) -> int:
    """Takes a file all the way; returns how many images came out of the mapper."""
    json_file, images = folder / "set.json", folder / "images"
    json_file.write_text(json.dumps(content))
    check_coco_json(json_file, images)
    cfg = get_cfg()
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (32,), 64
    cfg.INPUT.DETR_CROP_RESIZE, cfg.INPUT.DETR_CROP_RANGE = [20, 30], [10, 20]
    cfg.INPUT.DATASET_MAPPER_NAME = "detr"
    mapper = build_mapper(cfg, True)
    try:
        register_coco_json(NAME, json_file, images)
        records = DatasetCatalog.get(NAME)
        num_classes = len(MetadataCatalog.get(NAME).thing_classes)
        raise_first(find_record_errors(NAME, records, num_classes=num_classes, filter_empty=True))
        raise_first(find_image_errors(records, num_threads=1))
        for record in records:
            assert mapper(record)["instances"].gt_boxes.tensor.isfinite().all()
    finally:
        DatasetCatalog.remove(NAME)
        MetadataCatalog.remove(NAME)
    return len(records)


def test_the_good_file_goes_all_the_way(folder: Path) -> None:
    assert go_to_training(folder, good()) == 2


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(content=nearly_coco())
def test_a_file_that_may_be_coco_ends_in_a_message_or_in_training(
    folder: Path, content: Any
) -> None:
    message = ""
    try:
        go_to_training(folder, content)
    except UserError as error:
        message = str(error)
    assert "\n" not in message
