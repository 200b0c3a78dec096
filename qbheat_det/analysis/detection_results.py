# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The detections of a run on a dataset: from its last evaluation where that is safe, else new."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.figures import NotApplicable
from qbheat_det.core.text import join_first
from qbheat_det.engine.data_sources import register_source
from qbheat_det.engine.trainer import Trainer

from .detection_scores import evaluate_boxes, score_detections
from .run import Run
from .training_log import get_last_metric, read_evaluation

RESULTS_FILE = "coco_instances_results.json"
_TOLERANCE = 1e-6  # percent; the two libraries of COCO's metrics differ by rounding


@dataclass(frozen=True)
class DetectionSet:
    """An annotation file in COCO's format.

    Attributes:
        name: registered with Detectron2.
        json_file: annotations.
        image_root: folder of the images.
        content: of ``json_file``.
        class_names: in the order of the category ids.
        category_ids: in the same order.
    """

    name: str
    json_file: Path
    image_root: Path
    content: dict[str, Any]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]


def read_detection_set(name: str) -> DetectionSet:
    """Reads the annotation file of a registered dataset.

    Raises:
        NotApplicable: it has none in COCO's format, or no boxes.
    """
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    if not json_file:
        raise NotApplicable(f"'{name}' has no annotation file in COCO's format")
    try:
        content = json.loads(Path(json_file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotApplicable(f"'{json_file}' cannot be read: {error}") from error
    if not content.get("annotations"):
        raise NotApplicable(f"'{json_file}' has no boxes")
    categories = sorted(content["categories"], key=lambda category: category["id"])
    return DetectionSet(
        name,
        Path(json_file),
        Path(metadata.get("image_root") or ""),
        content,
        tuple(str(category["name"]) for category in categories),
        tuple(int(category["id"]) for category in categories),
    )


def register_given(json_file: str, image_root: str) -> str:
    """Registers an annotation file that flags name; returns the name of the dataset.

    Raises:
        UserError: the file or the folder is not valid.
    """
    name = f"given: {Path(json_file).resolve()} with {Path(image_root).resolve()}"
    source = {"json_file": json_file, "image_root": image_root, "labelled": True}
    register_source(name, source)
    return name


def evaluate_run(run: Run, dataset: DetectionSet) -> tuple[Any, bool]:
    """Evaluates a run as ``evaluate_boxes`` does.

    The detections that its last evaluation wrote are used if their AP is the one that was logged
    last: then the file is complete, and of this dataset and these weights. Otherwise the model is
    run on all images.

    Returns:
        The evaluator, and whether the run's own detections were used.

    Raises:
        NotApplicable: the model has other classes.
        UserError: the model cannot be built, or an image cannot be read.
    """
    names = tuple(run.cfg.MODEL.CLASS_NAMES)
    if names != dataset.class_names:
        raise NotApplicable(
            f"'{run.label}' has the classes {join_first(names)}, unlike '{dataset.json_file}' "
            f"({join_first(dataset.class_names)})"
        )
    results = read_evaluation(run, RESULTS_FILE)
    if _is_valid(results, dataset):
        evaluator = evaluate_boxes(dataset.content, results)
        ap = score_detections(evaluator).summary["AP"]
        if abs(ap - get_last_metric(run, "bbox/AP")) < _TOLERANCE:
            return evaluator, True
    return evaluate_boxes(dataset.content, _predict(run, dataset)), False


def _is_valid(results: Any, dataset: DetectionSet) -> bool:
    images = {image["id"] for image in dataset.content["images"]}
    try:
        return results is not None and all(
            entry["image_id"] in images
            and entry["category_id"] in dataset.category_ids
            and len([*map(float, entry["bbox"]), float(entry["score"])]) == 5
            for entry in results
        )
    except (KeyError, TypeError, ValueError):
        return False


@torch.no_grad()
def _predict(run: Run, dataset: DetectionSet) -> list[dict[str, Any]]:
    """Returns the detections of all images in COCO's format."""
    loader = Trainer.build_test_loader(run.cfg, dataset.name)
    model = run.model
    results: list[dict[str, Any]] = []
    for inputs in tqdm(loader, desc=f"detecting for {run.label}", unit="batch"):
        for entry, output in zip(inputs, model(inputs), strict=True):
            if "instances" not in output:
                raise NotApplicable(f"the model of '{run.label}' predicts no boxes")
            results += instances_to_coco_json(output["instances"].to("cpu"), entry["image_id"])
    for entry in results:
        entry["category_id"] = dataset.category_ids[entry["category_id"]]
    return results
