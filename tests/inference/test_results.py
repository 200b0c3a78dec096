# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Detections`` drawn and converted to COCO, Label Studio and CVAT."""

import json

import numpy as np
import PIL.Image
import pytest
import torch
from detectron2.structures import Boxes, Instances
from pycocotools.coco import COCO

from qbheat_det.api import Detections, save_annotations
from qbheat_det.core.errors import UserError

BOXES = [[10.0, 20.0, 40.0, 60.0], [0.0, 0.0, 100.0, 80.0]]


def _make(ids=(17, 18), **changes):
    instances = Instances(
        (80, 100),
        pred_boxes=Boxes(torch.tensor(BOXES)),
        scores=torch.tensor([0.75, 0.5]),
        pred_classes=torch.tensor([1, 0]),
    )
    image = np.zeros((80, 100, 3), np.uint8)
    return Detections(instances, ["cat", "dog"], ids, image, **{"file_name": "a b.jpg", **changes})


def test_boxes_classes_and_scores_survive_every_conversion(tmp_path):
    found = _make()
    assert repr(found) == "Detections(a b.jpg, 100x80: 1 dog, 1 cat)"
    assert [box.xyxy for box in found] == [tuple(box) for box in BOXES]
    assert [(box.class_name, box.class_id, box.score) for box in found] == [
        ("dog", 1, 0.75), ("cat", 0, 0.5)
    ]  # fmt: skip
    assert found.to_coco(7) == [
        {"image_id": 7, "category_id": 18, "bbox": [10.0, 20.0, 30.0, 40.0], "score": 0.75},
        {"image_id": 7, "category_id": 17, "bbox": [0.0, 0.0, 100.0, 80.0], "score": 0.5},
    ]
    assert _make(ids=()).label_ids == [2, 1]
    assert found.select(0.6).labels == ["dog"]
    assert found.select(0.5, ["cat"]).labels == ["cat"]
    found.save(tmp_path / "new" / "drawn.png")
    with PIL.Image.open(tmp_path / "new" / "drawn.png") as drawn:
        assert drawn.width / drawn.height == pytest.approx(100 / 80, rel=0.02)
    with pytest.raises(UserError, match=r"x\.unknown"):
        found.save(tmp_path / "x.unknown")


def test_label_studio_gets_per_cent_and_images_without_boxes(tmp_path):
    save_annotations([_make(), _make().select(1)], tmp_path / "tasks.json", "label-studio")
    first, second = json.loads((tmp_path / "tasks.json").read_text("utf-8"))
    assert first["data"] == {"image": "/data/local-files/?d=a%20b.jpg"}
    (prediction,) = first["predictions"]
    shape = prediction["result"][0]
    assert (shape["from_name"], shape["to_name"]) == ("label", "image")
    assert (shape["original_width"], shape["original_height"]) == (100, 80)
    assert shape["value"] == {
        "x": 10.0, "y": 25.0, "width": 30.0, "height": 50.0, "rotation": 0,
        "rectanglelabels": ["dog"],
    }  # fmt: skip
    assert second["predictions"][0]["result"] == []


def test_results_name_the_classes_and_cvat_gets_a_file_that_pycocotools_reads(tmp_path):
    save_annotations([_make()], tmp_path / "boxes.json", "coco")
    results = json.loads((tmp_path / "boxes.json").read_text())
    assert [box["category_name"] for box in results] == ["dog", "cat"]
    save_annotations([_make(), _make(file_name="c.jpg")], tmp_path / "cvat.json", "cvat")
    dataset = COCO(str(tmp_path / "cvat.json"))
    assert [image["file_name"] for image in dataset.loadImgs([1, 2])] == ["a b.jpg", "c.jpg"]
    assert {c["id"]: c["name"] for c in dataset.loadCats([17, 18])} == {17: "cat", 18: "dog"}
    (dog,) = dataset.loadAnns(dataset.getAnnIds(imgIds=[2], catIds=[18]))
    assert (dog["bbox"], dog["area"], dog["iscrowd"]) == ([10.0, 20.0, 30.0, 40.0], 1200.0, 0)


@pytest.mark.parametrize("format", ["cvat", "label-studio", "yolo"])
def test_frames_and_unknown_formats_are_refused(tmp_path, format):
    with pytest.raises(UserError, match=format):
        save_annotations([_make(frame=3)], tmp_path / "x.json", format)
    assert not (tmp_path / "x.json").exists()
