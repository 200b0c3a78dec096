# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Suspects of wrong labels by hand, one for each object, and made errors."""

import numpy as np
import pytest
import torch

from qbheat_det.labelling.labels import ImageBoxes
from qbheat_det.labelling.suspects import (
    Suspect,
    calibrate,
    find_suspects,
    keep_one_per_object,
    make_errors,
    similarity,
)


def boxes(*rows):
    """Returns boxes from rows x0, y0, x1, y1, class and, of predictions, score."""
    table = torch.tensor(rows).reshape(-1, len(rows[0]) if rows else 6)
    scores = table[:, 5] if table.shape[1] > 5 else torch.ones(len(table))
    return ImageBoxes(table[:, :4], table[:, 4].long(), scores)


def test_made_errors_are_those_that_are_returned():
    boxes = torch.tensor([[0.0, 0, 8, 8]] * 50)
    truth = [ImageBoxes(boxes, torch.arange(50) % 3, torch.ones(50))] * 4
    for kind in ("missing", "location", "class"):
        generator = np.random.default_rng(0)
        changed, errors = make_errors(kind, truth, generator)
        assert 5 < sum(map(len, errors)) < 45
        for before, after, own in zip(truth, changed, errors, strict=True):
            if kind == "missing":
                assert len(after.boxes) == 50 - len(own)
                continue
            moved = (before.boxes != after.boxes).any(1)
            renamed = before.classes != after.classes
            found = moved if kind == "location" else renamed
            assert set(found.nonzero()[:, 0].tolist()) == own
            assert not (renamed if kind == "location" else moved).any()
    of_one_class = [ImageBoxes(boxes, torch.zeros(50).long(), torch.ones(50))]
    assert make_errors("class", of_one_class, np.random.default_rng(0))[1] == [set()]


def test_scores_that_errors_do_not_raise_mean_nothing():
    boxes = torch.tensor([[0.0, 0, 8, 8], [20, 20, 28, 28]])
    truth = [ImageBoxes(boxes, torch.tensor([0, 1]), torch.ones(2))] * 20
    seen = [ImageBoxes(boxes, torch.tensor([0, 1]), torch.full((2,), 0.9))] * 20
    assert calibrate(find_suspects(truth, seen), truth, seen, 0) == []


def test_similarity_by_hand():
    first, second = torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4]])
    found = similarity(first, second)
    # Side by side: no overlap, centres 4 apart, a diagonal of sqrt(8^2 + 4^2).
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.1 * (1 - 4 / 80**0.5)]]))


@pytest.mark.parametrize(
    ("annotated", "kind", "annotation"),
    [
        (((0, 0, 10, 10, 1),), "missing", None),
        (((0, 0, 10, 10, 1), (27, 20, 47, 40, 2)), "location", 1),
        (((0, 0, 10, 10, 1), (20, 20, 40, 40, 1)), "class", 1),
    ],
)
def test_each_kind_of_error_comes_first(annotated, kind, annotation):
    right = boxes((0, 0, 10, 10, 1), (20, 20, 40, 40, 2))
    seen = boxes((0, 0, 10, 10, 1, 0.9), (20, 20, 40, 40, 2, 0.8), (60, 60, 70, 70, 1, 0.1))
    first, *others = find_suspects([right, boxes(*annotated)], [seen, seen])
    assert all(one.score < 1e-6 for one in others if one.box != (60, 60, 70, 70) and one.image == 0)
    assert (first.kind, first.image, first.annotation) == (kind, 1, annotation)
    assert (first.box, first.label) == ((20, 20, 40, 40), 2)


def test_images_without_boxes_or_predictions():
    none = boxes()
    assert find_suspects([none, boxes((0, 0, 1, 1, 0))], [none, none]) == []
    (missing,) = find_suspects([none], [boxes((0, 0, 8, 8, 3, 0.7))])
    assert (missing.kind, missing.score) == ("missing", pytest.approx(0.7))


def test_a_moved_box_is_one_suspect_and_its_missing_neighbour_another():
    # The annotation is 10 px left of its object, which is predicted as two classes. IoU 1/3 and
    # 5/16 with the annotation, 10/11 with each other. The neighbour's IoU with both is 0.
    annotated = boxes((0, 0, 20, 20, 1))
    seen = boxes((10, 0, 30, 20, 1, 0.9), (10, 0, 30, 22, 2, 0.5), (32, 0, 52, 20, 1, 0.2))
    found = find_suspects([annotated], [seen])
    assert [one.kind for one in found] == ["location", "missing", "missing"]
    moved, neighbour = keep_one_per_object(found)
    like = 0.9 / 3 + 0.1 * (1 - 10 / (30**2 + 20**2) ** 0.5)
    assert (moved.kind, moved.annotation, moved.box) == ("location", 0, (10, 0, 30, 20))
    assert moved.score == pytest.approx(0.9 * (1 - like))
    assert (neighbour.kind, neighbour.box) == ("missing", (32, 0, 52, 20))
    # If the duplicate is more probable, it is the one that is kept.
    swapped = keep_one_per_object([found[1], found[0], found[2]])
    assert [one.box for one in swapped] == [(10, 0, 30, 22), (32, 0, 52, 20)]


def test_a_box_is_not_moved_to_the_object_of_another_annotation():
    # The first box has an IoU of 3/7 with the second one and its prediction. Its own object is
    # predicted with a lower score and an IoU of 1/7.
    annotated = boxes((0, 0, 20, 20, 1), (8, 0, 28, 20, 1))
    seen = boxes((8, 0, 28, 20, 1, 0.9), (-15, 0, 5, 20, 1, 0.8))
    found = {(one.kind, one.annotation): one for one in find_suspects([annotated], [seen])}
    moved = found["location", 0]
    like = 0.9 / 7 + 0.1 * (1 - 15 / (35**2 + 20**2) ** 0.5)
    assert (moved.box, moved.score) == ((-15, 0, 5, 20), pytest.approx(0.8 * (1 - like)))
    right = found["location", 1]
    assert (right.box, right.score) == ((8, 0, 28, 20), pytest.approx(0, abs=1e-6))
    # Without its own prediction, it is not moved at all.
    only = boxes((8, 0, 28, 20, 1, 0.9))
    assert ("location", 0) not in {
        (one.kind, one.annotation) for one in find_suspects([annotated], [only])
    }


def test_two_classes_and_a_duplicate_of_a_missing_object_are_one_suspect():
    # IoU 1 and 4/5 with the first box; the last box has an IoU of 1/4 with it.
    seen = boxes(
        (0, 0, 10, 10, 1, 0.8),
        (0, 0, 10, 10, 2, 0.6),
        (0, 0, 10, 8, 1, 0.4),
        (6, 0, 16, 10, 1, 0.2),
    )
    found = find_suspects([boxes()], [seen])
    assert len(found) == 4
    kept = keep_one_per_object(found)
    assert [(one.box, one.label) for one in kept] == [((0, 0, 10, 10), 1), ((6, 0, 16, 10), 1)]


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        # Two annotations with the same predicted box.
        (("location", 0, (0, 0, 10, 10)), ("location", 1, (0, 0, 10, 10)), True),
        (("class", 0, (0, 0, 10, 10), (2, 0, 12, 10)), ("class", 1, (0, 0, 10, 10)), True),
        # One annotation with two predicted boxes.
        (("location", 0, (0, 0, 10, 10)), ("class", 0, (50, 0, 60, 10), (5, 0, 15, 10)), True),
        # A missing box on the annotated (IoU 9/11) or the predicted box (IoU 2/3) of a wrong class.
        (("class", 0, (6, 0, 16, 10), (0, 0, 10, 10)), ("missing", None, (1, 0, 11, 10)), True),
        (("class", 0, (0, 0, 10, 10), (6, 0, 16, 10)), ("missing", None, (2, 0, 12, 10)), True),
        # IoU of exactly 1/2, then just below.
        (("missing", None, (0, 0, 10, 10)), ("location", 0, (0, 0, 10, 5)), True),
        (("missing", None, (0, 0, 10, 10)), ("location", 0, (0, 0, 10, 4.9)), False),
        # Two annotated objects that overlap, each with a prediction of another class.
        (("class", 0, (0, 0, 10, 10)), ("class", 1, (1, 0, 11, 10)), False),
    ],
)
def test_suspects_of_one_object_exclude_each_other(first, second, is_one):
    def suspect(image, kind, annotation, box, correction=None):
        return Suspect(kind, image, 0.5, annotation, box, 1, correction or box)

    for order in ((first, second), (second, first)):
        pair = [suspect(0, *one) for one in order]
        assert keep_one_per_object(pair) == (pair[:1] if is_one else pair)
        apart = [suspect(image, *one) for image, one in enumerate(order)]
        assert keep_one_per_object(apart) == apart
