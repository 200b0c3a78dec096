# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a detector finds on a test set: read from its run where that is sound, else worked out."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.detection_scores import DetectionScores, score_detections
from qbheat_det.core.errors import UserError
from qbheat_det.engine.data_flags import register_coco_file
from qbheat_det.engine.trainer import Trainer

from .last_evaluation import get_last_logged, read_last_evaluation
from .refusal import NothingToSee
from .subject import Subject

logger = logging.getLogger(__name__)
RESULTS_FILE = "coco_instances_results.json"
_KEYS = ("image_id", "category_id", "bbox", "score")
_SAME_AP = 1e-6  # per cent; the two libraries differ by rounding


@dataclass(frozen=True)
class BoxSet:
    """Images with boxes.

    Attributes:
        name: registered.
        json_file: annotations, in COCO's format.
        image_root: folder of the images.
        content: of ``json_file``.
        class_names: in the order of their ids.
        category_ids: in the same order.
    """

    name: str
    json_file: Path
    image_root: Path
    content: dict[str, Any]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]


@dataclass(frozen=True)
class FoundBoxes:
    """Detections on a whole set.

    Attributes:
        results: in COCO's format.
        scores: COCO's figures of them.
        from_run: whether they are those that the run wrote at its end.
    """

    results: list[dict[str, Any]]
    scores: DetectionScores
    from_run: bool


def register_given_set(json_file: str, image_root: str) -> str:
    """Registers an annotation file that flags name; returns the name.

    Raises:
        UserError: the file or the folder is not sound.
    """
    name = f"given: {Path(json_file).resolve()} with {Path(image_root).resolve()}"
    if name not in DatasetCatalog:
        register_coco_file(name, json_file, image_root)
    return name


def read_box_set(name: str) -> BoxSet:
    """Reads a registered set again, as COCO's evaluation wants it.

    Raises:
        NothingToSee: it is none of COCO's format, or has no boxes.
    """
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    if not json_file:
        raise NothingToSee(f"'{name}' has no annotation file in COCO's format")
    try:
        content = json.loads(Path(json_file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NothingToSee(f"'{json_file}' cannot be read: {error}") from error
    if not content.get("annotations"):
        raise NothingToSee(f"'{json_file}' has no boxes")
    categories = sorted(content["categories"], key=lambda category: category["id"])
    return BoxSet(
        name=name,
        json_file=Path(json_file),
        image_root=Path(metadata.get("image_root") or ""),
        content=content,
        class_names=tuple(str(category["name"]) for category in categories),
        category_ids=tuple(int(category["id"]) for category in categories),
    )


def find_boxes(subject: Subject, boxes: BoxSet) -> FoundBoxes:
    """Returns the detections of a detector on a set.

    Those that the run's last evaluation wrote are taken where the weights are the run's last and
    the AP of the file is the one that was logged then: such a file is whole, and of this set and
    these weights. Else the model looks at all images, with a progress bar.

    Raises:
        NothingToSee: the model's classes are not those of the set.
        UserError: the model cannot be built, or an image not be read.
    """
    names = tuple(subject.cfg.MODEL.CLASS_NAMES)
    if names != boxes.class_names:
        raise NothingToSee(
            f"the classes of '{subject.label}' ({_list(names)}) are not those of "
            f"'{boxes.json_file}' ({_list(boxes.class_names)})"
        )
    library = subject.cfg.TEST.COCO_EVAL_LIBRARY
    results = read_last_evaluation(subject, RESULTS_FILE)
    if _fits(results, boxes):
        scores = score_detections(boxes.content, results, library=library)
        if abs(scores.summary["AP"] - get_last_logged(subject, "bbox/AP")) < _SAME_AP:
            return FoundBoxes(results, scores, from_run=True)
        logger.info(
            f"{RESULTS_FILE} of '{subject.label}' does not give the AP that the run logged last: "
            "its detections are worked out anew"
        )
    results = _infer(subject, boxes)
    return FoundBoxes(results, score_detections(boxes.content, results, library=library), False)


def _fits(results: Any, boxes: BoxSet) -> bool:
    """Whether something that anyone may have written is a list of detections on a set."""
    images = {image["id"] for image in boxes.content["images"]}
    return isinstance(results, list) and all(
        isinstance(found, dict)
        and all(key in found for key in _KEYS)
        and found["image_id"] in images
        and found["category_id"] in boxes.category_ids
        and isinstance(found["score"], int | float)
        and isinstance(found["bbox"], list)
        and len(found["bbox"]) == 4
        for found in results
    )


@torch.no_grad()
def _infer(subject: Subject, boxes: BoxSet) -> list[dict[str, Any]]:
    loader = Trainer.build_test_loader(subject.cfg, boxes.name)
    model = subject.model
    results: list[dict[str, Any]] = []
    for inputs in tqdm(loader, desc=f"{subject.label} detects", unit="batch"):
        for entry, output in zip(inputs, model(inputs), strict=True):
            if "instances" not in output:
                raise NothingToSee(f"the model of '{subject.label}' predicts no boxes")
            results += instances_to_coco_json(output["instances"].to("cpu"), entry["image_id"])
    for found in results:
        if found["category_id"] >= len(boxes.category_ids):
            raise UserError(
                f"'{subject.label}' predicts class {found['category_id']}, but '{boxes.json_file}' "
                f"has {len(boxes.category_ids)}"
            )
        found["category_id"] = boxes.category_ids[found["category_id"]]
    return results


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{len(names)}: {shown}{', …' if len(names) > 5 else ''}" if names else "unknown"
