# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A script as users write it. mypy checks it, with the package and strictly; nothing runs it."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import assert_type

import qbheat_det
from qbheat_det.analysis.run import Run
from qbheat_det.api import Detections, Detector, Encoder, save_annotations
from qbheat_det.export import ExportReport


def predict() -> float:
    """Prints and saves the boxes of an image, and returns the highest score of a folder."""
    detector = qbheat_det.load("retinanet/285M_bccd", device="cpu")
    found = detector.predict("photo.jpg", threshold=0.4, tile=320)
    for box in found:
        x1, _, x2, _ = box.xyxy
        print(box.class_name, box.score, x2 - x1)
    found.save("drawn.jpg")
    found.boxs  # type: ignore[union-attr]  # noqa: B018
    detector.predict("photo.jpg", conf=0.4)  # type: ignore[call-overload]

    assert_type(detector.predict(["a.jpg", Path("b.jpg")]), list[Detections])
    array = np.zeros((8, 8, 3), np.uint8)
    assert_type(detector.predict(array), Detections)
    save_annotations(detector.stream("photos/"), "tasks.json", "cvat")
    best = 0.0
    for result in detector.stream("photos/"):
        assert_type(result, Detections)
        assert_type(result.boxes, Tensor | npt.NDArray[np.float32])
        best = max(best, *result.scores.tolist())
        print(result.labels, result.to_coco())
    return best


def train(detector: Detector) -> None:
    """Trains, evaluates, exports and deploys a detector."""
    run = detector.train("data.yaml", epochs=1, overrides={"SOLVER.BASE_LR": 0.005})
    assert_type(run, Run)
    print(run.metrics[-1], detector.class_names)
    assert_type(detector.evaluate("data.yaml"), dict[str, float])
    report = detector.export("detector.onnx", images=["photos/"], image_size=(480, 640))
    assert_type(report, ExportReport)
    assert_type(detector.deploy(), Detector)


def embed() -> Tensor:
    """Returns vectors of a folder, and prints the maps of an image."""
    encoder = qbheat_det.load("distill/285M")
    if isinstance(encoder, Encoder):
        assert_type(encoder("photo.jpg")["s16_expanded"], Tensor)
    return encoder.embed("photos/")


def choose() -> list[str]:
    """Returns the images to label next."""
    qbheat_det.selekt  # type: ignore[attr-defined]  # noqa: B018
    return qbheat_det.select("photos/", 10, weights="output/run", data="data.yaml").files
