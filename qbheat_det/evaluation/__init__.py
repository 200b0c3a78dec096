# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluators: COCO metrics, classification, nearest neighbors, held-out loss."""

import contextlib
import importlib.util
import io
import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator, DatasetEvaluator, coco_evaluation
from detectron2.utils import comm

from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_CLASSES, TiledEvaluator

from .classification import (
    ClassificationEvaluator,
    find_confusions,
    measure_ranks,
    rank_true_class,
    rank_true_classes,
)
from .coco_matching import FastMatching, FastMatchingMaxDets

__all__ = [
    "MAX_DETECTIONS",
    "STANDARD_DETECTIONS",
    "ClassificationEvaluator",
    "CocoEvaluator",
    "FastMatching",
    "HeldOutLossEvaluator",
    "build_evaluator",
    "choose_max_detections",
    "complete_annotations",
    "count_most_objects",
    "find_confusions",
    "measure_ranks",
    "rank_true_class",
    "rank_true_classes",
]

STANDARD_DETECTIONS = 100
"""Detections per image (and class) that COCO's AP counts, if no image has more objects."""
MAX_DETECTIONS = 2000
"""Largest result of ``choose_max_detections``."""


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Builds the evaluator of a registered dataset. Raises a ``UserError`` if there is none."""
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    output_dir = os.path.join(cfg.OUTPUT_DIR, "inference", dataset_name)
    if kind == "reconstruction" and cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        names = cfg.MODEL.CLASS_NAMES
        return ClassificationEvaluator(dataset_name, class_names=names, output_dir=output_dir)
    if kind == "reconstruction":
        return HeldOutLossEvaluator(dataset_name)
    if kind != "coco":
        raise UserError(
            f"dataset '{dataset_name}' has evaluator_type '{kind}', but must be 'coco' or "
            "'reconstruction': register it in COCO format"
        )
    evaluator = CocoEvaluator(dataset_name, output_dir=output_dir)
    return TiledEvaluator(evaluator, cfg.INPUT.TILE) if cfg.INPUT.TILE else evaluator


def count_most_objects(annotations: Iterable[Mapping[str, Any]]) -> int:
    """Returns the largest number of annotations without crowds that have the same "image_id"."""
    counts = Counter(one["image_id"] for one in annotations if not one.get("iscrowd", 0))
    return max(counts.values(), default=0)


def choose_max_detections(most: int) -> int:
    """Returns the number of detections per image for images with up to ``most`` objects.

    It is COCO's 100 for up to 100 objects, and else the next multiple of 100 above ``most``, but at
    most ``MAX_DETECTIONS``.
    """
    if most <= STANDARD_DETECTIONS:
        return STANDARD_DETECTIONS
    return min(100 * (most // 100 + 1), MAX_DETECTIONS)


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
            most = count_most_objects(self._coco_api.anns.values())
            self._max_dets_per_image = [1, 10, choose_max_detections(most)]

    def _eval_predictions(
        self, predictions: list[dict[str, Any]], img_ids: list[int] | None = None
    ) -> None:
        results = list(itertools.chain.from_iterable(p["instances"] for p in predictions))
        largest = max((result["category_id"] for result in results), default=0)
        if 0 < self._num_classes <= largest:
            raise UserError(
                f"the model predicted class {largest}, but '{self._metadata.name}' has "
                f"{self._num_classes} classes: NUM_CLASSES does not fit"
            )
        if self._do_evaluation and not self._coco_api.anns:
            self._logger.warning(f"{self._metadata.json_file} has no annotated objects: AP is nan.")
        elif not results and predictions:
            images = len(predictions)
            self._logger.warning(f"The model predicted nothing on {images} images: AP is 0.")
            # Detectron2 skips metrics if there are no predictions. An unmatched box gives AP 0.
            nothing = {"category_id": 0, "bbox": [0.0, 0.0, 0.0, 0.0], "score": 0.0}
            results = [{"image_id": predictions[0]["image_id"], **nothing}]
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
        names = self._metadata.get("thing_classes") or []
        for metrics in self._results.values():
            for name in names if len(names) > 1 else []:
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


class HeldOutLossEvaluator(DatasetEvaluator):
    """Averages the per-image loss of a pre-training model over a dataset.

    If the model returns "loss_reconstruction", the results are ``{"reconstruction": {"loss_corner",
    "loss_centre", "loss", "loss_standard_error"}}``. The first two are the means over corner views
    and over center views, if there are any. "loss" is the mean over images, where the loss of an
    image is the mean over its views. With "loss_feature", the outer key is "feature".
    """

    def __init__(self, dataset_name: str) -> None:
        self._dataset_name = dataset_name
        self._name = "reconstruction"
        self._losses: list[tuple[str, str, float]] = []  # image, view, loss

    def reset(self) -> None:
        self._losses = []

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        """Adds a batch. Raises a ``UserError`` if the model returns no loss."""
        names = {name for output in outputs for name in output if name.startswith("loss_")}
        if len(names) != 1:
            raise UserError(
                f"dataset '{self._dataset_name}' has no annotations, which the model needs: only "
                "pre-training can be evaluated without annotations"
            )
        (name,) = names
        self._name = name.removeprefix("loss_")
        losses = torch.stack([output[name] for output in outputs]).double().tolist()
        for entry, output, loss in zip(inputs, outputs, losses, strict=True):
            view = output.get("place", "")
            view = "corner" if view not in ("", "centre") else view
            image = str(entry.get("image_id", entry.get("file_name")))
            self._losses.append((image, view, loss))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gathers all losses. Returns results on the main process, and ``{}`` on others."""
        parts = comm.gather(self._losses, dst=0)
        if not comm.is_main_process():
            return {}
        # Sorted, so that results are bit-identical to those of one process.
        losses = sorted(itertools.chain.from_iterable(parts))
        results = {}
        for view in ("corner", "centre"):
            if seen := [loss for _, own, loss in losses if own == view]:
                results[f"loss_{view}"] = statistics.fmean(seen)
        each = [
            statistics.fmean(loss for _, _, loss in seen)
            for _, seen in itertools.groupby(losses, key=lambda entry: entry[0])
        ]
        mean = error = math.nan
        if each:
            mean = statistics.fmean(each)
        if len(each) > 1 and math.isfinite(mean):
            error = statistics.stdev(each, xbar=mean) / math.sqrt(len(each))
        return {self._name: {**results, "loss": mean, "loss_standard_error": error}}
