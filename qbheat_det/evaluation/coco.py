# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO metrics by faster-coco-eval if it is installed, else by pycocotools.

Detectron2's own fast evaluation is a compiled op that a pure-Python build lacks.
"""

import contextlib
import copy
import importlib.util
import io
import itertools
import json
import os
from typing import Any

from detectron2.evaluation import COCOEvaluator

from qbheat_det.core.errors import UserError


class CocoEvaluator(COCOEvaluator):
    """Detectron2's ``COCOEvaluator`` with a choice of library; both give the same results.

    AP is 0 without predictions and nan without ground truth, both with a warning.
    """

    def __init__(self, dataset_name: str, *, library: str = "auto", **arguments: Any) -> None:
        """Takes a registered dataset with ``json_file`` and arguments of Detectron2's evaluator.

        ``library`` is "auto", "faster-coco-eval" or "pycocotools"; a missing one is a
        ``UserError``.
        """
        self._library = resolve_coco_library(library)
        super().__init__(dataset_name, use_fast_impl=False, **arguments)
        to_contiguous = self._metadata.get("thing_dataset_id_to_contiguous_id", {})
        self._to_dataset_id = {label: id_ for id_, label in to_contiguous.items()}
        complete_annotations(self._coco_api.dataset)
        with contextlib.redirect_stdout(io.StringIO()):
            self._coco_api.createIndex()

    def _eval_predictions(
        self, predictions: list[dict[str, Any]], img_ids: list[int] | None = None
    ) -> None:
        results = list(itertools.chain.from_iterable(p["instances"] for p in predictions))
        known = set(self._to_dataset_id)
        if known and (strange := {r["category_id"] for r in results} - known):
            raise UserError(
                f"the model predicted class {min(strange)}, but '{self._metadata.name}' has "
                f"{len(known)} classes: NUM_CLASSES does not fit"
            )
        if self._do_evaluation and not self._coco_api.anns:
            self._logger.warning(f"{self._metadata.json_file} has no annotated objects: AP is nan.")
        elif not results and predictions:
            images = len(predictions)
            self._logger.warning(f"The model predicted nothing on {images} images: AP is 0.")
            # Detectron2 skips metrics without predictions; one unmatched box gives AP 0.
            nothing = {"category_id": 0, "bbox": [0.0, 0.0, 0.0, 0.0], "score": 0.0}
            results = [{"image_id": predictions[0]["image_id"], **nothing}]
            predictions = [{**predictions[0], "instances": results}, *predictions[1:]]
        tasks = set(self._tasks or self._tasks_from_predictions(results))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Keypoints need Detectron2's sigmas.
            if self._library == "pycocotools" or not results or "keypoints" in tasks:
                super()._eval_predictions(predictions, img_ids)
            else:
                self._eval_by_faster_coco_eval(results, sorted(tasks), img_ids)
        self._logger.debug(printed.getvalue())
        # Detectron2 omits classes if there are no predictions.
        names = self._metadata.get("thing_classes") or []
        for metrics in self._results.values():
            for name in names if len(names) > 1 else []:
                metrics.setdefault(f"AP-{name}", float("nan"))

    def _eval_by_faster_coco_eval(
        self, results: list[dict[str, Any]], tasks: list[str], img_ids: list[int] | None
    ) -> None:
        from faster_coco_eval import COCO, COCOeval_faster

        for result in results:
            label = result["category_id"]
            result["category_id"] = self._to_dataset_id.get(label, label)
        if self._output_dir:
            path = os.path.join(self._output_dir, "coco_instances_results.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(results, file)
        if not self._do_evaluation:
            self._logger.info("The annotation file has no annotations: nothing to evaluate.")
            return
        for task in tasks:
            # The library modifies its inputs, so each task starts from copies.
            ground_truth = COCO(copy.deepcopy(self._coco_api.dataset))
            detections = copy.deepcopy(results)
            if task == "segm":
                for detection in detections:  # else areas come from boxes instead of masks
                    detection.pop("bbox", None)
            coco_eval = COCOeval_faster(ground_truth, ground_truth.loadRes(detections), task)
            if img_ids is not None:
                coco_eval.params.imgIds = img_ids
            coco_eval.run()
            self._results[task] = self._derive_coco_results(
                coco_eval, task, class_names=self._metadata.get("thing_classes")
            )


def complete_annotations(dataset: dict[str, Any]) -> None:
    """Fills in ``iscrowd`` and ``area``, and numbers annotations from 1, in place."""
    dataset.setdefault("info", {})  # some releases of pycocotools fail without it
    # pycocotools uses id 0 for "unmatched" and drops duplicate ids.
    for index, annotation in enumerate(dataset.get("annotations", []), start=1):
        annotation["id"] = index
        annotation.setdefault("iscrowd", 0)
        if "area" not in annotation and "bbox" in annotation:
            annotation["area"] = annotation["bbox"][2] * annotation["bbox"][3]


def resolve_coco_library(choice: str) -> str:
    """Returns "faster-coco-eval" or "pycocotools" for a value of ``TEST.COCO_EVAL_LIBRARY``.

    Raises a ``UserError`` if the name is unknown, or the library is not installed.
    """
    has_fast = importlib.util.find_spec("faster_coco_eval") is not None
    known = ("auto", "pycocotools", *(["faster-coco-eval"] if has_fast else []))
    if choice not in known:
        raise UserError(
            f"TEST.COCO_EVAL_LIBRARY is '{choice}', but what is installed are {', '.join(known)}"
        )
    return known[-1] if choice == "auto" else choice
