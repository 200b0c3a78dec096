# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Error types: by hand, against a naive matching, and at any score."""

from typing import Any

import numpy as np
import pytest

from qbheat_det.analysis.detection_errors import (
    IGNORED,
    MISSED,
    DetectionErrors,
    choose_threshold,
    count_errors,
    find_best_cover,
    find_errors,
    find_false_alarms,
    find_missed_boxes,
)
from qbheat_det.analysis.detection_scores import evaluate_boxes
from tests.analysis.detection_cases import draw_case, make_found, make_truth

A, B, C = [0, 0, 20, 20], [50, 50, 90, 90], [0, 60, 20, 80]


def judge(truth: dict[str, Any], found: list[dict[str, Any]]) -> DetectionErrors:
    return find_errors(evaluate_boxes(truth, found))


def _iou(one: list[float], other: list[float]) -> float:
    """Of XYWH boxes, by their sides."""
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    return common / (one[2] * one[3] + other[2] * other[3] - common)


def _is_on_crowd(found: list[float], crowd: list[float]) -> bool:
    """COCO's overlap with a crowd is the share of the detection that lies in it."""
    width = min(found[0] + found[2], crowd[0] + crowd[2]) - max(found[0], crowd[0])
    height = min(found[1] + found[3], crowd[1] + crowd[3]) - max(found[1], crowd[1])
    return max(width, 0) * max(height, 0) >= 0.5 * found[2] * found[3]


def _judge_naively(truth: dict[str, Any], found: list[dict[str, Any]]) -> list[str]:
    """One detection after another, one box after another; TIDE's order of questions."""
    kinds = [""] * len(found)
    taken: set[int] = set()
    order = sorted(range(len(found)), key=lambda d: -found[d]["score"])  # stable
    for d in order:
        boxes = [a for a in truth["annotations"] if a["image_id"] == found[d]["image_id"]]
        plain = [a for a in boxes if not a["iscrowd"]]
        own = [a for a in plain if a["category_id"] == found[d]["category_id"]]
        other = [a for a in plain if a["category_id"] != found[d]["category_id"]]
        iou = {a["id"]: _iou(found[d]["bbox"], a["bbox"]) for a in plain}
        free = [a["id"] for a in own if a["id"] not in taken and iou[a["id"]] >= 0.5]
        highest_own = max((iou[a["id"]] for a in own), default=-1)
        highest_other = max((iou[a["id"]] for a in other), default=-1)
        if free:
            taken.add(max(free, key=iou.__getitem__))
            kinds[d] = "correct"
        elif any(
            a["iscrowd"]
            and a["category_id"] == found[d]["category_id"]
            and _is_on_crowd(found[d]["bbox"], a["bbox"])
            for a in boxes
        ):
            kinds[d] = IGNORED
        elif 0.1 <= highest_own < 0.5:
            kinds[d] = "localization"
        elif highest_other >= 0.5:
            kinds[d] = "classification"
        elif highest_own >= 0.5:
            kinds[d] = "duplicate"
        elif max(highest_own, highest_other) <= 0.1:
            kinds[d] = "background"
        else:
            kinds[d] = "both"
    return kinds


@pytest.mark.parametrize("seed", range(6))
def test_types_are_those_of_a_naive_matching(seed: int) -> None:
    truth, found = draw_case(seed)
    judged = judge(truth, found)
    expected = _judge_naively(truth, found)
    assert judged.types.tolist() == expected
    assert {"correct", "duplicate", IGNORED} < set(expected)


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.625, 2.0])
def test_types_above_a_score_do_not_depend_on_lower_scores(threshold: float) -> None:
    truth, found = draw_case(1)
    kept = [one for one in found if one["score"] >= threshold]
    all_counts = count_errors(judge(truth, found), threshold)
    assert all_counts == count_errors(judge(truth, kept), 0.0)


def test_each_type_by_hand() -> None:
    truth = make_truth([(1, 3, A), (1, 7, B), (1, 3, C)])
    found = make_found(
        [
            (1, 3, A, 0.9),  # correct
            (1, 3, [0, 0, 20, 18], 0.8),  # IoU 0.9 with A, which is taken
            (1, 3, B, 0.7),  # of class 7
            (1, 3, [0, 60, 20, 68], 0.6),  # 8 of C's 20 rows: IoU 0.4
            (1, 3, [70, 50, 110, 90], 0.5),  # half of B and as much again: IoU 1/3
            (1, 7, [80, 0, 95, 15], 0.4),
        ]
    )
    judged = judge(truth, found)
    assert judged.types.tolist() == [
        "correct", "duplicate", "classification", "localization", "both", "background",
    ]  # fmt: skip
    assert judged.nearest.tolist()[:5] == [0, 0, 1, 2, 1]
    np.testing.assert_allclose(judged.ious, [1, 0.9, 1, 0.4, 1 / 3, 0])
    assert judged.matches.tolist() == [0, -1, -1]
    counts = count_errors(judged, 0.0)
    assert counts == dict.fromkeys(counts, 1) | {MISSED: 0}
    # From 0.65 on, nothing tells of C any more.
    assert count_errors(judged, 0.65)[MISSED] == 1
    assert find_false_alarms(judged, 0.45).tolist() == [3, 4]
    assert find_false_alarms(judged, 0.0).tolist() == [3, 4, 5]


def test_of_equal_scores_the_earlier_detection_takes_the_box() -> None:
    truth = make_truth([(1, 3, A)])
    judged = judge(truth, make_found([(1, 3, [0, 0, 20, 15], 0.5), (1, 3, A, 0.5)]))
    assert judged.types.tolist() == ["correct", "duplicate"]


def test_a_crowd_is_no_box_and_what_lies_in_it_is_ignored() -> None:
    truth = make_truth([(1, 3, B)], crowds=[0])
    judged = judge(truth, make_found([(1, 3, [60, 60, 70, 70], 0.9)] * 2))
    assert judged.types.tolist() == [IGNORED, IGNORED]
    assert len(judged.matches) == 0
    assert sum(count_errors(judged, 0.0).values()) == 0
    assert find_false_alarms(judged, 0.0).tolist() == []
    # Another class's crowd is background.
    judged = judge(truth, make_found([(1, 7, [60, 60, 70, 70], 0.9)]))
    assert judged.types.tolist() == ["background"]


def test_beyond_a_hundred_detections_of_an_image_and_class_none_counts() -> None:
    found = make_found([(1, 3, A, 1 - i / 1000) for i in range(103)])
    judged = judge(make_truth([(1, 3, A)]), found)
    assert judged.types.tolist() == ["correct"] + ["duplicate"] * 99 + [IGNORED] * 3


def test_without_detections_all_boxes_are_missed_and_without_boxes_all_is_background() -> None:
    judged = judge(make_truth([(1, 3, A), (1, 7, B)]), [])
    assert count_errors(judged, 0.0)[MISSED] == 2
    assert choose_threshold(judged, default=0.3) == 0.3
    areas = {1: 100.0 * 100.0}
    assert find_missed_boxes(judged, 0.0, areas).tolist() == [1, 0]  # the larger first
    judged = judge(make_truth([]), make_found([(1, 3, A, 0.9)]))
    assert judged.types.tolist() == ["background"]
    assert judged.nearest.tolist() == [-1]
    assert find_missed_boxes(judged, 0.0, areas).tolist() == []


def test_without_a_correct_detection_as_many_detections_count_as_there_are_boxes() -> None:
    truth = make_truth([(1, 3, A), (1, 7, B)])
    wrong = [(1, 7, A, 0.03), (1, 3, [60, 60, 70, 70], 0.02), (1, 3, [80, 60, 90, 70], 0.01)]
    judged = judge(truth, make_found(wrong))
    assert judged.none_correct
    assert choose_threshold(judged) == 0.02
    assert len(find_false_alarms(judged, 0.02)) == 1
    assert choose_threshold(judge(truth, make_found(wrong[:1]))) == 0.03  # fewer
    assert not judge(truth, make_found([*wrong, (1, 3, A, 0.001)])).none_correct
    assert not judge(truth, []).none_correct


def test_missed_boxes_are_ordered_by_the_share_of_their_image() -> None:
    truth = make_truth([(1, 3, A), (2, 3, B)], num_images=2)
    judged = judge(truth, make_found([(1, 3, A, 0.4)]))
    areas = {1: 1_000.0, 2: 100_000.0}
    assert find_missed_boxes(judged, 0.5, areas).tolist() == [0, 1]
    assert find_missed_boxes(judged, 0.4, areas).tolist() == [1]


def test_the_best_cover_of_a_box_is_the_highest_score_of_any_class() -> None:
    truth = make_truth([(1, 3, A), (1, 3, B)])
    found = make_found([(1, 3, A, 0.2), (1, 7, [0, 0, 20, 15], 0.3), (1, 3, [0, 0, 20, 9], 0.9)])
    judged = judge(truth, found)
    best = find_best_cover(judged, 0)
    assert best is not None
    assert best == (1, pytest.approx(0.75))
    assert find_best_cover(judged, 1) is None


@pytest.mark.parametrize("seed", range(4))
def test_the_chosen_score_has_the_best_f1_of_all(seed: int) -> None:
    truth, found = draw_case(seed)
    judged = judge(truth, found)
    num_boxes = len(judged.matches)

    def f1(threshold: float) -> float:
        kept = (judged.scores >= threshold) & (judged.types != IGNORED)
        return 2 * int((judged.types[kept] == "correct").sum()) / (int(kept.sum()) + num_boxes)

    candidates = sorted(set(judged.scores.tolist()), reverse=True)
    best = max(candidates, key=f1)  # the first, thus the highest score, of equal ones
    assert choose_threshold(judged) == best
