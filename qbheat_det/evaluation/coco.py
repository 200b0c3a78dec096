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
"""Number of detections per image and class that COCO's AP counts."""
MAX_DETECTIONS = 2000
"""Largest number of detections per image that ``choose_max_detections`` returns."""


def count_most_objects(annotations: Iterable[Mapping[str, Any]]) -> int:
    """Returns the number of objects in the image with the most objects. Crowds do not count."""
    counts: Counter[Any] = Counter()  # by image id
    for annotation in annotations:
        if not annotation.get("iscrowd", 0):
            counts[annotation["image_id"]] += 1
    return max(counts.values(), default=0)


def choose_max_detections(max_objects: int) -> int:
    """Returns how many detections per image AP should count.

    ``max_objects`` is the largest number of objects in an image. For up to 100 objects, returns
    COCO's 100. Otherwise, returns the next multiple of 100 above ``max_objects``, but at most
    ``MAX_DETECTIONS``.
    """
    if max_objects <= STANDARD_DETECTIONS:
        return STANDARD_DETECTIONS
    return min(100 * (max_objects // 100 + 1), MAX_DETECTIONS)


class CocoEvaluator(COCOEvaluator):
    """Detectron2's ``COCOEvaluator`` with faster-coco-eval if installed, or else pycocotools.

    Both libraries give the same results. Detectron2's own fast evaluation is not used, because it
    needs a compiled op that a pure-Python build lacks.

    If there are no predictions, AP is 0. If there is no ground truth, AP is nan. In these cases, a
    warning is logged. Images that were not processed, because they cannot be read, are left out
    with their ground truth. If an image has more than 100 objects, AP counts as many detections per
    image and class as ``choose_max_detections`` returns, instead of COCO's 100.
    """

    def __init__(self, dataset_name: str, **arguments: Any) -> None:
        """Builds the evaluator of a registered dataset with ``json_file`` in its metadata.

        ``arguments`` are those of Detectron2's evaluator. Here, ``use_fast_impl`` selects
        faster-coco-eval (True) or pycocotools (False).
        """
        has_faster_coco_eval = importlib.util.find_spec("faster_coco_eval") is not None
        super().__init__(dataset_name, **arguments)
        # After Detectron2's constructor, which resets it if Detectron2's own op is not compiled.
        self._use_fast_impl = arguments.get("use_fast_impl", has_faster_coco_eval)
        contiguous_ids = self._metadata.get("thing_dataset_id_to_contiguous_id", {})
        self._num_classes = len(contiguous_ids)
        complete_annotations(self._coco_api.dataset)
        with contextlib.redirect_stdout(io.StringIO()):
            self._coco_api.createIndex()
        if "max_dets_per_image" not in arguments:
            max_objects = count_most_objects(self._coco_api.anns.values())
            self._max_dets_per_image = [1, 10, choose_max_detections(max_objects)]

    def _eval_predictions(
        self, predictions: list[dict[str, Any]], img_ids: list[int] | None = None
    ) -> None:
        """Computes the metrics, as in Detectron2, but also without predictions or ground truth."""
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
            # Detectron2 skips metrics if there are no predictions. A box that matches no object
            # makes it compute an AP of 0.
            empty_box = {
                "image_id": predictions[0]["image_id"],
                "category_id": 0,
                "bbox": [0.0, 0.0, 0.0, 0.0],
                "score": 0.0,
            }
            predictions = [{**predictions[0], "instances": [empty_box]}, *predictions[1:]]
        if img_ids is None:
            img_ids = sorted({prediction["image_id"] for prediction in predictions})
        printed = io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(printed))
            from unittest import mock  # not at the top, because it imports asyncio

            # Detectron2 uses this class if more than 100 detections per image are counted.
            patch = mock.patch.object(coco_evaluation, "COCOevalMaxDets", FastMatchingMaxDets)
            stack.enter_context(patch)
            if self._use_fast_impl:
                from faster_coco_eval import COCOeval_faster

                # The class of Detectron2's compiled evaluation.
                patch = mock.patch.object(coco_evaluation, "COCOeval_opt", COCOeval_faster)
                stack.enter_context(patch)
            super()._eval_predictions(predictions, img_ids)
        self._logger.debug(printed.getvalue())
        # Detectron2 omits the APs of classes if there are no predictions.
        class_names = self._metadata.get("thing_classes") or []
        if len(class_names) > 1:
            for metrics in self._results.values():
                for name in class_names:
                    metrics.setdefault(f"AP-{name}", float("nan"))


def complete_annotations(dataset: dict[str, Any]) -> None:
    """Completes a COCO dataset, in place.

    Adds the keys "iscrowd" and "area" to annotations that lack them, and numbers all annotations
    from 1.
    """
    dataset.setdefault("info", {})  # some releases of pycocotools fail without it
    # pycocotools uses id 0 for "unmatched" and drops duplicate ids.
    for index, annotation in enumerate(dataset.get("annotations", []), start=1):
        annotation["id"] = index
        annotation.setdefault("iscrowd", 0)
        if "area" not in annotation and "bbox" in annotation:
            annotation["area"] = annotation["bbox"][2] * annotation["bbox"][3]
