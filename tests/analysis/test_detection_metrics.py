# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Metrics and error types: by hand, against a naive matching and another library."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qbheat_det.analysis.detection_metrics import (
    IGNORED,
    MISSED,
    DetectionErrors,
    DetectionScores,
    choose_threshold,
    count_errors,
    evaluate_boxes,
    find_errors,
    find_false_alarms,
    find_missed_boxes,
    score_detections,
)

A, B, C = [0, 0, 20, 20], [50, 50, 90, 90], [0, 60, 20, 80]
FAR = [60, 60, 70, 70]
Found = Sequence[tuple[int, int, Sequence[float], float]]


def make_truth(
    boxes: Sequence[tuple[int, int, Sequence[float]]], crowds: Sequence[int] = ()
) -> dict[str, Any]:
    """An annotation file with boxes of image id, category id and XYXY; ids count from 0."""
    return {
        "images": [{"id": i, "width": 100, "height": 100, "file_name": ""} for i in range(1, 5)],
        "categories": [{"id": k, "name": f"class{k}"} for k in (3, 7)],
        "annotations": [
            {"id": i, "image_id": image, "category_id": k, "bbox": to_xywh(xyxy),
             "iscrowd": int(i in crowds)}
            for i, (image, k, xyxy) in enumerate(boxes)
        ],
    }  # fmt: skip


def make_found(boxes: Found) -> list[dict[str, Any]]:
    """Results in COCO's format from image id, category id, XYXY and score each."""
    return [{"image_id": i, "category_id": k, "bbox": to_xywh(xyxy), "score": score}
            for i, k, xyxy, score in boxes]  # fmt: skip


def to_xywh(xyxy: Sequence[float]) -> list[float]:
    x0, y0, x1, y1 = xyxy
    return [x0, y0, x1 - x0, y1 - y0]


def draw_case(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Random boxes of two classes in four images, with crowds, and detections about them."""
    rng = np.random.default_rng(seed)

    def box() -> list[float]:
        start = rng.uniform(0, 60, 2)
        return [*start, *(start + rng.uniform(10, 40, 2))]

    true = [(int(rng.integers(1, 4)), int(rng.choice([3, 7])), box()) for _ in range(14)]
    found = []
    for image, category, corners in true * 3:
        moved = np.array(corners) + rng.normal(0, 4, 4)
        category = category if rng.uniform() < 0.7 else int(rng.choice([3, 7]))
        # Few different scores: many are equal.
        found.append((image, category, moved.tolist(), float(rng.integers(1, 9)) / 8))
    found += [(int(rng.integers(1, 5)), 3, box(), 0.5) for _ in range(10)]  # image 4 has no boxes
    return make_truth(true, crowds=(0, 5)), make_found(found)


def score(truth: dict[str, Any], found: Found) -> DetectionScores:
    return score_detections(evaluate_boxes(truth, make_found(found)))


def judge(truth: dict[str, Any], found: list[dict[str, Any]]) -> DetectionErrors:
    return find_errors(evaluate_boxes(truth, found))


def test_ap_and_precision_are_those_computed_by_hand() -> None:
    scores = score(make_truth([(1, 3, A), (1, 3, B)]),
                   [(1, 3, A, 0.9), (1, 3, C, 0.8), (1, 3, B, 0.7)])  # fmt: skip
    # Correct, wrong, correct: precision 1 up to recall 1/2, and 2/3 up to 1; 51 of 101 recalls
    # are at most 1/2.
    for key in ("AP", "AP50", "AP75"):
        assert scores.summary[key] == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)
    np.testing.assert_allclose(scores.precision, [[1.0] * 51 + [2 / 3] * 50] * 2)
    assert scores.recall[50] == pytest.approx(0.5)
    # IoU 0.52 with B and 0.77 with A: correct at 0.50 alone, and at 0.50 and 0.75.
    loose = score(make_truth([(1, 3, B), (2, 3, A)]),
                  [(1, 3, [50, 50, 70.8, 90], 0.9), (2, 3, [0, 0, 15.4, 20], 0.8)])  # fmt: skip
    assert loose.precision[0].min() == 1.0
    assert loose.precision[1].max() == pytest.approx(0.5)

    nothing = score(make_truth([]), [(1, 3, A, 0.9)])
    assert all(math.isnan(value) for value in nothing.summary.values())
    assert score(make_truth([(1, 3, A)]), []).summary["AP"] == 0


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
    """One detection after another, one box after another."""
    kinds = [""] * len(found)
    taken: set[int] = set()
    for d in sorted(range(len(found)), key=lambda d: -found[d]["score"]):  # stable
        boxes = [a for a in truth["annotations"] if a["image_id"] == found[d]["image_id"]]
        own = [a for a in boxes if a["category_id"] == found[d]["category_id"]]
        iou = {a["id"]: _iou(found[d]["bbox"], a["bbox"]) for a in boxes if not a["iscrowd"]}
        free = [a["id"] for a in own if a["id"] not in taken and iou.get(a["id"], 0) >= 0.5]
        if free:
            taken.add(max(free, key=iou.__getitem__))
            kinds[d] = "correct"
        elif any(_is_on_crowd(found[d]["bbox"], a["bbox"]) for a in own if a["iscrowd"]):
            kinds[d] = IGNORED
        else:
            kinds[d] = "false alarm" if max(iou.values(), default=0) <= 0.1 else "other"
    return kinds


@pytest.mark.parametrize("seed", range(3))
def test_types_are_those_of_a_naive_matching_and_the_threshold_has_the_best_f1(seed: int) -> None:
    truth, found = draw_case(seed)
    judged = judge(truth, found)
    expected = _judge_naively(truth, found)
    assert judged.types.tolist() == expected
    assert {"correct", "other", IGNORED} < set(expected)

    def f1(threshold: float) -> float:
        kept = (judged.scores >= threshold) & (judged.types != IGNORED)
        num_correct = int((judged.types[kept] == "correct").sum())
        return 2 * num_correct / (int(kept.sum()) + len(judged.matches))

    candidates = sorted(set(judged.scores.tolist()), reverse=True)
    assert choose_threshold(judged) == max(candidates, key=f1)  # the highest of equal ones


def test_types_and_thresholds_by_hand() -> None:
    truth = make_truth([(1, 3, A), (1, 7, B), (1, 3, C)])
    found = make_found([
        (1, 3, A, 0.9),  # correct
        (1, 3, [0, 0, 20, 18], 0.8),  # IoU 0.9 with A, which is taken
        (1, 3, B, 0.7),  # of class 7
        (1, 3, [0, 60, 20, 68], 0.6),  # 8 of C's 20 rows: IoU 0.4
        (1, 7, [80, 0, 95, 15], 0.4),
    ])  # fmt: skip
    judged = judge(truth, found)
    assert judged.types.tolist() == ["correct", "other", "other", "other", "false alarm"]
    assert judged.matches.tolist() == [0, -1, -1]
    counts = {"correct": 1, "false alarm": 1, "other": 3, MISSED: 2}
    assert count_errors(judged, 0.0) == counts
    assert find_false_alarms(judged, 0.45).tolist() == []
    assert find_false_alarms(judged, 0.0).tolist() == [4]
    assert find_missed_boxes(judged, 0.0).tolist() == [1, 2]  # the larger first
    assert find_missed_boxes(judged, 0.95).tolist() == [1, 0, 2]

    truth = make_truth([(1, 3, A), (1, 7, B)])
    wrong = [(1, 7, A, 0.03), (1, 3, FAR, 0.02), (1, 3, [80, 60, 90, 70], 0.01)]
    assert choose_threshold(judge(truth, make_found(wrong))) == 0.02
    assert choose_threshold(judge(truth, make_found(wrong[:1]))) == 0.03
    assert choose_threshold(judge(truth, [])) == 0.5
    # Beyond a hundred detections of an image and class none counts.
    many = [(1, 3, A, 1 - i / 1000) for i in range(103)]
    types = judge(make_truth([(1, 3, A)]), make_found(many)).types.tolist()
    assert types == ["correct"] + ["other"] * 99 + [IGNORED] * 3
