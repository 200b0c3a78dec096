# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's figures of detections as arrays: AP by size and class, precision over recall.

All of it is read out of pycocotools' or faster-coco-eval's ``COCOeval``, with its ten IoU
thresholds from 0.50 to 0.95, 101 recalls, three ranges of areas, and 100 detections an image of
each class at most.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qbheat_det.evaluation import complete_annotations, resolve_coco_library

Array = npt.NDArray[np.float64]
Entry = Mapping[str, Any]

SIZES = {"APs": "small", "APm": "medium", "APl": "large"}
"""COCO's ranges of areas: below 32² pixels, below 96², and above."""
DRAWN_IOUS = (0.5, 0.75)
"""IoU thresholds of which precision over recall is kept."""


@dataclass(frozen=True)
class DetectionScores:
    """What COCO says of a set of detections; nan where there is no box of ground truth.

    Attributes:
        summary: "AP", "AP50", "AP75", "APs", "APm", "APl", in per cent.
        class_ap: (K,), over all thresholds, in per cent.
        class_ap50: (K,), at IoU 0.50.
        num_boxes: (K,), boxes of ground truth that are no crowds.
        num_of_size: boxes that are "APs", "APm" and "APl".
        recall: (R,), in [0, 1].
        precision: (2, R, K), in [0, 1], at the thresholds of ``DRAWN_IOUS``.
    """

    summary: dict[str, float]
    class_ap: Array
    class_ap50: Array
    num_boxes: npt.NDArray[np.int64]
    num_of_size: dict[str, int]
    recall: Array
    precision: Array


def score_detections(
    ground_truth: Entry, detections: Sequence[Entry], *, library: str = "auto"
) -> DetectionScores:
    """Evaluates boxes as COCO does. Without a detection, AP is 0 wherever there are boxes.

    Args:
        ground_truth: content of an annotation file; not changed. K categories, by their ids.
        detections: COCO's results, "image_id", "category_id" of the file, "bbox" (XYWH, pixels)
            and "score" each.
        library: as ``TEST.COCO_EVAL_LIBRARY``; both give the same figures.

    Raises:
        UserError: the library is unknown or not installed.
    """
    evaluator = _build(ground_truth, detections, resolve_coco_library(library))
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator.evaluate()
        evaluator.accumulate()
    # (T, R, K, A, M) thresholds, recalls, classes, ranges of areas, limits of detections; of the
    # latter two all and 100 come first and last.
    precision = np.array(evaluator.eval["precision"], dtype=np.float64)[..., -1]
    precision[precision < 0] = np.nan  # COCO's mark of a class without boxes
    ious, recall = np.asarray(evaluator.params.iouThrs), np.asarray(evaluator.params.recThrs)
    at = [int(np.argmin(np.abs(ious - iou))) for iou in DRAWN_IOUS]
    summary = {
        "AP": _mean(precision[..., 0]),
        "AP50": _mean(precision[at[0], ..., 0]),
        "AP75": _mean(precision[at[1], ..., 0]),
        **{key: _mean(precision[..., area]) for area, key in enumerate(SIZES, start=1)},
    }
    num_boxes, num_of_size = _count_boxes(ground_truth, evaluator.params)
    classes = range(precision.shape[2])
    return DetectionScores(
        summary=summary,
        class_ap=np.array([_mean(precision[:, :, k, 0]) for k in classes]),
        class_ap50=np.array([_mean(precision[at[0], :, k, 0]) for k in classes]),
        num_boxes=num_boxes,
        num_of_size=num_of_size,
        recall=recall,
        precision=precision[at, :, :, 0],
    )


def average_over_classes(precision: Array) -> Array:
    """From precision (R, K) to its mean over the classes that have boxes, (R,)."""
    with warnings.catch_warnings():  # no class at all has boxes
        warnings.simplefilter("ignore", category=RuntimeWarning)
        return np.asarray(np.nanmean(precision, axis=1))


def open_coco(library: Any, content: Entry) -> Any:
    """Returns a copy of an annotation file's content as a library's ``COCO``, ready to be used.

    Annotations are numbered from 1 in their order, since some ids mean "unmatched" to COCO.

    Args:
        library: module that has ``COCO``.
        content: may lack what evaluation can do without: "iscrowd", "area", "info".
    """
    copied = {key: value for key, value in content.items() if key != "annotations"}
    copied["annotations"] = [dict(entry) for entry in content.get("annotations", [])]
    complete_annotations(copied)
    coco = library.COCO()
    coco.dataset = copied
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def open_detections(coco: Any, library: Any, detections: Sequence[Entry]) -> Any:
    """Returns COCO's results beside ``open_coco``'s; they are numbered from 1 in their order."""
    if not detections:  # loadRes looks at the first
        return open_coco(library, {**coco.dataset, "annotations": []})
    with contextlib.redirect_stdout(io.StringIO()):
        return coco.loadRes([dict(found) for found in detections])  # it writes into them


def _build(ground_truth: Entry, detections: Sequence[Entry], name: str) -> Any:
    if name == "faster-coco-eval" and detections:
        import faster_coco_eval as library

        coco = open_coco(library, ground_truth)
        found = open_detections(coco, library, detections)
        return library.COCOeval_faster(coco, found, "bbox")
    from pycocotools import coco as module
    from pycocotools.cocoeval import COCOeval

    coco = open_coco(module, ground_truth)
    return COCOeval(coco, open_detections(coco, module, detections), "bbox")


def _mean(precision: Array) -> float:
    known = precision[~np.isnan(precision)]
    return 100 * float(known.mean()) if known.size else float("nan")


def _count_boxes(ground_truth: Entry, params: Any) -> tuple[npt.NDArray[np.int64], dict[str, int]]:
    """Returns (K,) boxes of each class, and those of each range of areas."""
    boxes = [a for a in ground_truth.get("annotations", []) if not a.get("iscrowd", 0)]
    place = {category: k for k, category in enumerate(params.catIds)}
    classes = [place[box["category_id"]] for box in boxes]
    areas = np.array([box.get("area", box["bbox"][2] * box["bbox"][3]) for box in boxes])
    of_size = {
        key: int(((areas >= low) & (areas <= high)).sum())
        for key, (low, high) in zip(SIZES, params.areaRng[1:], strict=True)
    }
    return np.bincount(np.array(classes, dtype=np.int64), minlength=len(place)), of_size
