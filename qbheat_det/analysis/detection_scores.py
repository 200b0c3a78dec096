# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's metrics of detections as arrays: AP by size and class, precision over recall.

pycocotools computes all of it, with its ten IoU thresholds from 0.50 to 0.95, 101 recalls, three
ranges of areas, and at most 100 detections per image and class.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from qbheat_det.evaluation import complete_annotations

Array = npt.NDArray[np.float64]
Entry = Mapping[str, Any]

SIZES = {"APs": "small", "APm": "medium", "APl": "large"}
"""COCO's ranges of areas: below 32² pixels, below 96², and above."""
CURVE_IOUS = (0.5, 0.75)
"""IoU thresholds whose precision-recall curves are kept."""


@dataclass(frozen=True)
class DetectionScores:
    """COCO's metrics of a set of detections; nan where there are no boxes of ground truth.

    Attributes:
        summary: "AP", "AP50", "AP75", "APs", "APm", "APl", in percent.
        class_ap: (K,), averaged over all IoU thresholds, in percent.
        class_ap50: (K,), at IoU 0.50, in percent.
        num_boxes: (K,), boxes of ground truth, without crowds.
        recall: (R,), in [0, 1].
        precision: (2, R, K), in [0, 1], at ``CURVE_IOUS``.
    """

    summary: dict[str, float]
    class_ap: Array
    class_ap50: Array
    num_boxes: npt.NDArray[np.int64]
    recall: Array
    precision: Array


def evaluate_boxes(ground_truth: Entry, detections: Sequence[Entry]) -> Any:
    """Matches detections with ground truth as COCO does.

    Args:
        ground_truth: content of an annotation file, which is not changed. It may lack what the
            evaluation can do without: "iscrowd", "area", "info".
        detections: COCO's results: "image_id", "category_id" of the file, "bbox" (XYWH, pixels)
            and "score" each.

    Returns:
        An accumulated ``pycocotools.cocoeval.COCOeval``. Its annotations and detections are
        numbered from 1 in their order, since id 0 means "unmatched" to pycocotools.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        coco = _index(ground_truth)
        if detections:  # loadRes reads the first entry
            found = coco.loadRes([dict(entry) for entry in detections])
        else:
            found = _index({**coco.dataset, "annotations": []})
        evaluator = COCOeval(coco, found, "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
    return evaluator


def score_detections(evaluator: Any) -> DetectionScores:
    """Reads the metrics of ``evaluate_boxes``. Without detections, AP is 0 wherever boxes are."""
    # (T, R, K, A, M): thresholds, recalls, classes, ranges of areas (the first is all), limits of
    # detections (the last is 100).
    precision = np.array(evaluator.eval["precision"], dtype=np.float64)[..., -1]
    precision[precision < 0] = np.nan  # COCO's mark of a class without boxes
    thresholds = np.asarray(evaluator.params.iouThrs)
    curves = [int(np.argmin(np.abs(thresholds - iou))) for iou in CURVE_IOUS]
    sizes = {key: _mean(precision[..., area]) for area, key in enumerate(SIZES, start=1)}
    classes = [entry["category_id"] for entry in evaluator.cocoGt.anns.values()
               if not entry["iscrowd"]]  # fmt: skip
    return DetectionScores(
        summary={
            "AP": float(_mean(precision[..., 0])),
            "AP50": float(_mean(precision[curves[0], ..., 0])),
            "AP75": float(_mean(precision[curves[1], ..., 0])),
            **{key: float(value) for key, value in sizes.items()},
        },
        class_ap=_mean(precision[..., 0], axis=(0, 1)),
        class_ap50=_mean(precision[curves[0], ..., 0], axis=0),
        num_boxes=np.array([classes.count(k) for k in evaluator.params.catIds], dtype=np.int64),
        recall=np.asarray(evaluator.params.recThrs),
        precision=precision[curves, :, :, 0],
    )


def average_over_classes(precision: Array) -> Array:
    """Returns the mean (R,) of precision (R, K) over the classes that have boxes."""
    return _mean(precision, axis=1) / 100


def _index(content: Entry) -> COCO:
    coco = COCO()
    copied = {key: value for key, value in content.items() if key != "annotations"}
    copied["annotations"] = [dict(entry) for entry in content.get("annotations", [])]
    complete_annotations(copied)
    coco.dataset = copied
    coco.createIndex()
    return coco


def _mean(values: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Returns the mean in percent of what is not nan; nan where all is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)
        return np.asarray(100 * np.nanmean(values, axis=axis))
