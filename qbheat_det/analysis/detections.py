# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "detections": AP, precision-recall, errors, and boxes beside ground truth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from detectron2.data.detection_utils import read_image

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.engine.run_record import register_source

from .box_drawing import Color, RGBImage, add_heading, draw_boxes, get_class_color, tile_images
from .detection_errors import (
    ERROR_TYPES,
    MISSED,
    MISSED_MEANING,
    Array,
    DetectionErrors,
    choose_threshold,
    count_errors,
    find_errors,
    find_false_alarms,
    find_missed_boxes,
)
from .detection_scores import (
    CURVE_IOUS,
    DetectionScores,
    DetectionSet,
    detect,
    evaluate_boxes,
    plot_ap_by_class,
    plot_precision_recall,
    score_detections,
)
from .figure import FigureOptions, run_each
from .plotting import chart_image, shrink
from .run import Run

TRUTH_COLOR: Color = (64, 156, 255)
FOUND_COLOR: Color = (255, 150, 30)
_PANEL_SIDE, _CROP_SIDE = 560, 240  # pixels
_CELLS = 8  # crops of missed boxes, and of false alarms


@dataclass(frozen=True)
class RunDetections:
    """The detections of one run; ``threshold`` is the lowest score that is counted or drawn."""

    label: str
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
    """Evaluates the boxes of detectors on the test set of the first.

    Args:
        runs: that are no detectors, or have another test set, are left out.
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
    given = f"{json} with {images_root}" if json else None
    if given:
        source = {"json_file": json, "image_root": images_root, "labelled": True}
        register_source(given, source)

    sets: list[DetectionSet] = []

    def evaluate(run: Run) -> RunDetections:
        run.require_kind("detector")
        dataset = DetectionSet.read(given or run.find_set("test"))
        if sets and not dataset.json_file.samefile(sets[0].json_file):
            raise NotApplicable(f"the test set of '{run.label}' is '{dataset.json_file}'")
        evaluator = evaluate_boxes(dataset.content, detect(run, dataset))
        sets.append(dataset)
        errors = find_errors(evaluator)
        threshold = choose_threshold(errors) if score is None else score
        return RunDetections(run.label, score_detections(evaluator), errors, threshold)

    results = run_each(runs, evaluate, nothing="no detections")
    dataset, found = sets[0], list(results.found.values())
    images = draw_charts(dataset, found) | draw_predictions(dataset, found, options.num_images)
    for index, run in enumerate(found, start=1):
        name = f"errors_{index}" if len(found) > 1 else "errors"
        images |= {name: sheet} if (sheet := draw_errors(dataset, run)) else {}
    data = {**_collect(dataset, found), "left_out": results.left_out}
    paragraphs = [*_explain(found), *results.explain()]
    return Figure("detections", "Detections", paragraphs, images, data, _tabulate(found))


def draw_charts(dataset: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Image]:
    """Draws precision over recall and, of several classes, AP by class."""
    scores = {run.label: run.scores for run in runs}
    charts = {
        "precision_recall": (plot_precision_recall(scores), "The area is AP50, or AP75."),
    }
    if len(dataset.class_names) > 1:
        chart = plot_ap_by_class(scores, dataset.class_names)
        charts["classes"] = chart, "Average precision of each class."
    return {name: chart_image(chart, caption=caption) for name, (chart, caption) in charts.items()}


def draw_predictions(
    dataset: DetectionSet, runs: Sequence[RunDetections], number: int
) -> dict[str, Image]:
    """Draws ground truth and the detections of each run on so many images of the dataset.

    They are spread over its ids; images that cannot be read are left out.
    """
    records = sorted(dataset.content["images"], key=lambda record: record["id"])
    number = min(number, len(records))
    images: dict[str, Image] = {}
    for record in (records[index * len(records) // number] for index in range(number)):
        pixels = _read(dataset, record)
        if pixels is None:
            continue
        scale = min(1.0, _PANEL_SIDE / max(pixels.shape[:2]))
        small = shrink(pixels, _PANEL_SIDE) if scale < 1 else pixels
        panels = []
        truth = runs[0].errors.truth
        sources = [("Ground truth", truth, np.full(len(truth.classes), np.inf), 0.0)]
        sources += [(f"{run.label}, scores from {run.threshold:.2g}", run.errors.found,
                     run.errors.scores, run.threshold) for run in runs]  # fmt: skip
        for title, boxes, scores, threshold in sources:
            kept = (boxes.image_ids == record["id"]) & (scores >= threshold)
            classes = boxes.classes[kept].tolist()
            labels = [dataset.class_names[k] + (f" {score:.2f}" if np.isfinite(score) else "")
                      for k, score in zip(classes, scores[kept], strict=True)]  # fmt: skip
            colors = [get_class_color(k) for k in classes]
            drawn = draw_boxes(small, boxes.xyxy[kept] * scale, labels, colors)
            panels.append(add_heading(drawn, title))
        name = str(record["file_name"])
        sheet = tile_images(panels, columns=3 if len(panels) % 2 else 2)
        images[f"predictions_{len(images) + 1}"] = Image.from_rgb(
            sheet, alt=f"Boxes on {name}", caption=name, quality=82
        )
    return images


def draw_errors(dataset: DetectionSet, run: RunDetections) -> Image | None:
    """Draws crops of the largest missed boxes, and of the false alarms with the highest scores.

    None if there are no errors, or their images cannot be read.
    """
    errors, names = run.errors, dataset.class_names
    records = {record["id"]: record for record in dataset.content["images"]}
    missed = find_missed_boxes(errors, run.threshold)[:_CELLS].tolist()
    alarms = find_false_alarms(errors, run.threshold)[:_CELLS].tolist()
    crops = [(errors.truth, b, f"missed: {names[errors.truth.classes[b]]}", TRUTH_COLOR)
             for b in missed]  # fmt: skip
    crops += [
        (errors.found, d, f"{names[errors.found.classes[d]]} {errors.scores[d]:.2f}", FOUND_COLOR)
        for d in alarms
    ]
    cells, texts = [], []
    for boxes, index, text, color in crops:
        pixels = _read(dataset, records[int(boxes.image_ids[index])])
        if pixels is not None:
            cells.append(add_heading(crop_box(pixels, boxes.xyxy[index], color), text))
            texts.append(text)
    if not cells:
        return None
    sheet = tile_images(cells, columns=4)
    caption = f"{run.label}: largest missed boxes, and false alarms with the highest scores"
    return Image.from_rgb(sheet, alt="; ".join(texts), caption=caption, quality=82)


def crop_box(image: RGBImage, box: Array, color: Color) -> RGBImage:
    """Returns a box (4,) XYXY of an image, drawn, with half its length around it."""
    height, width = image.shape[:2]
    margin = max(24.0, float(np.max(box[2:] - box[:2])) / 2)
    low = np.clip(np.floor(box[:2] - margin), 0, [width - 1, height - 1]).astype(int)
    high = np.clip(np.ceil(box[2:] + margin), low + 1, [width, height]).astype(int)
    part = image[low[1] : high[1], low[0] : high[0]]
    scale = _CROP_SIDE / max(part.shape[:2])
    shifted = (box - np.tile(low, 2))[None] * scale
    return draw_boxes(shrink(part, _CROP_SIDE), shifted, [""], [color], min_side=0)


def _read(dataset: DetectionSet, record: Mapping[str, Any]) -> RGBImage | None:
    path = dataset.image_root / record["file_name"]
    try:
        return np.ascontiguousarray(read_image(str(path), format="RGB"))
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for broken files
        return None


def _explain(runs: Sequence[RunDetections]) -> list[str]:
    thresholds = ", ".join(f"{run.threshold:.3g} ({run.label})" for run in runs)
    types = "; ".join(f"{n}: {text}" for n, text in {**ERROR_TYPES, MISSED: MISSED_MEANING}.items())
    return [
        "AP and curves are COCO's, of all detections. Errors are counted, and boxes drawn, from a "
        f"score upwards: {thresholds}. Unless --score sets it, it is the score with the best F1 at "
        "IoU 0.50; if no detection is correct, the one that keeps as many detections as boxes.",
        f"Types of errors, after TIDE (arXiv:2008.08115): {types}.",
    ]


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


def _collect(dataset: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Any]:
    first, names = runs[0].scores, dataset.class_names

    def collect_run(run: RunDetections) -> dict[str, Any]:
        return {
            **run.scores.summary,
            "class_ap": dict(zip(names, run.scores.class_ap, strict=True)),
            "errors_from_score": run.threshold,
            "errors": count_errors(run.errors, run.threshold),
            "precision": dict(zip(CURVE_IOUS, run.scores.precision, strict=True)),
        }

    return {
        "annotations": dataset.json_file.name,
        "images": len(dataset.content["images"]),
        "boxes": dict(zip(names, first.num_boxes.tolist(), strict=True)),
        "recall": first.recall,
        "runs": {run.label: collect_run(run) for run in runs},
    }
