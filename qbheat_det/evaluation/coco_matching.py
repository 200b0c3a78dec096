# Copyright (c) qbheat_det contributors. Apache-2.0.
"""pycocotools' matching of detections in NumPy, for images with many objects.

pycocotools compares each detection with each box in a Python loop, which takes half a minute for an
image of 1,728 boxes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from detectron2.evaluation.coco_evaluation import COCOevalMaxDets
from pycocotools.cocoeval import COCOeval

_MAX_THRESHOLD = 1 - 1e-10  # highest IoU that a match can need, as in pycocotools


class FastMatching(COCOeval):
    """pycocotools' ``COCOeval`` with a faster ``evaluateImg``, which has the same results."""

    def evaluateImg(
        self, imgId: int, catId: int, aRng: list[float], maxDet: int
    ) -> dict[str, Any] | None:
        """Matches the detections of an image and a class with its boxes, for all IoU thresholds.

        Args:
            imgId: id of the image.
            catId: id of the class; ignored if ``params.useCats`` is 0, which joins all classes.
            aRng: smallest and largest area of the boxes that count, in pixels.
            maxDet: number of detections that count, those with the highest scores.

        Returns:
            pycocotools' dict of the matches; None if there are neither boxes nor detections.
        """
        p = self.params
        classes = [catId] if p.useCats else p.catIds
        truth: list[dict[str, Any]] = []
        detections: list[dict[str, Any]] = []
        for class_id in classes:
            truth += self._gts[imgId, class_id]
            detections += self._dts[imgId, class_id]
        if not truth and not detections:
            return None
        for box in truth:
            is_in_range = aRng[0] <= box["area"] <= aRng[1]
            box["_ignore"] = int(bool(box["ignore"]) or not is_in_range)
        # Stable sorts, as in pycocotools: boxes that count come first, and so do high scores.
        truth_order = np.argsort([box["_ignore"] for box in truth], kind="mergesort")
        truth = [truth[i] for i in truth_order]
        by_score = np.argsort([-detection["score"] for detection in detections], kind="mergesort")
        detections = [detections[i] for i in by_score[:maxDet]]
        ious = np.zeros((len(detections), len(truth)))
        if truth and detections:  # the rows of ``self.ious`` are already sorted by score
            ious = self.ious[imgId, catId][: len(detections), truth_order]
        is_ignored = np.array([box["_ignore"] for box in truth], dtype=np.bool_)
        is_crowd = np.array([box["iscrowd"] for box in truth], dtype=np.bool_)
        num_thresholds = len(p.iouThrs)
        matches = [_match(ious, is_ignored, is_crowd, threshold) for threshold in p.iouThrs]
        # (thresholds, D): the index of the box that matches a detection, or -1.
        matched_boxes = np.array(matches, dtype=np.int64).reshape(num_thresholds, len(detections))
        truth_ids = np.array([box["id"] for box in truth], dtype=np.int64)
        detection_ids = np.array([detection["id"] for detection in detections], dtype=np.int64)
        truth_matches = np.zeros((num_thresholds, len(truth)))
        detection_matches = np.zeros((num_thresholds, len(detections)))
        detection_ignored = np.zeros(detection_matches.shape, dtype=np.bool_)
        for row in range(num_thresholds):
            hits = np.flatnonzero(matched_boxes[row] >= 0)  # indices of matched detections
            boxes = matched_boxes[row, hits]  # indices of their boxes
            detection_matches[row, hits] = truth_ids[boxes]
            detection_ignored[row, hits] = is_ignored[boxes]
            # Several detections can match a crowd. The last one is stored.
            truth_matches[row, boxes] = detection_ids[hits]
        areas = np.array([detection["area"] for detection in detections])
        is_outside = (areas < aRng[0]) | (areas > aRng[1])
        detection_ignored |= (detection_matches == 0) & is_outside
        return {
            "image_id": imgId,
            "category_id": catId,
            "aRng": aRng,
            "maxDet": maxDet,
            "dtIds": detection_ids.tolist(),
            "gtIds": truth_ids.tolist(),
            "dtMatches": detection_matches,
            "gtMatches": truth_matches,
            "dtScores": [detection["score"] for detection in detections],
            "gtIgnore": is_ignored.astype(np.int64),
            "dtIgnore": detection_ignored,
        }


class FastMatchingMaxDets(FastMatching, COCOevalMaxDets):
    """Detectron2's ``COCOevalMaxDets`` with a faster ``evaluateImg``."""


def _match(
    ious: npt.NDArray[np.float64],
    is_ignored: npt.NDArray[np.bool_],
    is_crowd: npt.NDArray[np.bool_],
    threshold: float,
) -> list[int]:
    """Returns the index of the box that matches each detection, or -1.

    A detection takes the free box with the highest IoU, and of equal IoUs the last box. It takes an
    ignored box only if no other box reaches the threshold. A box that is taken is no longer free,
    unless it is a crowd.

    Args:
        ious: (D, B), with detections in the order of their scores.
        is_ignored: (B,); ignored boxes come last.
        is_crowd: (B,).
        threshold: lowest IoU of a match.
    """
    is_free = np.ones(len(is_ignored), dtype=np.bool_)
    num_counted = int((~is_ignored).sum())  # boxes that are not ignored, which come first
    threshold = min(threshold, _MAX_THRESHOLD)
    matches = []
    for box_ious in ious:  # of one detection, (B,)
        candidates = np.flatnonzero((box_ious >= threshold) & is_free)
        counted_candidates = candidates[candidates < num_counted]
        if len(counted_candidates):
            candidates = counted_candidates
        if not len(candidates):
            matches.append(-1)
            continue
        reversed_candidates = candidates[::-1]  # argmax returns the first of equal IoUs
        best = int(reversed_candidates[box_ious[reversed_candidates].argmax()])
        matches.append(best)
        is_free[best] = is_crowd[best]
    return matches
