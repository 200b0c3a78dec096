# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files with one error each do not agree with PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.export import ExportedModel, ExportInfo, ExportReport
from qbheat_det.export.agreement import Agreement, compare_detections, measure_agreement
from qbheat_det.export.formats import TASK_OUTPUTS, Task
from qbheat_det.export.runtime import Images, Outputs

_ROWS = 6
Change = Callable[[Outputs], object]


def _detect(image: Images, num_found: int = 3) -> Outputs:
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


_REFERENCES: dict[str, tuple[Task, Callable[[Images], Outputs]]] = {
    "detector": ("detection", _detect),
    "full table": ("detection", lambda image: _detect(image, _ROWS)),
    "empty table": ("detection", lambda image: _detect(image, 0)),
    "classifier": (
        "classification",
        lambda image: {"scores": image.reshape(-1, 3).mean(axis=0)[None] / 255},
    ),
    "backbone": ("features", lambda image: {"s8": image[:1, :1].astype(np.float64)}),
}


def _measure(kind: str, change: Change | None = None, number: int = 5) -> ExportReport:
    """Measures a file that gives the results of the reference, changed afterwards."""
    task, reference = _REFERENCES[kind]

    def run(images: Images) -> Outputs:
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
def test_equal_results_agree_and_every_image_is_in_a_batch(kind: str) -> None:
    for number, counts in ((1, [1, 2, 8]), (5, [5, 6, 8])):
        report = _measure(kind, number=number)
        report.check()
        assert [row.num_images for row in report.rows] == counts
        for row in report.rows:
            assert row.score == row.box == 0
            assert row.num_values == (_ROWS if kind == "full table" else 3) * row.num_images


def _set(name: str, value: float, row: Any = 0) -> Change:
    return lambda outputs: outputs[name].__setitem__((slice(None), row), value)


def _reverse(outputs: Outputs) -> None:
    for name in ("boxes", "scores", "labels"):
        outputs[name][:, :3] = outputs[name][:, 2::-1].copy()


_ERRORS: dict[str, Change] = {
    "NaN box": _set("boxes", np.nan, 1),
    "another box": _set("boxes", 0),
    "other labels": lambda outputs: np.subtract(1, outputs["labels"], out=outputs["labels"]),
    "axes": lambda outputs: outputs.update(boxes=outputs["boxes"][..., [1, 0, 3, 2]]),
    "a row less": lambda outputs: np.subtract(outputs["counts"], 1, out=outputs["counts"]),
    "ascending": _reverse,
}


@pytest.mark.parametrize("error", _ERRORS)
def test_a_detector_with_one_error_does_not_agree(error: str) -> None:
    report = _measure("detector", _ERRORS[error])
    assert str(report).count("differs") == 3
    with pytest.raises(UserError):
        report.check()


@pytest.mark.parametrize("kind", ["detector", "classifier", "backbone"])
def test_nan_and_the_first_image_repeated_do_not_agree(kind: str) -> None:
    def repeat_first(outputs: Outputs) -> None:
        for values in outputs.values():
            values[:] = values[:1].copy()

    def spoil(outputs: Outputs) -> None:
        for name, values in outputs.items():
            if name not in ("labels", "counts"):
                values[:] = np.nan

    for number in (1, 5):
        rows = _measure(kind, repeat_first, number).rows
        assert [row.holds(1e-4) for row in rows] == [True, False, False]
    assert not any(row.holds(1e9) for row in _measure(kind, spoil).rows)
    with pytest.raises(UserError, match="--images"):
        _measure("empty table").check()  # which proves nothing


def test_unmatched_detections_are_counted_except_at_the_threshold() -> None:
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
