# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO metrics, also for images with more than 100 objects."""

import contextlib
import importlib.util
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from detectron2.evaluation import COCOEvaluator, coco_evaluation

from qbheat_det.core.errors import UserError

from .coco_matching import FastMatchingMaxDets

STANDARD_DETECTIONS = 100
"""Detections per image (and class) that COCO's AP counts, if no image has more objects."""
MAX_DETECTIONS = 2000
"""Largest result of ``choose_max_detections``."""


def count_most_objects(annotations: Iterable[Mapping[str, Any]]) -> int:
    """Returns the largest number of annotations without crowds that have the same "image_id"."""
    counts = Counter(
        annotation["image_id"] for annotation in annotations if not annotation.get("iscrowd", 0)
    )
    return max(counts.values(), default=0)


def choose_max_detections(max_objects: int) -> int:
    """Returns the number of detections per image for images with up to ``max_objects`` objects.

    It is COCO's 100 for up to 100 objects, and else the next multiple of 100 above ``max_objects``,
    but at most ``MAX_DETECTIONS``.
    """
    if max_objects <= STANDARD_DETECTIONS:
        return STANDARD_DETECTIONS
    return min(100 * (max_objects // 100 + 1), MAX_DETECTIONS)


class CocoEvaluator(COCOEvaluator):
    """Detectron2's ``COCOEvaluator`` with faster-coco-eval if installed, or else pycocotools.

    Both libraries give the same results. If there are no predictions, AP is 0. If there is no
    ground truth, AP is nan. In these cases, a warning is logged. Detectron2's own fast evaluation
    is not used, because it needs a compiled op that a pure-Python build lacks.

    Images that were not processed, because they cannot be read, are left out with their ground
    truth. If an image has more than 100 objects, AP counts more than COCO's 100 detections per
    image and class, see ``choose_max_detections``.
    """

    def __init__(self, dataset_name: str, **arguments: Any) -> None:
        """Builds the evaluator of a registered dataset with ``json_file`` in its metadata.

        ``arguments`` are those of Detectron2's evaluator. Here, ``use_fast_impl`` selects
        faster-coco-eval (True) or pycocotools (False).
        """
        installed = importlib.util.find_spec("faster_coco_eval") is not None
        super().__init__(dataset_name, **{"use_fast_impl": installed, **arguments})
        to_contiguous = self._metadata.get("thing_dataset_id_to_contiguous_id", {})
        self._num_classes = len(to_contiguous)
        complete_annotations(self._coco_api.dataset)
        with contextlib.redirect_stdout(io.StringIO()):
            self._coco_api.createIndex()
        if "max_dets_per_image" not in arguments:
            max_objects = count_most_objects(self._coco_api.anns.values())
            self._max_dets_per_image = [1, 10, choose_max_detections(max_objects)]

    def _eval_predictions(
        self, predictions: list[dict[str, Any]], img_ids: list[int] | None = None
    ) -> None:
        results = list(itertools.chain.from_iterable(p["instances"] for p in predictions))
        highest_class = max((result["category_id"] for result in results), default=0)
        if 0 < self._num_classes <= highest_class:
            raise UserError(
                f"the model predicted class {highest_class}, but '{self._metadata.name}' has "
                f"{self._num_classes} classes: NUM_CLASSES does not fit"
            )
        if self._do_evaluation and not self._coco_api.anns:
            self._logger.warning(f"{self._metadata.json_file} has no annotated objects: AP is nan.")
        elif not results and predictions:
            num_images = len(predictions)
            self._logger.warning(f"The model predicted nothing on {num_images} images: AP is 0.")
            # Detectron2 skips metrics if there are no predictions. An unmatched box gives AP 0.
            empty_box = {"category_id": 0, "bbox": [0.0, 0.0, 0.0, 0.0], "score": 0.0}
            results = [{"image_id": predictions[0]["image_id"], **empty_box}]
            predictions = [{**predictions[0], "instances": results}, *predictions[1:]]
        if img_ids is None:
            img_ids = sorted({prediction["image_id"] for prediction in predictions})
        printed = io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(printed))
            from unittest import mock  # here, because it imports asyncio

            # Detectron2 uses this class if more than 100 detections per image are counted.
            fast = mock.patch.object(coco_evaluation, "COCOevalMaxDets", FastMatchingMaxDets)
            stack.enter_context(fast)
            if self._use_fast_impl:  # it replaces Detectron2's compiled evaluation
                from faster_coco_eval import COCOeval_faster

                patch = mock.patch.object(coco_evaluation, "COCOeval_opt", COCOeval_faster)
                stack.enter_context(patch)
            super()._eval_predictions(predictions, img_ids)
        self._logger.debug(printed.getvalue())
        # Detectron2 omits classes if there are no predictions.
        class_names = self._metadata.get("thing_classes") or []
        if len(class_names) > 1:
            for metrics in self._results.values():
                for name in class_names:
                    metrics.setdefault(f"AP-{name}", float("nan"))


def complete_annotations(dataset: dict[str, Any]) -> None:
    """Adds missing ``iscrowd`` and ``area`` to COCO annotations, and sets ids from 1, in place."""
    dataset.setdefault("info", {})  # some releases of pycocotools fail without it
    # pycocotools uses id 0 for "unmatched" and drops duplicate ids.
    for index, annotation in enumerate(dataset.get("annotations", []), start=1):
        annotation["id"] = index
        annotation.setdefault("iscrowd", 0)
        if "area" not in annotation and "bbox" in annotation:
            annotation["area"] = annotation["bbox"][2] * annotation["bbox"][3]
