# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Suspects of wrong labels, on images whose errors are known."""

import pytest
import torch
from torchvision.ops import box_iou

from qbheat_det.labelling.inspection import ImageBoxes, find_suspects, similarity


def boxes(*rows: tuple[float, ...]) -> ImageBoxes:
    """Returns boxes from rows x0, y0, x1, y1, class and, of predictions, score."""
    table = torch.tensor(rows).reshape(-1, len(rows[0]) if rows else 6)
    scores = table[:, 5] if table.shape[1] > 5 else torch.ones(len(table))
    return ImageBoxes(table[:, :4], table[:, 4].long(), scores)


def test_similarity_by_hand() -> None:
    first, second = torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4]])
    found = similarity(first, second)
    # Side by side: no overlap, centres 4 apart, a diagonal of sqrt(8^2 + 4^2).
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.1 * (1 - 4 / 80**0.5)]]))
    torch.testing.assert_close(box_iou(first, second), torch.tensor([[1.0, 0.0]]))


def test_correct_labels_are_no_suspects() -> None:
    truth = boxes((0, 0, 10, 10, 1), (20, 20, 40, 40, 2))
    seen = boxes((0, 0, 10, 10, 1, 0.9), (20, 20, 40, 40, 2, 0.8))
    assert all(suspect.score < 1e-6 for suspect in find_suspects([truth], [seen]))


@pytest.mark.parametrize(
    ("annotated", "kind", "annotation"),
    [
        (((0, 0, 10, 10, 1),), "missing", None),
        (((0, 0, 10, 10, 1), (27, 20, 47, 40, 2)), "location", 1),
        (((0, 0, 10, 10, 1), (20, 20, 40, 40, 1)), "class", 1),
    ],
)
def test_each_kind_of_error_comes_first(
    annotated: tuple[tuple[float, ...], ...], kind: str, annotation: int | None
) -> None:
    right = boxes((0, 0, 10, 10, 1), (20, 20, 40, 40, 2))
    seen = boxes((0, 0, 10, 10, 1, 0.9), (20, 20, 40, 40, 2, 0.8), (60, 60, 70, 70, 1, 0.1))
    first, *_ = find_suspects([right, boxes(*annotated)], [seen, seen])
    assert (first.kind, first.image, first.annotation) == (kind, 1, annotation)
    assert (first.box, first.label) == ((20, 20, 40, 40), 2)


def test_images_without_boxes_or_predictions() -> None:
    none = boxes()
    assert find_suspects([none, boxes((0, 0, 1, 1, 0))], [none, none]) == []
    (missing,) = find_suspects([none], [boxes((0, 0, 8, 8, 3, 0.7))])
    assert (missing.kind, missing.score) == ("missing", pytest.approx(0.7))
