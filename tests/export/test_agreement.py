# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files that are wrong in one way each do not agree, whatever their tables hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from qbheat_det.engine.exporting.agreement import (
    Agreement,
    compare_boxes,
    measure_agreement,
    table_of,
)
from qbheat_det.engine.exporting.export_info import DETECTION_OUTPUTS, Task
from qbheat_det.engine.exporting.exported_model import Outputs

from qbheat_det.core.errors import UserError
from qbheat_det.engine.exporting import ExportedModel, ExportInfo
from qbheat_det.engine.media import Image

_ROWS = 6
_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "detection": DETECTION_OUTPUTS,
    "classification": ("scores",),
    "features": ("s8",),
}
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


def _detect_in_a_full_table(image: Image) -> Outputs:
    return _detect(image, _ROWS)


def _detect_nothing(image: Image) -> Outputs:
    return _detect(image, 0)


def _mean(image: Image) -> Outputs:
    return {"scores": image.reshape(-1, 3).mean(axis=0)[None] / 255}


def _map(image: Image) -> Outputs:
    return {"s8": image[:1, :1].astype(np.float64)}


class _File(ExportedModel):
    """Gives what the reference gives of each image, and then spoils it."""

    def __init__(
        self, task: Task, reference: Callable[[Image], Outputs], change: Change | None = None
    ) -> None:
        self.path = Path("wrong.onnx")
        self.info = ExportInfo(task, _OUTPUTS[task], "RGB", score_threshold=0.05)
        self._reference = reference
        self._change = change

    def _run(self, images: Image) -> Outputs:
        found = [self._reference(image) for image in images]
        outputs = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        if self._change is not None:
            self._change(outputs)
        return outputs


def _images(number: int) -> list[Image]:
    sizes = [(40, 50), (31, 64), (70, 33), (1, 200), (44, 40)][:number]
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def _measure(
    model: _File, reference: Callable[[Image], Outputs], number: int = 5
) -> list[Agreement]:
    return measure_agreement(model, reference, _images(number), tolerance=1e-4)


@pytest.mark.parametrize(
    ("task", "reference"),
    [
        ("detection", _detect),
        ("detection", _detect_in_a_full_table),
        ("classification", _mean),
        ("features", _map),
    ],
)
@pytest.mark.parametrize("number", [1, 5])
def test_the_same_answers_agree_and_every_image_is_in_a_batch(
    task: Task, reference: Callable[[Image], Outputs], number: int
) -> None:
    rows = _measure(_File(task, reference), reference, number)
    assert [row.num_images for row in rows] == ([1, 2, 8] if number == 1 else [5, 6, 8])
    for row in rows:
        assert row.holds(1e-4)
        assert row.score == row.box == 0
        found = _ROWS if reference is _detect_in_a_full_table else 3
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


@pytest.mark.parametrize("reference", [_detect, _detect_in_a_full_table])
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
def test_a_detector_that_is_wrong_in_one_thing_does_not_agree(
    reference: Callable[[Image], Outputs], change: Change
) -> None:
    if change is _lose_a_row and reference is _detect_in_a_full_table:
        change = _spoil("boxes", 0)  # the last of a full table may be another
    for row in _measure(_File("detection", reference, change), reference):
        assert not row.holds(1e-4)
        assert "differs" in table_of([row], "detection", 1e-4)


@pytest.mark.parametrize(
    ("task", "reference"), [("classification", _mean), ("features", _map), ("detection", _detect)]
)
@pytest.mark.parametrize("number", [1, 5])
def test_a_file_that_answers_for_the_first_image_of_a_batch_does_not_agree(
    task: Task, reference: Callable[[Image], Outputs], number: int
) -> None:
    def repeat_first(outputs: Outputs) -> None:
        for values in outputs.values():
            values[:] = values[:1].copy()

    rows = _measure(_File(task, reference, repeat_first), reference, number)
    assert [row.holds(1e-4) for row in rows] == [True, False, False]


@pytest.mark.parametrize(("task", "reference"), [("classification", _mean), ("features", _map)])
def test_what_is_no_number_does_not_agree(
    task: Task, reference: Callable[[Image], Outputs]
) -> None:
    def nothing(outputs: Outputs) -> None:
        for values in outputs.values():
            values[:] = np.nan

    rows = _measure(_File(task, reference, nothing), reference)
    assert not any(row.holds(1e9) for row in rows)
    assert "inf" in table_of(rows, task, 1e-4)


def test_images_on_which_nothing_is_found_are_refused() -> None:
    with pytest.raises(UserError, match=r"nothing is found on any of the 5 images.*--images"):
        _measure(_File("detection", _detect_nothing), _detect_nothing)


def test_detections_that_one_side_lacks_are_counted_but_at_the_threshold() -> None:
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
    compare_boxes(row, mine, theirs, 0.05, (100, 50), 0.2)
    # The first box has a partner, 0.1 and half a pixel off; the second is of two labels.
    assert (row.num_values, row.unmatched) == (1, 2)
    assert (row.score, row.box, row.relative_box) == pytest.approx((0.1, 0.5, 0.005))
    assert "differs" in table_of([row], "detection", 0.2)
    above = Agreement(1)
    compare_boxes(above, mine, theirs, 0.75, (100, 50), 0.2)
    assert above.unmatched == 0
