# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Suspects of wrong labels by hand, and one for each object."""

import numpy as np
import pytest
import torch

from qbheat_det.labelling.appearance import Judgement, Judgements, shift_boxes
from qbheat_det.labelling.labels import ImageBoxes
from qbheat_det.labelling.suspects import (
    Suspect,
    compare_places,
    estimate_precision,
    find_duplicates,
    find_suspects,
    keep_one_per_object,
    nearness,
    similarity,
)

CLASSES = (1, 2)
SIZE = 10


def boxes(*rows):
    """Returns boxes from rows x0, y0, x1, y1, class and, of predictions, score."""
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(rows[0]) if rows else 6)
    scores = table[:, 5] if table.shape[1] > 5 else torch.ones(len(table), dtype=torch.float64)
    return ImageBoxes(table[:, :4], table[:, 4].long(), scores)


def judge(own, truth):
    """Returns what features say that know the objects ``truth``: the class and the fit of boxes."""
    logs = torch.full((len(own.boxes), len(CLASSES)), 0.5).log()
    misfit = torch.full((len(own.boxes),), 2.0)
    for row, box in enumerate(own.boxes):
        for target, label in zip(truth.boxes, truth.classes, strict=True):
            if (box - target).abs().max() < 2:
                logs[row] = torch.tensor([0.1, 0.1]).log()
                logs[row, int(label) - 1] = np.log(0.9)
                misfit[row] = -2.0
    return Judgement(logs.double(), misfit.double())


def judge_all(annotations, predictions, truth):
    copies = [
        shift_boxes(own, np.random.default_rng(index)) for index, own in enumerate(annotations)
    ]
    groups = (annotations, copies, predictions)
    judged = [
        [judge(own, right) for own, right in zip(group, truth, strict=True)] for group in groups
    ]
    return Judgements(*judged, copies)


def make_truth(num_images=20):
    """Returns images with an object of class 1 and one of class 2, at random places."""
    generator = np.random.default_rng(0)
    images = []
    for _ in range(num_images):
        x, y = generator.integers(0, 20, 2)
        images.append(boxes((x, y, x + SIZE, y + SIZE, 1), (x + 40, y, x + 40 + SIZE, y + SIZE, 2)))
    return images


def predict(truth):
    """Returns detectors' boxes: all objects, and two unsure ones on the background."""
    predictions = []
    for own in truth:
        scores = torch.tensor([0.9, 0.8, 0.1, 0.05], dtype=torch.float64)
        places = torch.cat([own.boxes + 0.5, own.boxes + 60])
        predictions.append(ImageBoxes(places, own.classes.repeat(2), scores))
    return predictions


def inspect(annotations, truth):
    predictions = predict(truth)
    judged = judge_all(annotations, predictions, truth)
    return find_suspects(annotations, predictions, judged, CLASSES, seed=0)


def change(image, *, box=None, label=None, keep=(0, 1)):
    """Returns a copy of ``image`` with another box or class of its object 1, or fewer objects."""
    places, classes = image.boxes.clone(), image.classes.clone()
    if box is not None:
        places[1] = torch.tensor(box, dtype=torch.float64)
    if label is not None:
        classes[1] = label
    rows = list(keep)
    return ImageBoxes(places[rows], classes[rows], image.scores[rows])


@pytest.mark.parametrize("kind", ["missing", "location", "class", "extra", "duplicate"])
def test_each_kind_of_error_comes_first(kind):
    truth = make_truth()
    right = truth[3]
    x0, y0, x1, y1 = right.boxes[1].tolist()
    if kind == "missing":
        wrong = change(right, keep=[0])
    elif kind == "location":  # without an overlap
        wrong = change(right, box=[x0 + 12, y0, x1 + 12, y1])
    elif kind == "class":
        wrong = change(right, label=1)
    else:
        place = [500, 500, 510, 510] if kind == "extra" else [x0 + 0.5, y0, x1 + 0.5, y1]
        added = boxes((*place, 1))
        wrong = ImageBoxes(*(torch.cat(pair) for pair in zip(right, added, strict=True)))
    annotations = [*truth[:3], wrong, *truth[4:]]
    first, *others = inspect(annotations, truth)
    assert (first.kind, first.image) == (kind, 3)
    assert all(other.score < first.score / 2 for other in others)
    if kind in ("missing", "location"):
        assert first.box == tuple((right.boxes[1] + 0.5).tolist())
    if kind == "class":
        assert (first.annotation, first.label) == (1, 2)
    if kind == "duplicate":
        assert first.annotation == 2  # its class does not fit


def test_labels_without_errors_have_no_probable_suspect():
    truth = make_truth()
    assert all(suspect.score < 0.1 for suspect in inspect(truth, truth))


def test_images_without_boxes_or_predictions():
    none = boxes()
    truth = [none, *make_truth(5)]
    empty = [none] * 6
    judged = judge_all(truth, empty, truth)
    found = find_suspects(truth, empty, judged, CLASSES, seed=0)
    assert all(suspect.kind in ("class", "extra") for suspect in found)
    judged = judge_all(empty, empty, truth)
    assert find_suspects(empty, empty, judged, CLASSES, seed=0) == []


def test_duplicates_are_pairs_with_a_high_overlap():
    # IoU 9/10 of the first two, 1/2 of the third with the first.
    own = boxes((0, 0, 10, 10, 1), (0, 0, 10, 9, 1), (0, 0, 10, 5, 1))
    logs = torch.tensor([[0.8, 0.2]] * 3).log()
    judged = Judgements([Judgement(logs, torch.tensor([1.0, -1.0, 5.0]))], [], [], [])
    (suspect,) = find_duplicates([own], judged, CLASSES)
    assert (suspect.annotation, suspect.label, suspect.score) == (0, 1, pytest.approx(0.9))


def test_a_box_is_not_moved_to_the_object_of_another_annotation():
    # The prediction overlaps the first box with an IoU of 3/7, and the second one with 1.
    truth = boxes((0, 0, 20, 20, 1), (8, 0, 28, 20, 1))
    only = boxes((8, 0, 28, 20, 1, 0.9))
    judged = Judgement(torch.zeros(2, 2), torch.zeros(2))
    evidence, targets = compare_places(truth, truth, only, judged)
    assert targets == [None, None]
    support = torch.tensor([0.9 * 3 / 7, 0.9], dtype=torch.float64)
    torch.testing.assert_close(evidence[:, 2], support)
    assert evidence[0, 4] == 0
    # A prediction without an overlap is a target if no other box has it. 24 px: d = 24 / 16.
    apart = boxes((-24, 0, -4, 20, 1, 0.8))
    evidence, targets = compare_places(truth, truth, apart, judged)
    assert targets == [0, 0]
    assert float(evidence[0, 4]) == pytest.approx(0.8 * np.exp(-(1.5**2) / 2))


def test_precision_is_that_of_class_and_size():
    # Of class 1, small predictions are right, and large ones wrong. All scores are equal.
    truth = [boxes((0, 0, 10, 10, 1), (50, 50, 60, 60, 2))] * 30
    seen = [boxes((0, 0, 10, 10, 1, 0.5), (100, 100, 200, 200, 1, 0.5))] * 30
    for small, large in estimate_precision(truth, seen, CLASSES):
        assert small > 2
        assert large < -2


def test_similarity_and_nearness_by_hand():
    first, second = torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4]])
    # Side by side: no overlap, centres 4 apart, a diagonal of sqrt(8^2 + 4^2).
    expected = torch.tensor([[1.0, 0.1 * (1 - 4 / 80**0.5)]])
    torch.testing.assert_close(similarity(first, second), expected)
    wide = torch.tensor([[0.0, 0, 8, 4]])  # center 2 px away, twice the area
    expected = torch.tensor([[np.exp(-((2 / 3.2) ** 2) / 2) / 2]], dtype=torch.float32)
    torch.testing.assert_close(nearness(first, wide), expected)


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        # Two annotations with the same predicted box.
        (("location", 0, (0, 0, 10, 10)), ("location", 1, (0, 0, 10, 10)), True),
        # One annotation with two boxes.
        (("location", 0, (0, 0, 10, 10)), ("class", 0, (50, 0, 60, 10)), True),
        # A missing box on the annotated box of a wrong class (IoU 9/11).
        (("class", 0, (0, 0, 10, 10)), ("missing", None, (1, 0, 11, 10)), True),
        # IoU of exactly 1/2, then just below.
        (("missing", None, (0, 0, 10, 10)), ("location", 0, (0, 0, 10, 5)), True),
        (("missing", None, (0, 0, 10, 10)), ("location", 0, (0, 0, 10, 4.9)), False),
        # Two annotated objects that overlap.
        (("class", 0, (0, 0, 10, 10)), ("class", 1, (1, 0, 11, 10)), False),
        (("extra", 0, (0, 0, 10, 10)), ("class", 1, (1, 0, 11, 10)), False),
    ],
)
def test_suspects_of_one_object_exclude_each_other(first, second, is_one):
    def suspect(image, kind, annotation, box):
        return Suspect(kind, image, 0.5, annotation, box, 1)

    for order in ((first, second), (second, first)):
        pair = [suspect(0, *one) for one in order]
        assert keep_one_per_object(pair) == (pair[:1] if is_one else pair)
        apart = [suspect(image, *one) for image, one in enumerate(order)]
        assert keep_one_per_object(apart) == apart
