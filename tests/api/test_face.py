# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Habits of users of other libraries: calls, iteration, evaluation, embeddings, keywords."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import qbheat_det
from qbheat_det.api import Detector
from qbheat_det.core.errors import UserError


def test_a_detector_is_called_and_its_boxes_are_iterated(detector: Detector, photos: Path) -> None:
    found = detector(photos / "0.png", threshold=0.0)
    assert found.to_coco() == detector.predict(photos / "0.png", threshold=0.0).to_coco()
    boxes = list(found)
    assert len(boxes) == len(found) > 0
    assert [box.class_name for box in boxes] == found.labels
    np.testing.assert_array_equal([box.xyxy for box in boxes], found.boxes)
    np.testing.assert_array_equal([box.score for box in boxes], found.scores)


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (lambda detector: detector("a.jpg", conf=0.5), "threshold"),
        (lambda detector: detector.predict(source="a.jpg"), "images"),
        (lambda detector: detector.export("a.onnx", format="onnx"), "suffix"),
        (lambda detector: detector.train("data.yaml", imgsz=640), "INPUT.MIN_SIZE_TRAIN"),
        (lambda detector: detector.evaluate(source="data.yaml"), "data"),
    ],
)
def test_keywords_of_other_libraries_name_the_right_one(
    detector: Detector, call: Callable[[Any], object], right: str
) -> None:
    with pytest.raises(TypeError, match=right):
        call(detector)


def test_an_embedding_is_the_mean_of_each_images_own_map(photos: Path) -> None:
    encoder = qbheat_det.load("qb_heat/285M_caltech101", device="cpu")
    images = [torch.rand(3, 64, 96), torch.rand(3, 96, 64)]
    vectors = encoder.embed(images)
    for vector, image in zip(vectors, images, strict=True):
        maps = [x for x in encoder(image).values() if x.dim() == 4]
        coarsest = min(maps, key=lambda x: x.shape[-1])
        torch.testing.assert_close(vector, coarsest.mean(dim=(2, 3))[0], rtol=0, atol=0)


def test_evaluation_is_that_of_pycocotools_on_the_predictions(
    detector: Detector, photos: Path, tmp_path: Path
) -> None:
    ids, names = detector.cfg.MODEL.CATEGORY_IDS, detector.class_names
    images, truth, found = [], [], []
    for number in range(1, 5):
        one = detector(photos / f"{number - 1}.png", threshold=0.0)
        height, width = one.instances.image_size
        images.append(
            {"id": number, "file_name": f"{number - 1}.png", "width": width, "height": height}
        )
        boxes = one.to_coco(number)
        found += boxes
        for box in boxes[1::4]:  # some of the boxes are right
            w, h = box["bbox"][2:]
            if w > 1 and h > 1:
                entry = {"id": len(truth) + 1, "image_id": number, "iscrowd": 0}
                entry |= {"category_id": box["category_id"], "bbox": box["bbox"], "area": w * h}
                truth.append(entry)
    categories = [{"id": id_, "name": name} for id_, name in zip(ids, names, strict=True)]
    content = {"images": images, "annotations": truth, "categories": categories}
    path = tmp_path / "truth.json"
    path.write_text(json.dumps(content))
    metrics = detector.evaluate(path, images=photos)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator = COCOeval(COCO(str(path)), COCO(str(path)).loadRes(found), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    assert metrics["AP50"] > 0
    assert metrics["AP50"] == pytest.approx(100 * evaluator.stats[1], abs=1e-3)
    with pytest.raises(UserError, match="nowhere"):
        detector.evaluate("nowhere")
