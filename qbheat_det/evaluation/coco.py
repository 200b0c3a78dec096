# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO metrics, also for images with more than 100 objects."""

import contextlib
import importlib.util
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator, coco_evaluation
from pycocotools.coco import COCO

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import ANNOTATED_IDS, find_annotated
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

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

    Where a class is not annotated in an image, detections that match no box are ignored, as in LVIS
    (``ignore_unannotated``). The annotation file names the annotated classes, or the records of a
    data set without a file do.
    """

    _coco_api: Any  # the annotations; set by Detectron2's constructor

    def __init__(self, dataset_name: str, **arguments: Any) -> None:
        """Builds the evaluator of a registered dataset with ``json_file`` in its metadata.

        ``arguments`` are those of Detectron2's evaluator. Here, ``use_fast_impl`` selects
        faster-coco-eval (True) or pycocotools (False).
        """
        has_faster_coco_eval = importlib.util.find_spec("faster_coco_eval") is not None
        has_file = MetadataCatalog.get(dataset_name).get("json_file") is not None
        super().__init__(dataset_name, **arguments)
        if not has_file:
            self._add_annotated(dataset_name)
        # After Detectron2's constructor, which resets it if Detectron2's own op is not compiled.
        self._use_fast_impl = arguments.get("use_fast_impl", has_faster_coco_eval)
        self._num_classes = len(self._find_category_ids())
        complete_annotations(self._coco_api.dataset)
        with contextlib.redirect_stdout(io.StringIO()):
            self._coco_api.createIndex()
        if "max_dets_per_image" not in arguments:
            max_objects = count_most_objects(self._coco_api.anns.values())
            self._max_dets_per_image = [1, 10, choose_max_detections(max_objects)]

    def _find_category_ids(self) -> dict[int, int]:
        """Returns the id of each category by the index of its class; {} if the index is the id."""
        indices = self._metadata.get("thing_dataset_id_to_contiguous_id", {})
        return {index: id_ for id_, index in indices.items()}

    def _add_annotated(self, dataset_name: str) -> None:
        """Adds the annotated classes of the records to the file that Detectron2 made of them."""
        ids = self._find_category_ids()
        is_changed = False
        for number, record in enumerate(DatasetCatalog.get(dataset_name)):
            if ANNOTATED_CLASSES in record:
                image = self._coco_api.imgs[record.get("image_id", number)]
                classes = record[ANNOTATED_CLASSES]
                image[ANNOTATED_IDS] = [ids.get(index, index) for index in classes]
                is_changed = True
        if is_changed:  # other evaluators read the file
            content = json.dumps(self._coco_api.dataset).encode()
            write_atomically(Path(self._metadata.json_file), content)

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
        ids = self._find_category_ids()
        pairs = {
            (result["image_id"], ids.get(result["category_id"], result["category_id"]))
            for result in results
        }
        printed = io.StringIO()
        ground_truth = self._coco_api
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.callback(setattr, self, "_coco_api", ground_truth)
            self._coco_api = ignore_unannotated(ground_truth, pairs)
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
        if not results and self._output_dir:
            # Reports read this file, in which Detectron2 has written the box of above.
            write_atomically(Path(self._output_dir, "coco_instances_results.json"), b"[]")
        self._logger.debug(printed.getvalue())
        # Detectron2 omits the APs of classes if there are no predictions.
        class_names = self._metadata.get("thing_classes") or []
        if len(class_names) > 1:
            for metrics in self._results.values():
                for name in class_names:
                    metrics.setdefault(f"AP-{name}", float("nan"))


def ignore_unannotated(ground_truth: COCO, pairs: Iterable[tuple[int, int]]) -> COCO:
    """Makes an evaluation ignore wrong detections of classes that are not annotated in an image.

    As in LVIS (arXiv:1908.03195, Sec. 3), a detection of such a class is correct if it matches a
    box. Otherwise, it is neither correct nor wrong, because the object may lack a label. To this
    end, a crowd that covers the image is added for the class: COCO ignores detections in a crowd
    that match no other box.

    Args:
        ground_truth: the annotations, which do not change.
        pairs: (id of the image, id of the category) of all detections.

    Returns:
        The annotations with crowds; ``ground_truth`` itself if there is nothing to ignore.
    """
    annotated = find_annotated(ground_truth.dataset)
    crowds: list[dict[str, Any]] = []
    for image_id, category_id in sorted(set(pairs)):
        if category_id in annotated.get(image_id, (category_id,)):
            continue
        image = ground_truth.imgs[image_id]
        height = image["height"]
        width = image["width"]
        crowds.append(
            {
                "id": len(ground_truth.anns) + len(crowds) + 1,
                "image_id": image_id,
                "category_id": category_id,
                # Larger than the image, because boxes may reach beyond it.
                "bbox": [-float(width), -float(height), 3.0 * width, 3.0 * height],
                "area": 9.0 * width * height,
                "segmentation": {"size": [height, width], "counts": [0, height * width]},
                "iscrowd": 1,
            }
        )
    if not crowds:
        return ground_truth
    completed = COCO()
    annotations = [*ground_truth.dataset["annotations"], *crowds]
    completed.dataset = {**ground_truth.dataset, "annotations": annotations}
    with contextlib.redirect_stdout(io.StringIO()):
        completed.createIndex()
    return completed


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
