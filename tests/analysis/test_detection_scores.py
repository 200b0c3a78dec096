# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's figures as arrays: by hand, without boxes or detections, and by either library."""

import copy
import math

import numpy as np
import pytest
import torch

from qbheat_det.analysis.detection_scores import average_over_classes, score_detections
from tests.analysis.detection_cases import draw_case, make_found, make_truth

LIBRARIES = ("pycocotools", "faster-coco-eval")
A, B, C = [0, 0, 20, 20], [50, 50, 90, 90], [0, 60, 20, 80]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    if request.param == "faster-coco-eval":
        pytest.importorskip("faster_coco_eval")
    return str(request.param)


def test_ap_and_the_curve_are_those_of_the_hand(library: str) -> None:
    truth = make_truth([(1, 3, A), (1, 3, B)])
    found = make_found([(1, 3, A, 0.9), (1, 3, C, 0.8), (1, 3, B, 0.7)])
    scores = score_detections(truth, found, library=library)
    # Right, wrong, right: precision 1 up to recall 1/2, and 2/3 up to 1; of 101 recalls, 51 are
    # at most 1/2.
    by_hand = 100 * (51 + 50 * 2 / 3) / 101
    for key in ("AP", "AP50", "AP75"):
        assert scores.summary[key] == pytest.approx(by_hand)
    expected = torch.tensor([1.0] * 51 + [2 / 3] * 50, dtype=torch.float64)
    torch.testing.assert_close(torch.from_numpy(scores.precision[0, :, 0]), expected)
    assert len(scores.recall) == 101
    assert scores.recall[50] == pytest.approx(0.5)


def test_sizes_are_those_of_the_boxes(library: str) -> None:
    truth = make_truth([(1, 3, A), (1, 3, B)])  # 20 x 20 is small, 40 x 40 medium
    scores = score_detections(truth, make_found([(1, 3, B, 0.9)]), library=library)
    assert scores.num_of_size == {"APs": 1, "APm": 1, "APl": 0}
    assert scores.summary["APs"] == 0
    assert scores.summary["APm"] == pytest.approx(100)
    assert math.isnan(scores.summary["APl"])


def test_a_class_without_boxes_has_no_ap_and_is_in_no_mean(library: str) -> None:
    truth = make_truth([(1, 7, A)])
    scores = score_detections(truth, make_found([(1, 7, A, 0.9), (1, 3, B, 0.8)]), library=library)
    assert math.isnan(scores.class_ap[0])
    assert scores.class_ap[1] == pytest.approx(100)
    assert scores.summary["AP"] == pytest.approx(100)
    assert scores.num_boxes.tolist() == [0, 1]
    torch.testing.assert_close(
        torch.from_numpy(average_over_classes(scores.precision[0])),
        torch.ones(101, dtype=torch.float64),
    )


def test_without_detections_ap_is_zero_where_there_are_boxes(library: str) -> None:
    scores = score_detections(make_truth([(1, 3, A)]), [], library=library)
    assert scores.summary["AP"] == 0
    assert scores.class_ap[0] == 0
    assert math.isnan(scores.class_ap[1])


def test_without_boxes_everything_is_nan(library: str) -> None:
    scores = score_detections(make_truth([]), make_found([(1, 3, A, 0.9)]), library=library)
    assert all(math.isnan(value) for value in scores.summary.values())
    assert np.isnan(average_over_classes(scores.precision[0])).all()


def test_a_detection_on_a_crowd_counts_neither_way(library: str) -> None:
    truth = make_truth([(1, 3, A), (1, 3, B)], crowds=[1])
    found = make_found([(1, 3, A, 0.5), (1, 3, [60, 60, 80, 80], 0.9)])
    scores = score_detections(truth, found, library=library)
    assert scores.summary["AP"] == pytest.approx(100)
    assert scores.num_boxes.tolist() == [1, 0]


def test_both_libraries_give_the_same_and_change_nothing() -> None:
    pytest.importorskip("faster_coco_eval")
    truth, found = draw_case(0)
    before = copy.deepcopy((truth, found))
    one, other = (score_detections(truth, found, library=library) for library in LIBRARIES)
    assert (truth, found) == before
    assert one.summary == pytest.approx(other.summary, nan_ok=True)
    for name in ("class_ap", "class_ap50", "precision", "recall"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-9)
