# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure of detections.

The detector finds a disc in the left half of every image, with a score that grows with its red.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.structures import BitMasks, Boxes, Instances
from PIL import Image

from qbheat_det.analysis import detections
from qbheat_det.analysis.box_drawing import draw_boxes, draw_instances, get_class_color
from qbheat_det.analysis.detections import crop_box, draw_detections
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.run import Run, open_runs
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, NotApplicable, write_figure
from qbheat_det.engine.data_sources import register_source
from tests.engine.tiny_detectors import make_probe_config

from .tiny_runs import classifier_config, write_run

SQUARE, DISC = 4, 9  # category ids
REDS = (204, 102, 51)  # scores 0.8, 0.4, 0.2
LEFT, RIGHT = [0, 0, 32, 32], [32, 0, 32, 32]  # XYWH
# One of two discs is found, with the highest score: precision is 1 at the 51 recalls up to 1/2.
AP_DISC = 100 * 51 / 101


def write_dataset(folder: Path) -> Path:
    """Writes three images: a disc on the left, a square on the left, a disc on the right."""
    (folder / "images").mkdir(parents=True)
    for index, red in enumerate(REDS, start=1):
        pixels = np.zeros((32, 64, 3), np.uint8)
        pixels[..., 0] = red
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
    boxes = [(1, DISC, LEFT), (2, SQUARE, LEFT), (3, DISC, RIGHT)]
    content = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 64, "height": 32}
                   for i in (1, 2, 3)],
        "annotations": [{"id": i, "image_id": i, "category_id": k, "bbox": box, "area": 1024,
                         "iscrowd": 0} for i, k, box in boxes],
        "categories": [{"id": SQUARE, "name": "square"}, {"id": DISC, "name": "disc"}],
    }  # fmt: skip
    (folder / "boxes.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_detector(folder: Path, data: Path) -> Path:
    cfg = make_probe_config()
    name = f"detections {data.name}"
    cfg.DATASETS.TEST = (name,)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.MODEL.DEVICE = "cpu"
    source = {"json_file": str(data / "boxes.json"), "image_root": str(data / "images")}
    register_source(name, {**source, "labelled": True})
    return write_run(folder, cfg)


def draw(*runs: Path, images: int = 1, **keywords: Any) -> Figure:
    opened = open_runs([str(run) for run in runs], device="cpu")
    return draw_detections(opened, FigureOptions(num_images=images), **keywords)


@pytest.fixture(autouse=True)
def _datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "find_set", lambda self, split: self.cfg.DATASETS.TEST[0])


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws no charts, which take seconds."""
    monkeypatch.setattr(detections, "draw_charts", lambda *args: {})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("boxes"))


def test_metrics_of_inference_are_those_computed_by_hand(data: Path, tmp_path: Path) -> None:
    figure = draw(write_detector(tmp_path / "run", data), images=3, threshold=0.1)
    run = figure.data["runs"]["run"]
    assert run["AP50"] == pytest.approx(AP_DISC / 2)
    assert run["class_ap"] == pytest.approx({"square": 0, "disc": AP_DISC})
    assert figure.data["boxes"] == {"square": 1, "disc": 2}
    assert run["errors"] == {"correct": 1, "false alarm": 1, "other": 1, "missed": 2}
    assert ["AP (%)", f"{AP_DISC / 2:.2f}"] in [list(row) for row in figure.table.rows]
    assert list(figure.images) == [
        "precision_recall", "classes",
        "predictions_1", "predictions_2", "predictions_3", "errors",
    ]  # fmt: skip
    assert all(path.stat().st_size for path in write_figure(figure, tmp_path / "figures"))


@pytest.mark.usefixtures("fast")
def test_runs_that_cannot_be_evaluated_are_left_out(data: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other")
    runs = [write_detector(tmp_path / "one", data), write_detector(tmp_path / "two", other)]
    runs.append(write_run(tmp_path / "classes", classifier_config()))
    figure = draw(*runs)
    assert list(figure.data["runs"]) == ["one"]
    for name, reason in zip(("two", "classes"), figure.data["left_out"], strict=True):
        assert name in reason
    flags = {"data": str(data / "boxes.json")}
    assert list(draw(*runs[:2], **flags).data["runs"]) == ["one", "two"]
    with pytest.raises(UserError, match="has no boxes"):
        draw(*runs, data=str(data))
    with pytest.raises(NotApplicable, match="classes"):
        draw(runs[2])
    cfg = make_probe_config()
    cfg.MODEL.CLASS_NAMES = ["disc", "square"]
    cfg.DATASETS.TEST = (f"detections {data.name}",)
    with pytest.raises(NotApplicable, match=r"boxes\.json"):
        draw(write_run(tmp_path / "swapped", cfg))


RED = (200, 10, 10)


def grey(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 90, np.uint8)


def boxes(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def test_outlines_lie_on_their_boxes_and_small_images_are_enlarged() -> None:
    image = grey(400, 500)
    drawn = draw_boxes(image, boxes([100, 200, 300, 350]), ["eel"], [RED])
    for x, y in [(100, 280), (300, 280), (200, 350)]:  # the label may cover the top
        assert tuple(drawn[y, x]) == RED
    np.testing.assert_array_equal(drawn[280, 200], 90)
    np.testing.assert_array_equal(image, grey(400, 500))  # the input is not drawn on
    np.testing.assert_array_equal(draw_boxes(image, boxes(), [], []), image)
    large = draw_boxes(grey(64, 128), boxes([32, 16, 96, 48]), [""], [RED])
    assert large.shape == (384, 768, 3)
    assert tuple(large[200, 32 * 6]) == RED

    beyond = draw_boxes(grey(400, 400), boxes([-50, -50, 900, 900]), ["x" * 99], [RED])
    assert tuple(beyond[200, 0]) == tuple(beyond[200, 399]) == RED
    for odd in ([500, 500, 520, 520], [10, 10, 10, 10], [-9, -9, 999, 5]):
        draw_boxes(grey(40, 40), boxes(odd), ["a"], [RED])
        assert crop_box(grey(40, 40), np.array(odd, dtype=np.float64), RED).size


def test_instances_have_class_colors_scores_and_masks() -> None:
    mask = torch.zeros(1, 400, 400, dtype=torch.bool)
    mask[0, 200:300, 200:300] = True
    corners = torch.tensor([[150.0, 150.0, 350.0, 350.0]], requires_grad=True)
    found = Instances((400, 400), pred_boxes=Boxes(corners), pred_classes=torch.tensor([1]),
                      scores=torch.tensor([0.5]), pred_masks=mask)  # fmt: skip
    truth = Instances((400, 400), gt_boxes=Boxes(corners), gt_classes=torch.tensor([1]),
                      gt_masks=BitMasks(mask))  # fmt: skip
    color = np.asarray(get_class_color(1))
    pictures = [draw_instances(grey(400, 400), one, ["eel"]) for one in (found, truth)]
    for picture in pictures:
        np.testing.assert_array_equal(picture[250, 250], (54 + 0.4 * color).astype(np.uint8))
        np.testing.assert_array_equal(picture[310, 250], 90)
        np.testing.assert_array_equal(picture[280, 150], color)
    assert (pictures[0] != 90).any(2).sum() > (pictures[1] != 90).any(2).sum()  # the score
