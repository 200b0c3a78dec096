# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The module that is exported, in PyTorch, and the measure of agreement with it."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from detectron2.engine import DefaultPredictor
from torch import nn
from torch.export import Dim
from torchvision.ops import nms

from qbheat_det.core.errors import UserError
from qbheat_det.export.agreement import (
    Agreement,
    build_reference,
    compare_detections,
    measure_agreement,
)
from qbheat_det.export.files import write_onnx
from qbheat_det.export.graph import build_exportable, trace
from qbheat_det.export.heads import EMPTY, suppress_overlaps
from qbheat_det.inference.exported import TASK_OUTPUTS, ExportedModel, ExportInfo, split_detections
from qbheat_det.inference.predict import build_predictor
from tests.export.tiny_models import TwoMaps, build, make_config, save_model


def _noise(number, height, width):
    return np.random.default_rng(0).integers(0, 256, (number, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("kind", "pixel_format", "more"),
    [
        ("retinanet", "BGR", {}),
        ("fcos", "RGB", {}),
        ("mf_detr", "RGB", {}),
        ("selected_queries", "RGB", {}),
        # On a backbone that needs padding.
        ("mf_detr", "RGB", {"BACKBONE__NAME": "TwoMaps", "MF_DETR__IN_FEATURES": '["s8","s16"]'}),
    ],
)
def test_a_batch_gives_the_predictors_boxes_of_each_image(
    tmp_path, monkeypatch, kind, pixel_format, more
):
    monkeypatch.setattr(TwoMaps, "size_divisibility", 32)
    more = {f"MODEL__{key}": value for key, value in more.items()}
    cfg = make_config(kind, INPUT__FORMAT=pixel_format, **more)
    cfg.MODEL.WEIGHTS = save_model(tmp_path / "run", cfg)
    predictor = build_predictor(cfg)
    exportable = build_exportable(predictor.model, cfg)
    assert str(tmp_path) not in exportable.info.config
    images = _noise(3, 75, 90)
    with torch.no_grad():
        outputs = exportable(torch.from_numpy(images))
    named = {name: x.numpy() for name, x in zip(exportable.info.outputs, outputs, strict=True)}
    for arrays, image in zip(split_detections(named, (75, 90)), images, strict=True):
        found = arrays.to_instances()
        bgr = image if pixel_format == "BGR" else image[:, :, ::-1]
        expected = predictor(bgr)["instances"]
        expected = expected[expected.scores.argsort(descending=True)]
        assert len(found) == len(expected) > 5
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            found.pred_boxes.tensor, expected.pred_boxes.tensor, rtol=0, atol=2e-3
        )
        torch.testing.assert_close(found.pred_classes, expected.pred_classes)


def _suppress_naively(boxes, scores, labels, overlap):
    result = torch.full_like(scores, EMPTY)
    for image in range(len(boxes)):
        for label in range(3):
            of_class = ((labels[image] == label) & (scores[image] > EMPTY)).nonzero()[:, 0]
            kept = of_class[nms(boxes[image, of_class], scores[image, of_class], overlap)]
            result[image, kept] = scores[image, kept]
    return result


class _Suppress(nn.Module):
    """From rows (N, M, 6) of box, score and label to the scores (N, M) that are kept."""

    def forward(self, rows):
        return suppress_overlaps(rows[..., :4], rows[..., 4], rows[..., 5].long(), 3, 0.3)


def test_overlaps_are_suppressed_image_by_image_and_class_by_class(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    corners = 1300 * torch.rand(3, 200, 2) - 650  # they may begin left of the image
    boxes = torch.cat([corners, corners + 300 * torch.rand(3, 200, 2)], dim=2)
    scores, labels = torch.rand(3, 200), torch.randint(3, (3, 200))
    scores[torch.rand(3, 200) < 0.2] = EMPTY
    expected = _suppress_naively(boxes, scores, labels, 0.3)
    assert 0 < (expected > EMPTY).sum() < (scores > EMPTY).sum()
    torch.testing.assert_close(suppress_overlaps(boxes, scores, labels, 3, 0.3), expected)
    empty = torch.full_like(scores, EMPTY)
    torch.testing.assert_close(suppress_overlaps(boxes, empty, labels, 3, 0.3), empty)
    # The same in ONNX, traced at another number of images and boxes.
    rows = torch.cat([boxes, scores[..., None], labels[..., None].float()], dim=2)
    program = trace(_Suppress(), (rows[:2, :50].clone(),), ({0: Dim.AUTO, 1: Dim.AUTO},))
    write_onnx(program, tmp_path / "x.onnx", ["rows"], ["kept"], {})
    session = onnxruntime.InferenceSession(str(tmp_path / "x.onnx"))
    (kept,) = session.run(None, {"rows": rows.numpy()})
    torch.testing.assert_close(torch.from_numpy(kept), expected)


@pytest.mark.parametrize("kind", ["classifier", "qb_heat"])
def test_classifiers_and_backbones_give_what_the_package_computes(kind):
    cfg = make_config(kind, INPUT__CLASSIFY__TEST_CROP=0.875)
    with pytest.raises(UserError, match="Identity"):  # other models are refused
        build_exportable(nn.Identity(), cfg)
    model = build(cfg)
    exportable = build_exportable(model, cfg)
    predictor = cast(DefaultPredictor, SimpleNamespace(model=model))
    reference = build_reference(predictor, cfg, exportable.info.task)
    images = _noise(2, 50, 70)
    with torch.no_grad():
        outputs = exportable(torch.from_numpy(images))
    for name, values in zip(exportable.info.outputs, outputs, strict=True):
        for index in range(2):
            expected = torch.from_numpy(reference(images[index])[name])
            torch.testing.assert_close(values[index : index + 1], expected, rtol=1e-4, atol=1e-4)


_ROWS = 6
_INTEGERS = {"labels", "counts"}


def _detect(image, num_found=3):
    """Boxes and scores that depend on the pixels, in a table of ``_ROWS`` rows."""
    height, width = image.shape[:2]
    means = image.reshape(-1, 3).mean(axis=0) / 255
    scores = np.zeros((1, _ROWS))
    scores[0, :num_found] = 0.9 - 0.1 * np.arange(num_found) - 0.05 * means[0]
    corner = np.stack([means[1] * width, means[2] * height]) * 0.5
    boxes = np.tile(np.concatenate([corner, corner + 0.4 * np.array([width, height])]), (_ROWS, 1))
    boxes[:, :2] *= 1 - np.arange(_ROWS)[:, None] / 20
    labels = np.arange(_ROWS)[None] % 2
    counts = np.array([num_found])
    return {"boxes": boxes[None], "scores": scores, "labels": labels, "counts": counts}


_REFERENCES = {
    "detector": ("detection", _detect),
    "full table": ("detection", lambda image: _detect(image, _ROWS)),
    "empty table": ("detection", lambda image: _detect(image, 0)),
    "classifier": (
        "classification",
        lambda image: {"scores": image.reshape(-1, 3).mean(axis=0)[None] / 255},
    ),
    "backbone": ("features", lambda image: {"s8": image[:1, :1].astype(np.float64)}),
}


def _measure(kind, change=None, number=5):
    """Measures a file with the results of the reference, after a ``change``."""
    task, reference = _REFERENCES[kind]

    def run(images):
        found = [reference(image) for image in images]
        outputs = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        if change is not None:
            change(outputs)
        return outputs

    sizes = [(40, 50), (31, 64), (70, 33), (1, 200), (44, 40)][:number]
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    info = ExportInfo(task, TASK_OUTPUTS.get(task, ("s8",)), "RGB", score_threshold=0.05)
    model = ExportedModel(Path("x.onnx"), info, run)
    return measure_agreement(model, reference, images, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["detector", "full table", "classifier", "backbone"])
def test_equal_results_agree_and_every_image_is_in_a_batch(kind):
    for number, counts in ((1, [1, 2, 8]), (5, [5, 6, 8])):
        report = _measure(kind, number=number)
        report.check()
        assert [row.num_images for row in report.rows] == counts
        for row in report.rows:
            assert row.score == row.box == 0
            assert row.num_values == (_ROWS if kind == "full table" else 3) * row.num_images


def _set(name, value, row=0):
    return lambda outputs: outputs[name].__setitem__((slice(None), row), value)


def _reverse(outputs):
    for name in ("boxes", "scores", "labels"):
        outputs[name][:, :3] = outputs[name][:, 2::-1].copy()


def _repeat_first(outputs):
    outputs.update({name: values[[0] * len(values)] for name, values in outputs.items()})


def _spoil(outputs):
    outputs.update({name: np.nan * outputs[name] for name in outputs.keys() - _INTEGERS})


_ERRORS = [
    ("detector", _set("boxes", np.nan, 1)),
    ("detector", _set("boxes", 0)),
    ("detector", lambda outputs: np.subtract(1, outputs["labels"], out=outputs["labels"])),
    ("detector", lambda outputs: outputs.update(boxes=outputs["boxes"][..., [1, 0, 3, 2]])),
    ("detector", lambda outputs: np.subtract(outputs["counts"], 1, out=outputs["counts"])),
    ("detector", _reverse),
    *(
        (kind, e)
        for kind in ("detector", "classifier", "backbone")
        for e in (_repeat_first, _spoil)
    ),
]


@pytest.mark.parametrize(("kind", "error"), _ERRORS)
def test_a_file_with_one_error_does_not_agree(kind, error):
    report = _measure(kind, error)
    assert str(report).count("differs") == (2 if error is _repeat_first else 3)  # not one by one
    with pytest.raises(UserError):
        report.check()
    with pytest.raises(UserError, match="--images"):
        _measure("empty table").check()  # there is nothing to compare


def test_unmatched_detections_are_counted_except_at_the_threshold():
    boxes = np.array([[[0, 0, 10, 10], [20, 0, 30, 10], [0, 20, 10, 30.0]]])
    mine = {"scores": np.array([[0.9, 0.8, 0.0]]), "labels": np.array([[1, 0, 0]])}
    theirs = {"scores": np.array([[0.7, 0.6]]), "labels": np.array([[0, 0]])}
    mine |= {"boxes": boxes[:, [1, 0, 2]], "counts": np.array([2])}
    theirs |= {"boxes": boxes[:, :2] + 0.5, "counts": np.array([2])}
    row, above = Agreement(1), Agreement(1)
    compare_detections(row, mine, theirs, 0.05, (100, 50), 0.2)
    # The first box has a partner, 0.1 and half a pixel off; the second has another label.
    assert (row.num_values, row.unmatched) == (1, 2)
    assert (row.score, row.box, row.relative_box) == pytest.approx((0.1, 0.5, 0.005))
    compare_detections(above, mine, theirs, 0.75, (100, 50), 0.2)
    assert above.unmatched == 0


def test_the_end_of_a_full_table_excuses_the_other_side_alone():
    places = 20.0 * np.arange(5)[:, None] + np.array([0, 0, 10, 10])
    full = {"scores": np.array([[0.9, 0.8, 0.7]]), "boxes": places[None, :3]}
    short = {"scores": np.array([[0.5, 0.4]]), "boxes": places[None, 3:]}
    for table in (full, short):
        count = table["scores"].size
        table |= {"labels": np.zeros((1, count), int), "counts": np.array([count])}
    row = Agreement(1)
    compare_detections(row, full, short, 0.05, (100, 100), 0.01)
    # The short table had room for the three; the full one had none for scores below 0.7.
    assert (row.num_values, row.unmatched) == (0, 3)
