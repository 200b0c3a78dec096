# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO metrics, and correct, wrong and missed boxes at IoU 0.50."""

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pycocotools.coco import COCO
from torchvision.ops import box_iou

from qbheat_det.evaluation import (
    FastMatching,
    choose_max_detections,
    complete_annotations,
    count_most_objects,
    ignore_unannotated,
)

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Entry = Mapping[str, Any]
"""A dict in COCO's format, such as an annotation or a detection."""

_MATCH_IOU = 0.5


@dataclass(frozen=True)
class DetectionScores:
    """COCO metrics. Values are nan for classes or sizes without ground truth.

    ``summary`` has "AP", "AP50", "AP75", "APs", "APm" and "APl" in percent. ``class_ap`` (K,) is
    the AP of each class, and ``num_boxes`` (K,) its number of boxes without crowds.
    """

    summary: dict[str, float]
    class_ap: Array
    num_boxes: Indices


@dataclass(frozen=True)
class Boxes:
    """B boxes of a dataset: image ids (B,), contiguous classes (B,), and XYXY in pixels (B, 4)."""

    image_ids: Indices
    classes: Indices
    xyxy: Array


@dataclass(frozen=True)
class DetectionErrors:
    """D detections, B ground-truth boxes without crowds, and their matches.

    COCO ignores a detection that overlaps a crowd of its class. It also keeps only the detections
    with the highest scores of each image and class: 100, or more if an image has more objects. It
    ignores detections without a box of classes that are not annotated in the image. Detections that
    are ignored or not kept are neither correct nor wrong.
    """

    detections: Boxes
    scores: Array  # (D,)
    correct: npt.NDArray[np.bool_]  # (D,)
    wrong: npt.NDArray[np.bool_]  # (D,)
    ground_truth: Boxes
    matches: Indices  # (B,), for each box the index of its correct detection (any score), or -1


def evaluate_boxes(ground_truth: Entry, detections: Sequence[Entry]) -> Any:
    """Matches detections with ground truth. Returns a ``COCOeval`` after ``accumulate()``.

    Args:
        ground_truth: content of an annotation file. "iscrowd" and "area" are optional.
        detections: COCO's results.

    The result numbers annotations and detections from 1, because pycocotools uses the id 0 for
    "unmatched".
    """
    with contextlib.redirect_stdout(io.StringIO()):
        coco = _index(ground_truth)
        if detections:
            results = coco.loadRes([dict(entry) for entry in detections])
        else:  # loadRes fails without entries
            results = _index({**coco.dataset, "annotations": []})
        pairs = [(entry["image_id"], entry["category_id"]) for entry in detections]
        coco = ignore_unannotated(coco, pairs)
        evaluator = FastMatching(coco, results, "bbox")
        num_objects = count_most_objects(coco.anns.values())
        evaluator.params.maxDets[-1] = choose_max_detections(num_objects)
        evaluator.evaluate()
        evaluator.accumulate()
    return evaluator


def _index(content: Entry) -> COCO:
    """Returns the ``COCO`` object of an annotation file's content, which does not change."""
    coco = COCO()
    annotations = [dict(entry) for entry in content["annotations"]]
    coco.dataset = {**content, "annotations": annotations}
    complete_annotations(coco.dataset)
    coco.createIndex()
    return coco


def score_detections(evaluator: Any) -> DetectionScores:
    """Computes metrics from the result of ``evaluate_boxes``.

    Classes that have boxes but no detections have AP 0.
    """
    # (T, R, K, A, M): IoU thresholds 0.50, 0.55, …, 0.95, recalls, classes, area ranges (all,
    # small, medium, large), and maximum numbers of detections, of which AP uses the last.
    precision = np.array(evaluator.eval["precision"], dtype=np.float64)[..., -1]
    precision[precision < 0] = np.nan  # -1 in COCO means that a class has no boxes
    averaged = {  # each metric is the mean of these precisions
        "AP": precision[..., 0],
        "AP50": precision[0, ..., 0],
        "AP75": precision[5, ..., 0],
        "APs": precision[..., 1],
        "APm": precision[..., 2],
        "APl": precision[..., 3],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # the mean of only nan is nan
        summary = {key: float(100 * np.nanmean(values)) for key, values in averaged.items()}
        class_ap = 100 * np.nanmean(precision[..., 0], axis=(0, 1))
    counts = Counter(
        entry["category_id"] for entry in evaluator.cocoGt.anns.values() if not entry["iscrowd"]
    )
    num_boxes = np.array([counts[category] for category in evaluator.params.catIds], np.int64)
    return DetectionScores(summary, class_ap, num_boxes)


def find_errors(evaluator: Any) -> DetectionErrors:
    """Finds correct and wrong detections in the result of ``evaluate_boxes``.

    COCO matches detections in descending order of scores, and equal scores in the order of the
    list. So whether a detection is correct does not depend on a score threshold.
    """
    annotations = [entry for entry in evaluator.cocoGt.anns.values() if not entry["iscrowd"]]
    results = list(evaluator.cocoDt.anns.values())
    # The id of the annotation that COCO matches with each detection, or 0 if there is none.
    annotation_ids = np.zeros(len(results), dtype=np.int64)
    ignored = np.ones(len(results), dtype=np.bool_)  # also detections that COCO does not keep
    all_areas = evaluator.params.areaRng[0]
    # COCO has one entry per class, area range and image, which is None without boxes.
    for entry in evaluator.evalImgs:
        if entry is None or entry["aRng"] != all_areas or not entry["dtIds"]:
            continue
        indices = np.array(entry["dtIds"]) - 1  # ids start from 1
        annotation_ids[indices] = entry["dtMatches"][0]  # at the first IoU threshold, 0.50
        ignored[indices] = entry["dtIgnore"][0]
    # For each detection, the index of its ground-truth box, or -1 if unmatched or a crowd.
    index_of = {annotation["id"]: index for index, annotation in enumerate(annotations)}
    box_indices = np.full(len(results), -1, dtype=np.int64)
    for detection, annotation_id in enumerate(annotation_ids.tolist()):
        box_indices[detection] = index_of.get(annotation_id, -1)
    correct = box_indices >= 0
    matches = np.full(len(annotations), -1, dtype=np.int64)
    matches[box_indices[correct]] = np.flatnonzero(correct)
    return DetectionErrors(
        detections=_read_boxes(results, evaluator.params.catIds),
        scores=np.array([result["score"] for result in results], dtype=np.float64),
        correct=correct,
        wrong=~(correct | ignored),
        ground_truth=_read_boxes(annotations, evaluator.params.catIds),
        matches=matches,
    )


def _read_boxes(entries: Sequence[Entry], category_ids: Sequence[int]) -> Boxes:
    """Converts annotations or results in COCO format."""
    xyxy = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
    xyxy[:, 2:] += xyxy[:, :2]  # from XYWH to XYXY
    class_of = {category: index for index, category in enumerate(sorted(category_ids))}
    return Boxes(
        image_ids=np.array([entry["image_id"] for entry in entries], dtype=np.int64),
        classes=np.array([class_of[entry["category_id"]] for entry in entries], dtype=np.int64),
        xyxy=xyxy,
    )


def choose_threshold(errors: DetectionErrors) -> float:
    """Returns the score threshold that maximizes F1 over all classes at IoU 0.50.

    Returns the highest score if no detection is correct, and 0.5 if there are no detections.
    """
    counted = np.flatnonzero(errors.correct | errors.wrong)
    if not len(counted):
        return 0.5
    descending = counted[np.argsort(-errors.scores[counted], kind="stable")]
    scores = errors.scores[descending]
    # With the n highest scores: F1 = 2 * (correct detections) / (n + number of boxes).
    num_correct = np.cumsum(errors.correct[descending])
    num_detections = np.arange(1, len(scores) + 1)
    f1 = 2 * num_correct / (num_detections + len(errors.matches))
    # A threshold cannot separate equal scores, so only the last of them is a possible threshold.
    is_last = np.append(scores[:-1] != scores[1:], True)
    return float(scores[np.argmax(np.where(is_last, f1, 0))])


def count_errors(errors: DetectionErrors, threshold: float) -> dict[str, int]:
    """Counts "correct" and "wrong" detections scored at least ``threshold``, and "missed" boxes.

    A missed box is a ground-truth box without a correct detection scored at least ``threshold``.
    """
    kept = errors.scores >= threshold
    return {
        "correct": int(errors.correct[kept].sum()),
        "wrong": int(errors.wrong[kept].sum()),
        "missed": len(find_missed_boxes(errors, threshold)),
    }


def find_missed_boxes(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the indices of the ground-truth boxes that are missed, largest boxes first.

    A box is missed if it has no correct detection with a score of at least ``threshold``.
    """
    has_match = errors.matches >= 0
    match_scores = errors.scores[errors.matches[has_match]]
    is_detected = np.zeros(len(errors.matches), dtype=np.bool_)
    is_detected[has_match] = match_scores >= threshold
    missed = np.flatnonzero(~is_detected)
    boxes = errors.ground_truth.xyxy[missed]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return missed[np.argsort(-areas, kind="stable")]


def find_wrong(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the indices of wrong detections scored at least ``threshold``, highest first."""
    wrong = np.flatnonzero(errors.wrong & (errors.scores >= threshold))
    return wrong[np.argsort(-errors.scores[wrong], kind="stable")]


def count_confusions(errors: DetectionErrors, threshold: float, num_classes: int) -> Indices:
    """Returns the confusion matrix (K + 1, K + 1) of true (rows) and detected (columns) classes.

    The last class is background. Only detections with scores of at least ``threshold`` are counted.
    Wrong detections are assigned to missed boxes of any class, in descending order of scores. Each
    is assigned to the box of its image with the highest IoU among those that have no detection yet,
    if this IoU is at least 0.5. Detections without a box are in the row of background, and boxes
    without a detection in its column.
    """
    detections = errors.detections
    ground_truth = errors.ground_truth
    background = num_classes
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    missed = find_missed_boxes(errors, threshold)
    correct_classes = np.delete(ground_truth.classes, missed)
    num_correct = np.bincount(correct_classes, minlength=num_classes)
    np.fill_diagonal(counts[:-1, :-1], num_correct)
    # The class (B,) of the wrong detection that is assigned to each missed box.
    detected_classes = np.full(len(ground_truth.classes), background)
    for index in find_wrong(errors, threshold):
        detected_class = detections.classes[index]
        in_image = ground_truth.image_ids[missed] == detections.image_ids[index]
        is_unassigned = detected_classes[missed] == background
        candidates = missed[in_image & is_unassigned]
        detection = torch.from_numpy(detections.xyxy[index][None])  # (1, 4)
        boxes = torch.from_numpy(ground_truth.xyxy[candidates])  # (n, 4)
        overlaps = box_iou(detection, boxes)[0].numpy()  # (n,)
        if overlaps.max(initial=0) >= _MATCH_IOU:
            best = candidates[overlaps.argmax()]
            detected_classes[best] = detected_class
        else:
            counts[background, detected_class] += 1
    # Unlike ``+=``, ``np.add.at`` counts repeated pairs of classes.
    np.add.at(counts, (ground_truth.classes[missed], detected_classes[missed]), 1)
    return counts


def count_errors_by_image(errors: DetectionErrors, threshold: float) -> Counter[int]:
    """Returns the number of wrong detections and missed boxes at ``threshold``, by image id."""
    wrong = errors.detections.image_ids[find_wrong(errors, threshold)]
    missed = errors.ground_truth.image_ids[find_missed_boxes(errors, threshold)]
    return Counter(np.concatenate([wrong, missed]).tolist())
