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

_LARGEST_IOU = 1 - 1e-10  # of the threshold, as in pycocotools


class FastMatching(COCOeval):
    """pycocotools' ``COCOeval`` with a faster ``evaluateImg``, which has the same results."""

    def evaluateImg(
        self, imgId: int, catId: int, aRng: list[float], maxDet: int
    ) -> dict[str, Any] | None:
        """Matches the detections of an image and a class; None if there are no boxes at all."""
        p = self.params
        classes = [catId] if p.useCats else p.catIds
        truth = [one for k in classes for one in self._gts[imgId, k]]
        found = [one for k in classes for one in self._dts[imgId, k]]
        if not truth and not found:
            return None
        for one in truth:
            is_in_range = aRng[0] <= one["area"] <= aRng[1]
            one["_ignore"] = int(bool(one["ignore"]) or not is_in_range)
        order = np.argsort([one["_ignore"] for one in truth], kind="mergesort")
        truth = [truth[i] for i in order]
        best = np.argsort([-one["score"] for one in found], kind="mergesort")
        found = [found[i] for i in best[:maxDet]]
        ious = np.zeros((len(found), len(truth)))
        if truth and found:
            ious = self.ious[imgId, catId][: len(found), order]
        is_ignored = np.array([one["_ignore"] for one in truth], dtype=np.bool_)
        is_crowd = np.array([one["iscrowd"] for one in truth], dtype=np.bool_)
        matches = [_match(ious, is_ignored, is_crowd, t) for t in p.iouThrs]
        rows = np.array(matches, dtype=np.int64).reshape(len(p.iouThrs), len(found))  # -1: none
        truth_ids = np.array([one["id"] for one in truth], dtype=np.int64)
        found_ids = np.array([one["id"] for one in found], dtype=np.int64)
        found_matches, truth_matches = (
            np.zeros((len(p.iouThrs), len(x))) for x in (found_ids, truth_ids)
        )
        found_ignored = np.zeros(found_matches.shape, dtype=np.bool_)
        for threshold, matched in enumerate(rows):
            hits = np.flatnonzero(matched >= 0)
            found_matches[threshold, hits] = truth_ids[matched[hits]]
            found_ignored[threshold, hits] = is_ignored[matched[hits]]
            truth_matches[threshold, matched[hits]] = found_ids[hits]  # the last one of a crowd
        areas = np.array([one["area"] for one in found])
        is_outside = (areas < aRng[0]) | (areas > aRng[1])
        found_ignored |= (found_matches == 0) & is_outside
        return {
            "image_id": imgId,
            "category_id": catId,
            "aRng": aRng,
            "maxDet": maxDet,
            "dtIds": found_ids.tolist(),
            "gtIds": truth_ids.tolist(),
            "dtMatches": found_matches,
            "gtMatches": truth_matches,
            "dtScores": [one["score"] for one in found],
            "gtIgnore": is_ignored.astype(np.int64),
            "dtIgnore": found_ignored,
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
    lowest = min(threshold, _LARGEST_IOU)
    matches = []
    for overlaps in ious:
        reached = np.flatnonzero(overlaps >= lowest)
        reached = reached[is_free[reached]]
        counted = reached[reached < num_counted]
        among = counted if len(counted) else reached
        if not len(among):
            matches.append(-1)
            continue
        last = among[::-1]
        index = int(last[overlaps[last].argmax()])
        matches.append(index)
        is_free[index] = is_crowd[index]
    return matches
