# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Limits of detections per image, for data with more objects than COCO's."""

import json
import logging

import pytest
from detectron2.data import DatasetCatalog
from detectron2.modeling import build_model
from detectron2.utils import logger as detectron2_logger

from qbheat_det.config import get_cfg
from qbheat_det.engine.detection_limits import fit_detection_limits
from qbheat_det.engine.registered_sets import count_objects
from qbheat_det.engine.run_data import RunData
from qbheat_det.tasks import DETECTION

from .tiny_training import build_config, parse

CHANGED = {
    "TEST.DETECTIONS_PER_IMAGE": 1800,
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": 9000,
    "MODEL.FCOS.TOPK_CANDIDATES_TEST": 9000,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 9000,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 3600,
}
QUERIES = "MODEL.MF_DETR.NUM_OBJECT_QUERIES"


@pytest.fixture
def register():
    """Registers a set from the numbers of objects in its images, and crowds in each image."""
    names = []

    def register(*counts, crowds=0):
        names.append(f"crowded_{len(names)}")
        flags = [[0] * count + [1] * crowds for count in counts]
        records = [{"annotations": [{"iscrowd": flag} for flag in image]} for image in flags]
        DatasetCatalog.register(names[-1], lambda: records)
        return names[-1]

    yield register
    for name in names:
        DatasetCatalog.remove(name)


def fit(train=(), test=(), given=(), eval_only=False, **keys):
    """Returns the keys that change, with their new values."""
    cfg = get_cfg()
    opts = [word for pair in {**keys, **dict(given)}.items() for word in pair]
    cfg.merge_from_list(opts)
    detectron2_logger._LOG_COUNTER.clear()  # the same message is logged again
    data = RunData(DETECTION, tuple(train), tuple(test))
    return fit_detection_limits(
        cfg,
        dict(given),
        max_objects_train=0 if eval_only else count_objects(data, data.train),
        max_objects_test=count_objects(data, data.test),
    )


def test_limits_follow_the_image_with_most_objects(register, caplog):
    few, many, most = register(0, 100, crowds=50), register(3, 1728), register(2001)
    assert fit([few], [few]) == {}
    assert not caplog.messages
    assert fit([few], [many]) == fit([many], [few]) == fit([few], [many], eval_only=True) == CHANGED
    assert fit([many], [few], eval_only=True) == {}  # the training data are not used
    (message,) = set(caplog.messages)
    assert "1,728" in message
    assert "TEST.DETECTIONS_PER_IMAGE is 1,800 instead of 100" in message
    caplog.clear()
    assert fit([most])["TEST.DETECTIONS_PER_IMAGE"] == 2000
    assert "2,001" in caplog.text
    assert "2,000" in caplog.text
    # A higher limit stays.
    assert "TEST.DETECTIONS_PER_IMAGE" not in fit([many], **{"TEST.DETECTIONS_PER_IMAGE": 3000})


def test_a_limit_that_the_user_sets_stays_and_is_named(register, caplog):
    many = register(1728)
    assert fit([many], given={"TEST.DETECTIONS_PER_IMAGE": "300"}.items()) == {}
    assert "TEST.DETECTIONS_PER_IMAGE is 300" in caplog.text
    assert "1,728" in caplog.text
    own = {"MODEL.RETINANET.TOPK_CANDIDATES_TEST": "1500"}
    rest = {key: value for key, value in CHANGED.items() if key not in own}
    assert fit([many], given=own.items()) == rest


def test_queries_follow_the_training_data_if_weights_do_not_depend_on_their_number(
    register, caplog
):
    few, many = register(20), register(250)
    selects = {"MODEL.META_ARCHITECTURE": "MFDETR", "MODEL.MF_DETR.QUERY_SELECTION.ENABLED": True}
    assert fit([many], [few], **selects)[QUERIES] == 300
    for sets in ({"train": [few], "test": [many]}, {"test": [many], "eval_only": True}):
        caplog.clear()
        assert QUERIES not in fit(**sets, **selects)
    learned = {"MODEL.META_ARCHITECTURE": "MFDETR"}
    assert QUERIES not in fit([many], **learned)
    assert f"{QUERIES} is 100" in caplog.text
    caplog.clear()
    assert QUERIES not in fit([many], given={QUERIES: "50"}.items(), **selects)
    assert f"{QUERIES} is 50" in caplog.text


def test_a_run_on_crowded_images_keeps_as_many_detections(tiny_data, tmp_path, caplog):
    content = json.loads((tiny_data / "annotations.json").read_text())
    first = content["annotations"][0]
    content["annotations"] += [{**first, "id": 1000 + index} for index in range(149)]
    (tmp_path / "images").symlink_to(tiny_data / "images")
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        cfg = build_config(parse(tmp_path / "run", tmp_path, {"MODEL.DEVICE": "cpu"}))
    in_image = sum(one["image_id"] == first["image_id"] for one in content["annotations"])
    assert 150 <= in_image < 200
    assert f"{in_image} objects" in caplog.text
    assert build_model(cfg).max_detections_per_image == 200
