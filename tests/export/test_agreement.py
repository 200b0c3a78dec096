# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files with one error each do not agree with PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.export import ExportedModel, ExportInfo, ExportReport
from qbheat_det.export.agreement import Agreement, compare_detections, measure_agreement
from qbheat_det.export.metadata import TASK_OUTPUTS, Task
from qbheat_det.export.runtime import Images as Image
from qbheat_det.export.runtime import Outputs

_ROWS = 6
Reference = Callable[[Image], Outputs]
Change = Callable[[Outputs], None]


def _detect(image: Image, num_found: int = 3) -> Outputs:
    """Boxes and scores that depend on the pixels, in a table of ``_ROWS`` rows."""
    height, width = image.shape[:2]
    means = image.reshape(-1, 3).mean(axis=0) / 255
    scores = np.zeros((1, _ROWS))
    scores[0, :num_found] = 0.9 - 0.1 * np.arange(num_found) - 0.05 * means[0]
    corner = np.stack([means[1] * width, means[2] * height]) * 0.5
    boxes = np.tile(np.concatenate([corner, corner + 0.4 * np.array([width, height])]), (_ROWS, 1))
    boxes[:, :2] *= 1 - np.arange(_ROWS)[:, None] / 20
    labels = np.arange(_ROWS)[None] % 2
    return {
        "boxes": boxes[None],
        "scores": scores,
        "labels": labels,
        "counts": np.array([num_found]),
    }


def _detect_full_table(image: Image) -> Outputs:
    return _detect(image, _ROWS)


def _detect_nothing(image: Image) -> Outputs:
    return _detect(image, 0)


def _mean(image: Image) -> Outputs:
    return {"scores": image.reshape(-1, 3).mean(axis=0)[None] / 255}


def _map(image: Image) -> Outputs:
    return {"s8": image[:1, :1].astype(np.float64)}


def _measure(
    task: Task, reference: Reference, change: Change | None = None, number: int = 5
) -> ExportReport:
    """Measures a file that gives what the reference gives of each image, changed afterwards."""

    def run(images: Image) -> Outputs:
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


@pytest.mark.parametrize(
    ("task", "reference"),
    [
        ("detection", _detect),
        ("detection", _detect_full_table),
        ("classification", _mean),
        ("features", _map),
    ],
)
@pytest.mark.parametrize("number", [1, 5])
def test_equal_results_agree_and_every_image_is_in_a_batch(
    task: Task, reference: Reference, number: int
) -> None:
    report = _measure(task, reference, number=number)
    report.check()
    assert [row.num_images for row in report.rows] == ([1, 2, 8] if number == 1 else [5, 6, 8])
    for row in report.rows:
        assert row.score == row.box == 0
        found = _ROWS if reference is _detect_full_table else 3
        assert row.num_values == found * row.num_images


def _fill_with_garbage(outputs: Outputs) -> None:
    outputs["scores"][:] = 1
    outputs["boxes"][:] = [1, 1, 2, 2]
    outputs["counts"][:] = _ROWS


def _spoil(name: str, value: float, where: int = 0) -> Change:
    def change(outputs: Outputs) -> None:
        outputs[name][:, where] = value

    return change


def _swap_labels(outputs: Outputs) -> None:
    outputs["labels"][:] = 1 - outputs["labels"]


def _lose_a_row(outputs: Outputs) -> None:
    outputs["counts"] -= 1


def _reverse(outputs: Outputs) -> None:
    for name in ("boxes", "scores", "labels"):
        outputs[name][:, :3] = outputs[name][:, 2::-1].copy()


def _swap_axes(outputs: Outputs) -> None:
    outputs["boxes"][:] = outputs["boxes"][..., [1, 0, 3, 2]]


@pytest.mark.parametrize("reference", [_detect, _detect_full_table])
@pytest.mark.parametrize(
    "change",
    [
        _fill_with_garbage,
        _spoil("scores", np.nan),
        _spoil("boxes", np.nan, 1),
        _spoil("boxes", np.inf, 1),
        _swap_labels,
        _swap_axes,
        _lose_a_row,
        _reverse,
    ],
)
def test_a_detector_with_one_error_does_not_agree(reference: Reference, change: Change) -> None:
    if change is _lose_a_row and reference is _detect_full_table:
        change = _spoil("boxes", 0)  # the last row of a full table may differ
    report = _measure("detection", reference, change)
    assert not any(row.holds(1e-4) for row in report.rows)
    assert str(report).count("differs") == 3
    with pytest.raises(UserError):
        report.check()


@pytest.mark.parametrize(
    ("task", "reference"), [("classification", _mean), ("features", _map), ("detection", _detect)]
)
@pytest.mark.parametrize("number", [1, 5])
def test_repeating_the_first_image_of_a_batch_does_not_agree(
    task: Task, reference: Reference, number: int
) -> None:
    def repeat_first(outputs: Outputs) -> None:
        for values in outputs.values():
            values[:] = values[:1].copy()

    rows = _measure(task, reference, repeat_first, number).rows
    assert [row.holds(1e-4) for row in rows] == [True, False, False]


@pytest.mark.parametrize(("task", "reference"), [("classification", _mean), ("features", _map)])
def test_nan_does_not_agree(task: Task, reference: Reference) -> None:
    def spoil(outputs: Outputs) -> None:
        for values in outputs.values():
            values[:] = np.nan

    report = _measure(task, reference, spoil)
    assert not any(row.holds(1e9) for row in report.rows)
    assert "inf" in str(report)


def test_images_without_detections_prove_nothing() -> None:
    with pytest.raises(UserError, match="--images"):
        _measure("detection", _detect_nothing).check()


def test_unmatched_detections_are_counted_except_at_the_threshold() -> None:
    row = Agreement(1)
    boxes = np.array([[[0, 0, 10, 10], [20, 0, 30, 10], [0, 20, 10, 30.0]]])
    mine = {
        "boxes": boxes[:, [1, 0, 2]],
        "scores": np.array([[0.9, 0.8, 0.0]]),
        "labels": np.array([[1, 0, 0]]),
        "counts": np.array([2]),
    }
    theirs = {
        "boxes": boxes[:, :2] + 0.5,
        "scores": np.array([[0.7, 0.6]]),
        "labels": np.array([[0, 0]]),
        "counts": np.array([2]),
    }
    compare_detections(row, mine, theirs, 0.05, (100, 50), 0.2)
    # The first box has a partner, 0.1 and half a pixel off; the second is of two labels.
    assert (row.num_values, row.unmatched) == (1, 2)
    assert (row.score, row.box, row.relative_box) == pytest.approx((0.1, 0.5, 0.005))
    above = Agreement(1)
    compare_detections(above, mine, theirs, 0.75, (100, 50), 0.2)
    assert above.unmatched == 0
