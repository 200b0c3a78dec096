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
        """Matches the detections of an image and a class; None if there are no boxes at all."""
        p = self.params
        classes = [catId] if p.useCats else p.catIds
        truth = [box for k in classes for box in self._gts[imgId, k]]
        detections = [detection for k in classes for detection in self._dts[imgId, k]]
        if not truth and not detections:
            return None
        for box in truth:
            is_in_range = aRng[0] <= box["area"] <= aRng[1]
            box["_ignore"] = int(bool(box["ignore"]) or not is_in_range)
        order = np.argsort([box["_ignore"] for box in truth], kind="mergesort")
        truth = [truth[i] for i in order]
        by_score = np.argsort([-detection["score"] for detection in detections], kind="mergesort")
        detections = [detections[i] for i in by_score[:maxDet]]
        ious = np.zeros((len(detections), len(truth)))
        if truth and detections:
            ious = self.ious[imgId, catId][: len(detections), order]
        is_ignored = np.array([box["_ignore"] for box in truth], dtype=np.bool_)
        is_crowd = np.array([box["iscrowd"] for box in truth], dtype=np.bool_)
        num_thresholds = len(p.iouThrs)
        matches = [_match(ious, is_ignored, is_crowd, threshold) for threshold in p.iouThrs]
        # Per threshold and detection, the index of its box; -1: none.
        rows = np.array(matches, dtype=np.int64).reshape(num_thresholds, len(detections))
        truth_ids = np.array([box["id"] for box in truth], dtype=np.int64)
        detection_ids = np.array([detection["id"] for detection in detections], dtype=np.int64)
        truth_matches = np.zeros((num_thresholds, len(truth)))
        detection_matches = np.zeros((num_thresholds, len(detections)))
        detection_ignored = np.zeros(detection_matches.shape, dtype=np.bool_)
        for threshold, matched in enumerate(rows):
            hits = np.flatnonzero(matched >= 0)
            detection_matches[threshold, hits] = truth_ids[matched[hits]]
            detection_ignored[threshold, hits] = is_ignored[matched[hits]]
            truth_matches[threshold, matched[hits]] = detection_ids[hits]  # the last one of a crowd
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

    A detection takes the free box of highest IoU, and the last one of equal IoUs. It takes an
    ignored box only if no other box reaches the threshold. Crowds stay free.

    Args:
        ious: (D, B), with detections in the order of their scores.
        is_ignored: (B,); ignored boxes come last.
        is_crowd: (B,).
        threshold: lowest IoU of a match.
    """
    is_free = np.ones(len(is_ignored), dtype=np.bool_)
    num_counted = int((~is_ignored).sum())
    threshold = min(threshold, _MAX_THRESHOLD)
    matches = []
    for overlaps in ious:
        reached = np.flatnonzero(overlaps >= threshold)
        reached = reached[is_free[reached]]
        counted = reached[reached < num_counted]
        candidates = counted if len(counted) else reached
        if not len(candidates):
            matches.append(-1)
            continue
        candidates = candidates[::-1]  # argmax returns the first one of equal IoUs
        index = int(candidates[overlaps[candidates].argmax()])
        matches.append(index)
        is_free[index] = is_crowd[index]
    return matches
