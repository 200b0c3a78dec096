# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's metrics as arrays: against arithmetic by hand, without boxes, without detections."""

import copy
import math
from typing import Any

import numpy as np
import pytest

from qbheat_det.analysis.detection_charts import (
    plot_ap_by_class,
    plot_ap_by_size,
    plot_class_precision_recall,
    plot_precision_recall,
    rank_classes,
)
from qbheat_det.analysis.detection_scores import (
    DetectionScores,
    average_over_classes,
    evaluate_boxes,
    score_detections,
)
from tests.analysis.detection_cases import draw_case, make_found, make_truth

A, B, C = [0, 0, 20, 20], [50, 50, 90, 90], [0, 60, 20, 80]


def score(truth: dict[str, Any], found: list[dict[str, Any]]) -> DetectionScores:
    return score_detections(evaluate_boxes(truth, found))


def test_ap_and_precision_are_those_computed_by_hand() -> None:
    truth = make_truth([(1, 3, A), (1, 3, B)])
    scores = score(truth, make_found([(1, 3, A, 0.9), (1, 3, C, 0.8), (1, 3, B, 0.7)]))
    # Correct, wrong, correct: precision 1 up to recall 1/2, and 2/3 up to 1; 51 of 101 recalls
    # are at most 1/2.
    for key in ("AP", "AP50", "AP75"):
        assert scores.summary[key] == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)
    np.testing.assert_allclose(scores.precision[0, :, 0], [1.0] * 51 + [2 / 3] * 50)
    assert scores.class_ap50[0] == pytest.approx(scores.summary["AP50"])
    assert scores.recall[50] == pytest.approx(0.5)


def test_sizes_classes_and_crowds_count_as_in_coco() -> None:
    truth = make_truth([(1, 7, A), (1, 7, B), (1, 3, C)], crowds=[2])
    scores = score(truth, make_found([(1, 7, B, 0.9), (1, 3, [2, 62, 18, 78], 0.8)]))
    assert scores.summary["APs"] == 0  # 20 x 20 is small, 40 x 40 medium
    assert scores.summary["APm"] == pytest.approx(100)
    assert math.isnan(scores.summary["APl"])
    assert math.isnan(scores.class_ap[0])  # only a crowd
    assert scores.class_ap[1] == pytest.approx(100 * 51 / 101)
    assert scores.summary["AP"] == pytest.approx(scores.class_ap[1])
    assert scores.num_boxes.tolist() == [0, 2]
    expected = [1.0] * 51 + [0.0] * 50
    np.testing.assert_allclose(average_over_classes(scores.precision[0]), expected)


def test_without_detections_ap_is_zero_and_without_boxes_everything_is_nan() -> None:
    scores = score(make_truth([(1, 3, A)]), [])
    assert (scores.summary["AP"], scores.class_ap[0]) == (0, 0)
    assert math.isnan(scores.class_ap[1])
    scores = score(make_truth([]), make_found([(1, 3, A, 0.9)]))
    assert all(math.isnan(value) for value in scores.summary.values())
    assert np.isnan(average_over_classes(scores.precision[0])).all()


def test_faster_coco_eval_agrees_and_the_input_is_not_changed() -> None:
    library = pytest.importorskip("faster_coco_eval")
    truth, found = draw_case(0)
    before = copy.deepcopy((truth, found))
    evaluator = evaluate_boxes(truth, found)
    assert (truth, found) == before
    other = library.COCO()
    other.dataset = evaluator.cocoGt.dataset
    other.createIndex()
    reference = library.COCOeval_faster(other, other.loadRes(copy.deepcopy(found)), "bbox")
    for step in (reference.evaluate, reference.accumulate, reference.summarize):
        step()
    ours = list(score_detections(evaluator).summary.values())
    np.testing.assert_allclose(np.nan_to_num(ours, nan=-100) / 100, reference.stats[:6], atol=1e-9)


def test_charts_of_two_runs_show_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = make_truth([(1, 3, A), (1, 7, B)])
    scores = {
        "_good$": score(truth, make_found([(1, 3, A, 0.9), (1, 7, B, 0.8)])),
        "half": score(truth, make_found([(1, 7, B, 0.8)])),
    }
    assert rank_classes(scores) == [1, 0]
    bars = plot_ap_by_class(scores, ["eel", "ray"]).axes[0]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["ray (1)", "eel (1)"]
    widths = [[bar.get_width() for bar in group] for group in bars.containers]
    np.testing.assert_allclose(widths, [[100, 100], [100, 0]])
    heights = [bar.get_height() for bar in plot_ap_by_size(scores).axes[0].containers[1]]
    np.testing.assert_allclose(heights[:4], [50, 50, 50, 0])
    chart = plot_precision_recall(scores)
    lines = chart.axes[0].get_lines()
    np.testing.assert_allclose(lines[1].get_ydata(), 0.5)
    assert [text.get_text() for text in chart.legends[0].get_texts()] == [r" _good\$", "half"]
    assert len(plot_class_precision_recall(scores, ["eel", "ray"]).axes) == 3  # one is empty
    monkeypatch.setattr("qbheat_det.analysis.detection_charts.MOST_BARS", 1)
    assert len(rank_classes(scores)) <= 2
