# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "detections": how good the boxes of detectors are, and where they are worst."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.core.text import join_first
from qbheat_det.engine.data_sources import register_source
from qbheat_det.engine.trainer import Trainer

from .detection_charts import (
    plot_ap_by_class,
    plot_ap_by_size,
    plot_class_precision_recall,
    plot_precision_recall,
)
from .detection_errors import (
    ERROR_TYPES,
    MISSED,
    MISSED_MEANING,
    DetectionErrors,
    choose_threshold,
    count_errors,
    find_errors,
    find_false_alarms,
    find_missed_boxes,
)
from .detection_images import draw_false_alarms, draw_missed_boxes, draw_predictions
from .detection_scores import (
    CURVE_IOUS,
    DetectionScores,
    average_over_classes,
    evaluate_boxes,
    score_detections,
)
from .figure import FigureOptions, run_each
from .plotting import chart_image
from .run import Run

logger = logging.getLogger(__name__)
RESULTS_FILE = "coco_instances_results.json"
_TOLERANCE = 1e-6  # percent; the two libraries of COCO's metrics differ by rounding
_CELLS_PER_IMAGE = 2  # crops of errors for each image that is drawn
_LISTED = 50  # errors in the JSON


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


@dataclass(frozen=True)
class RunDetections:
    """The detections of one run on a test set.

    Attributes:
        label: of the run.
        from_run: whether the run's last evaluation wrote them; otherwise they are new.
        scores: COCO's metrics.
        errors: type of each detection.
        threshold: lowest score of detections that are counted as errors or drawn.
    """

    label: str
    from_run: bool
    scores: DetectionScores
    errors: DetectionErrors
    threshold: float


@register_figure("detections")
def draw_detections(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    json: str | None = None,
    images_root: str | None = None,
    score: float | None = None,
) -> Figure:
    """Evaluates the boxes of detectors; runs with the same test set share charts.

    Args:
        runs: that are no detectors are left out.
        options: ``images`` is not used, because evaluation needs annotations.
        json: annotations in COCO's format; None takes the test set of each run.
        images_root: folder of the images of ``json``.
        score: lowest score that is drawn and counted as an error; None takes the best F1.

    Raises:
        NotApplicable: there is no detector whose test set is on this machine.
        UserError: ``json`` and ``images_root`` do not go together, or are not valid.
    """
    if bool(json) != bool(images_root):
        raise UserError("--json and --images-root go together")
    given = _register_given(json, images_root) if json and images_root else None

    def evaluate(run: Run) -> tuple[DetectionSet, RunDetections]:
        run.require_kind("detector")
        test_set = read_detection_set(given or run.find_set("test"))
        return test_set, _evaluate(run, test_set, score)

    results = run_each(runs, evaluate, nothing="no detections")
    groups: dict[str, tuple[DetectionSet, list[RunDetections]]] = {}
    for test_set, found in results.found.values():
        groups.setdefault(str(test_set.json_file.resolve()), (test_set, []))[1].append(found)
    images: dict[str, Image] = {}
    for number, (test_set, own) in enumerate(groups.values(), start=1):
        suffix = f"_set{number}" if len(groups) > 1 else ""
        drawn = _draw_charts(test_set, own) | _draw_images(test_set, own, options.num_images)
        images |= {f"{name}{suffix}": image for name, image in drawn.items()}
    everyone = [found for _, own in groups.values() for found in own]
    paragraphs = _explain(list(groups.values()), everyone) + results.explain()
    data = {
        "sets": [_collect(test_set, own) for test_set, own in groups.values()],
        "left_out": results.left_out,
    }
    return Figure("detections", "Detections", paragraphs, images, data, _tabulate(everyone))


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


def _register_given(json_file: str, image_root: str) -> str:
    name = f"given: {Path(json_file).resolve()} with {Path(image_root).resolve()}"
    if name not in DatasetCatalog:
        source = {"json_file": json_file, "image_root": image_root, "labelled": True}
        register_source(name, source)
    return name


def _evaluate(run: Run, test_set: DetectionSet, score: float | None) -> RunDetections:
    """Takes the detections of the run's last evaluation if their AP is the one it logged last.

    Then the file is complete, and of this dataset and these weights. Otherwise the model is run.
    """
    names = tuple(run.cfg.MODEL.CLASS_NAMES)
    if names != test_set.class_names:
        raise NotApplicable(
            f"'{run.label}' has the classes {join_first(names)}, unlike '{test_set.json_file}' "
            f"({join_first(test_set.class_names)})"
        )
    results, from_run = run.read_evaluation(RESULTS_FILE), False
    if _is_valid(results, test_set):
        evaluator = evaluate_boxes(test_set.content, results)
        ap = score_detections(evaluator).summary["AP"]
        from_run = abs(ap - run.get_last_metric("bbox/AP")) < _TOLERANCE
    if not from_run:
        evaluator = evaluate_boxes(test_set.content, _predict(run, test_set))
    errors = find_errors(evaluator)
    threshold = choose_threshold(errors) if score is None else score
    return RunDetections(run.label, from_run, score_detections(evaluator), errors, threshold)


def _is_valid(results: Any, test_set: DetectionSet) -> bool:
    images = {image["id"] for image in test_set.content["images"]}
    try:
        return results is not None and all(
            entry["image_id"] in images
            and entry["category_id"] in test_set.category_ids
            and len([*map(float, entry["bbox"]), float(entry["score"])]) == 5
            for entry in results
        )
    except (KeyError, TypeError, ValueError):
        return False


@torch.no_grad()
def _predict(run: Run, test_set: DetectionSet) -> list[dict[str, Any]]:
    """Returns the detections of all images in COCO's format."""
    loader = Trainer.build_test_loader(run.cfg, test_set.name)
    model = run.model
    results: list[dict[str, Any]] = []
    for inputs in tqdm(loader, desc=f"detecting for {run.label}", unit="batch"):
        for entry, output in zip(inputs, model(inputs), strict=True):
            if "instances" not in output:
                raise NotApplicable(f"the model of '{run.label}' predicts no boxes")
            results += instances_to_coco_json(output["instances"].to("cpu"), entry["image_id"])
    for entry in results:
        entry["category_id"] = test_set.category_ids[entry["category_id"]]
    return results


def _draw_charts(test_set: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Image]:
    scores = {run.label: run.scores for run in runs}
    names = test_set.class_names
    charts = {
        "sizes": (plot_ap_by_size(scores), "Small is below 32 x 32 pixels, large above 96 x 96."),
        "precision_recall": (plot_precision_recall(scores), "The area is AP50, or AP75."),
    }
    if len(names) > 1:
        charts |= {
            "classes": (plot_ap_by_class(scores, names), "Average precision of each class."),
            "class_precision_recall": (
                plot_class_precision_recall(scores, names),
                "Precision over recall of each class at IoU 0.50; in brackets, its boxes.",
            ),
        }
    return {name: chart_image(chart, caption=caption) for name, (chart, caption) in charts.items()}


def _draw_images(
    test_set: DetectionSet, runs: Sequence[RunDetections], number: int
) -> dict[str, Image]:
    sources = test_set.content["images"], test_set.image_root, test_set.class_names
    errors = {run.label: (run.errors, run.threshold) for run in runs}
    images = draw_predictions(*sources, errors, number)
    for index, run in enumerate(runs, start=1):
        suffix = f"_{index}" if len(runs) > 1 else ""
        missed, alarms = _find_worst(test_set, run)
        cells = _CELLS_PER_IMAGE * number
        sheets = {
            "missed": draw_missed_boxes(*sources, run.errors, missed[:cells], run.label),
            "false_alarms": draw_false_alarms(*sources, run.errors, alarms[:cells], run.label),
        }
        images |= {f"{name}{suffix}": sheet for name, sheet in sheets.items() if sheet}
    return images


def _find_worst(test_set: DetectionSet, run: RunDetections) -> tuple[list[int], list[int]]:
    """Returns missed boxes and false alarms, the worst first."""
    areas = {image["id"]: image["width"] * image["height"] for image in test_set.content["images"]}
    missed = find_missed_boxes(run.errors, run.threshold, areas)
    return missed.tolist(), find_false_alarms(run.errors, run.threshold).tolist()


def _explain(
    groups: Sequence[tuple[DetectionSet, Sequence[RunDetections]]], runs: Sequence[RunDetections]
) -> list[str]:
    thresholds = ", ".join(f"{run.threshold:.3g} ({run.label})" for run in runs)
    types = "; ".join(f"{n}: {text}" for n, text in {**ERROR_TYPES, MISSED: MISSED_MEANING}.items())
    paragraphs = [
        "AP and curves are COCO's, of all detections. Errors are counted, and boxes drawn, from a "
        f"score upwards: {thresholds}. Unless --score sets it, it is the score with the best F1 at "
        "IoU 0.50; if no detection is correct, the one that keeps as many detections as boxes.",
        f"Types of errors, after TIDE (arXiv:2008.08115): {types}.",
        "Missed boxes that fill most of their image come first; the orange box is the detection "
        "with the highest score that covers it. False alarms are detections below IoU 0.5 with "
        "every box of any class, the highest scores first. Blue boxes are ground truth.",
    ]
    if lost := [run.label for run in runs if run.errors.none_correct]:
        paragraphs.append(f"No detection is correct at any score: {', '.join(lost)}.")
    if len(groups) > 1:
        listed = "; ".join(
            f"set {number} ({test_set.json_file.name}): {', '.join(run.label for run in own)}"
            for number, (test_set, own) in enumerate(groups, start=1)
        )
        paragraphs.append(f"Metrics on different test sets are not comparable: {listed}.")
    return paragraphs


def _tabulate(runs: Sequence[RunDetections]) -> Table:
    rows = [
        [f"{key} (%)", *(f"{run.scores.summary[key]:.2f}" for run in runs)]
        for key in runs[0].scores.summary
    ]
    rows.append(["boxes", *(f"{run.scores.num_boxes.sum():,}" for run in runs)])
    rows.append(["errors from score", *(f"{run.threshold:.3g}" for run in runs)])
    counts = [count_errors(run.errors, run.threshold) for run in runs]
    rows += [[name, *(f"{count[name]:,}" for count in counts)] for name in counts[0]]
    return Table(("", *(run.label for run in runs)), rows)


def _collect(test_set: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Any]:
    first, names = runs[0].scores, test_set.class_names
    return {
        "annotations": test_set.json_file.name,
        "images": len(test_set.content["images"]),
        "boxes": dict(zip(names, first.num_boxes.tolist(), strict=True)),
        "recall": first.recall,
        "error_types": {**ERROR_TYPES, MISSED: MISSED_MEANING},
        "runs": {run.label: _collect_run(test_set, run) for run in runs},
    }


def _collect_run(test_set: DetectionSet, run: RunDetections) -> dict[str, Any]:
    names, scores, errors = test_set.class_names, run.scores, run.errors
    missed, alarms = _find_worst(test_set, run)

    def describe(boxes: Any, index: int, **more: Any) -> Mapping[str, Any]:
        own = {"image_id": boxes.image_ids[index], "class": names[boxes.classes[index]]}
        return {**own, "xyxy": boxes.xyxy[index], **more}

    return {
        "detections_from": "the run's last evaluation" if run.from_run else "inference",
        **scores.summary,
        "class_ap": dict(zip(names, scores.class_ap, strict=True)),
        "class_ap50": dict(zip(names, scores.class_ap50, strict=True)),
        "errors_from_score": run.threshold,
        "errors": count_errors(errors, run.threshold),
        "num_missed": len(missed),
        "missed": [describe(errors.truth, b) for b in missed[:_LISTED]],
        "num_false_alarms": len(alarms),
        "false_alarms": [
            describe(errors.found, d, score=errors.scores[d], type=errors.types[d],
                     iou=errors.ious[d])
            for d in alarms[:_LISTED]
        ],
        "precision": {
            f"IoU {iou:.2f}": {
                "mean": average_over_classes(scores.precision[t]),
                "classes": dict(zip(names, scores.precision[t].T, strict=True)),
            }
            for t, iou in enumerate(CURVE_IOUS)
        },
    }  # fmt: skip
