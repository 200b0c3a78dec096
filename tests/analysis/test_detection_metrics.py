# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Metrics and types of errors by hand; figures of detections."""

import json
import shlex
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from qbheat_det.analysis import detections
from qbheat_det.analysis.detection_metrics import (
    choose_threshold,
    count_confusions,
    count_errors,
    count_errors_by_image,
    evaluate_boxes,
    find_errors,
    find_missed_boxes,
    find_wrong,
)
from qbheat_det.analysis.detections import draw_detections
from qbheat_det.analysis.figures import NotApplicable, write_figure
from qbheat_det.analysis.run import FigureOptions, Run, open_runs
from qbheat_det.core.errors import UserError
from qbheat_det.data import Source, register_source
from tests.engine.tiny_detectors import make_probe_config

from .tiny_runs import classifier_config, write_run

A, B, C = [0, 0, 20, 20], [50, 50, 90, 90], [0, 60, 20, 80]
FAR = [60, 60, 70, 70]


def make_truth(boxes, crowds=()):
    """An annotation file with boxes of image id, category id and XYXY; ids count from 0."""
    return {
        "images": [{"id": i, "width": 100, "height": 100, "file_name": ""} for i in range(1, 5)],
        "categories": [{"id": k, "name": f"class{k}"} for k in (3, 7)],
        "annotations": [
            {
                "id": i,
                "image_id": image,
                "category_id": k,
                "bbox": to_xywh(xyxy),
                "iscrowd": int(i in crowds),
            }
            for i, (image, k, xyxy) in enumerate(boxes)
        ],
    }


def make_detections(boxes):
    """Results in COCO's format from image id, category id, XYXY and score each."""
    return [
        {"image_id": i, "category_id": k, "bbox": to_xywh(xyxy), "score": score}
        for i, k, xyxy, score in boxes
    ]


def to_xywh(xyxy):
    x0, y0, x1, y1 = xyxy
    return [x0, y0, x1 - x0, y1 - y0]


def judge(truth, detections):
    return find_errors(evaluate_boxes(truth, detections))


def list_kinds(judged):
    pairs = zip(judged.correct, judged.wrong, strict=True)
    return ["correct" if right else "wrong" if wrong else "ignored" for right, wrong in pairs]


def test_types_and_thresholds_by_hand():
    truth = make_truth([(1, 3, A), (1, 7, B), (1, 3, C)])
    detections = make_detections(
        [
            (1, 3, A, 0.9),  # correct
            (1, 3, [0, 0, 20, 18], 0.8),  # IoU 0.9 with A, which is taken
            (1, 3, B, 0.7),  # of class 7
            (1, 3, [0, 60, 20, 68], 0.6),  # 8 of C's 20 rows: IoU 0.4
            (1, 7, [80, 0, 95, 15], 0.4),
        ]
    )
    judged = judge(truth, detections)
    assert list_kinds(judged) == ["correct", "wrong", "wrong", "wrong", "wrong"]
    assert judged.matches.tolist() == [0, -1, -1]
    assert count_errors(judged, 0.0) == {"correct": 1, "wrong": 4, "missed": 2}
    assert find_wrong(judged, 0.65).tolist() == [1, 2]
    assert find_missed_boxes(judged, 0.0).tolist() == [1, 2]  # the larger first
    assert find_missed_boxes(judged, 0.95).tolist() == [1, 0, 2]

    truth = make_truth([(1, 3, A), (1, 7, B)])
    judged = judge(truth, make_detections([(1, 7, A, 0.03), (1, 3, FAR, 0.02)]))
    assert choose_threshold(judged) == 0.03
    assert choose_threshold(judge(truth, [])) == 0.5
    # Detections on a crowd of their class are ignored, and do not change the threshold.
    truth = make_truth([(1, 3, A), (1, 3, C)], crowds=[1])
    judged = judge(truth, make_detections([(1, 3, A, 0.3), (1, 3, C, 0.9), (1, 3, FAR, 0.2)]))
    assert list_kinds(judged) == ["correct", "ignored", "wrong"]
    assert choose_threshold(judged) == 0.3
    # Beyond a hundred detections of an image and class none counts.
    many = [(1, 3, A, 1 - i / 1000) for i in range(103)]
    kinds = list_kinds(judge(make_truth([(1, 3, A)]), make_detections(many)))
    assert kinds == ["correct"] + ["wrong"] * 99 + ["ignored"] * 3


SQUARE, DISC = 4, 9  # category ids
REDS = (204, 102, 51)  # scores 0.8, 0.4, 0.2
LEFT, RIGHT = [0, 0, 32, 32], [32, 0, 32, 32]  # XYWH
# One of two discs is found, with the highest score: precision is 1 at the 51 recalls up to 1/2.
AP_DISC = 100 * 51 / 101


def write_dataset(folder):
    """Writes three images: a disc on the left, a square on the left, a disc on the right."""
    (folder / "images").mkdir(parents=True)
    for index, red in enumerate(REDS, start=1):
        pixels = np.zeros((32, 64, 3), np.uint8)
        pixels[..., 0] = red
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
    boxes = [(1, DISC, LEFT), (2, SQUARE, LEFT), (3, DISC, RIGHT)]
    content = {
        "images": [
            {"id": i, "file_name": f"{i}.png", "width": 64, "height": 32} for i in (1, 2, 3)
        ],
        "annotations": [
            {"id": i, "image_id": i, "category_id": k, "bbox": box, "area": 1024, "iscrowd": 0}
            for i, k, box in boxes
        ],
        "categories": [{"id": SQUARE, "name": "square"}, {"id": DISC, "name": "disc"}],
    }
    (folder / "boxes.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_detector(folder, data, file="boxes.json"):
    cfg = make_probe_config()
    name = f"detections {data.name} {file}"
    cfg.DATASETS.TEST = (name,)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.MODEL.DEVICE = "cpu"
    register_source(name, Source("coco", str(data / file), image_root=str(data / "images")))
    return write_run(folder, cfg)


def draw(*runs, images=1, **keywords):
    opened = open_runs([str(run) for run in runs], device="cpu")
    return draw_detections(opened, FigureOptions(num_images=images), **keywords)


@pytest.fixture(autouse=True)
def _datasets(monkeypatch):
    monkeypatch.setattr(Run, "find_set", lambda self, split: self.cfg.DATASETS.TEST[0])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("boxes"))


def test_metrics_of_inference_are_those_computed_by_hand(data, tmp_path):
    figure = draw(write_detector(tmp_path / "run", data), images=3, threshold=0.1)
    run = figure.data["runs"]["run"]
    assert run["AP50"] == pytest.approx(AP_DISC / 2)
    assert run["class_ap"] == pytest.approx({"square": 0, "disc": AP_DISC})
    assert figure.data["boxes"] == {"square": 1, "disc": 2}
    assert run["errors"] == {"correct": 1, "wrong": 2, "missed": 2}
    assert ["AP (%)", f"{AP_DISC / 2:.2f}"] in [list(row) for row in figure.table.rows]
    assert list(figure.images) == [
        "best_1",
        "ap",
        "confusion",
        "predictions_1",
        "predictions_2",
        "predictions_3",
        "errors",
    ]
    # Only the disc of image 1 or 3 is found.
    assert figure.images["best_1"].caption.endswith("1 of 1 found, 0 wrong")
    assert figure.headline == (
        "Finds 1 of 3 objects in 3 images, with 2 wrong boxes, at threshold 0.1"
    )
    assert shlex.split(figure.command)[:4] == [
        "qbheat",
        "predict",
        "--weights",
        str(tmp_path / "run"),
    ]
    assert figure.command.endswith("--threshold 0.1")
    assert "square, disc" in figure.caution  # as each image has objects
    assert not [cell for row in figure.table.rows for cell in row if "nan" in cell]
    assert all(path.stat().st_size for path in write_figure(figure, tmp_path / "figures"))


def test_a_broken_image_is_left_out_with_its_boxes(tmp_path):
    data = write_dataset(tmp_path / "data")
    run = write_detector(tmp_path / "run", data)
    (data / "images" / "3.png").write_bytes(b"no picture")
    figure = draw(run, images=3, threshold=0.1)
    assert figure.data["images"] == 2
    content = json.loads((data / "boxes.json").read_text())
    content["annotations"] = content["annotations"][:1]
    (data / "some.json").write_text(json.dumps(content))
    some = draw(write_detector(tmp_path / "other", data, "some.json"), threshold=0.1)
    assert some.caution == ""  # one image has no objects
    assert figure.data["boxes"] == {"square": 1, "disc": 1}
    # The only disc that is left is found.
    assert figure.data["runs"]["run"]["class_ap"] == pytest.approx({"square": 0, "disc": 100})
    assert sum(name.startswith("predictions") for name in figure.images) == 2


def test_several_runs_are_shown_where_their_errors_differ_most(data, tmp_path, monkeypatch):
    counts = iter([Counter({1: 5, 2: 5}), Counter({1: 5, 2: 1, 3: 2})])  # by image id
    monkeypatch.setattr(detections.metrics, "count_errors_by_image", lambda *_: next(counts))
    paths = [write_detector(tmp_path / "one", data), write_detector(tmp_path / "two", data)]
    shown = [f"{i}.png" for i in (2, 3)]
    figure = draw(*paths, images=2, threshold=0.1)
    assert [figure.images[f"predictions_{i}"].caption for i in (1, 2)] == shown
    assert (figure.headline, figure.command) == ("", "")


def test_confusions_and_errors_by_image_are_those_counted_by_hand():
    def box(image, category, x, **rest):
        return {"image_id": image, "category_id": category, "bbox": [x, 0, 10, 10], **rest}

    truth = [box(1, 1, 0), box(1, 2, 50), box(2, 2, 0), box(2, 1, 80)]
    results = [
        box(1, 2, 1, score=0.9),  # on the first box, of the wrong class
        box(1, 2, 2, score=0.8),  # again: no box is left
        box(1, 2, 50, score=0.7),  # correct
        box(2, 1, 40, score=0.6),  # on the background
        box(2, 2, 0, score=0.1),  # correct, but below the threshold
    ]
    content = {
        "images": [{"id": 1}, {"id": 2}],
        "categories": [{"id": 1}, {"id": 2}],
        "annotations": truth,
    }
    errors = find_errors(evaluate_boxes(content, results))
    assert count_confusions(errors, 0.5, 2).tolist() == [[0, 1, 1], [0, 1, 1], [1, 1, 0]]
    assert count_errors_by_image(errors, 0.5) == {1: 3, 2: 3}


def test_runs_that_cannot_be_evaluated_are_left_out(data, tmp_path, monkeypatch):
    monkeypatch.setattr(detections, "chart_image", lambda *args, **kw: None)  # takes seconds
    other = write_dataset(tmp_path / "other")
    runs = [write_detector(tmp_path / "one", data), write_detector(tmp_path / "two", other)]
    runs.append(write_run(tmp_path / "classes", classifier_config()))
    # Data sets in other formats are converted once per run.
    (data / "copy.json").write_bytes((data / "boxes.json").read_bytes())
    figure = draw(*runs, write_detector(tmp_path / "copy", data, "copy.json"))
    assert list(figure.data["runs"]) == ["one", "copy"]
    for name, reason in zip(("two", "classes"), figure.data["left_out"], strict=True):
        assert name in reason
    flags = {"data": str(data / "boxes.json")}
    assert list(draw(*runs[:2], **flags).data["runs"]) == ["one", "two"]
    (data / "copy.json").unlink()
    (data / "boxes.json").rename(tmp_path / "boxes.json")
    with pytest.raises(UserError, match="without annotations"):
        draw(*runs, data=str(data))
    (tmp_path / "boxes.json").rename(data / "boxes.json")
    with pytest.raises(NotApplicable, match="classes"):
        draw(runs[2])
    with pytest.raises(NotApplicable, match=r"boxes\.json"):
        draw(write_named(tmp_path / "other_names", data, ["square", "cross"]))


def write_named(folder, data, names):
    """Writes a detector with these classes, which finds the second one in the left half."""
    cfg = make_probe_config()
    cfg.MODEL.CLASS_NAMES = names
    cfg.DATASETS.TEST = (f"detections {data.name} boxes.json",)
    cfg.DATALOADER.NUM_WORKERS = 0
    return write_run(folder, cfg)


def test_classes_in_another_order_are_compared_by_name(data, tmp_path):
    write_detector(tmp_path / "same", data)  # registers the data
    figure = draw(write_named(tmp_path / "swapped", data, ["disc", "square"]), threshold=0.1)
    run = figure.data["runs"]["swapped"]
    # It finds a square in each left half. The only one is in image 2, with the second highest
    # score: precision is 1/2 at all recalls.
    assert run["class_ap"] == pytest.approx({"square": 50, "disc": 0})
    assert run["errors"] == {"correct": 1, "wrong": 2, "missed": 2}
    assert figure.data["boxes"] == {"square": 1, "disc": 2}
