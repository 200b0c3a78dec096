# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "detections": how good the boxes of detectors are, and where they are worst."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, Table, register_figure

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
from .detection_results import (
    DetectionSet,
    evaluate_run,
    read_detection_set,
    register_given,
)
from .detection_scores import (
    CURVE_IOUS,
    DetectionScores,
    average_over_classes,
    score_detections,
)
from .figure import FigureOptions, run_each
from .plotting import chart_image
from .run import Run

_CELLS_PER_IMAGE = 2  # crops of errors for each image that is drawn
_LISTED = 50  # errors in the JSON


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
    given = register_given(json, images_root) if json and images_root else None

    def evaluate(run: Run) -> tuple[DetectionSet, RunDetections]:
        run.require_kind("detector")
        dataset = read_detection_set(given or run.find_set("test"))
        return dataset, _evaluate(run, dataset, score)

    results = run_each(runs, evaluate, nothing="no detections")
    groups: dict[str, tuple[DetectionSet, list[RunDetections]]] = {}
    for dataset, found in results.found.values():
        groups.setdefault(str(dataset.json_file.resolve()), (dataset, []))[1].append(found)
    images: dict[str, Image] = {}
    for number, (dataset, own) in enumerate(groups.values(), start=1):
        suffix = f"_set{number}" if len(groups) > 1 else ""
        drawn = _draw_charts(dataset, own) | _draw_images(dataset, own, options.num_images)
        images |= {f"{name}{suffix}": image for name, image in drawn.items()}
    everyone = [found for _, own in groups.values() for found in own]
    paragraphs = _explain(list(groups.values()), everyone) + results.explain()
    data = {
        "sets": [_collect(dataset, own) for dataset, own in groups.values()],
        "left_out": results.left_out,
    }
    return Figure("detections", "Detections", paragraphs, images, data, _tabulate(everyone))


def _evaluate(run: Run, dataset: DetectionSet, score: float | None) -> RunDetections:
    evaluator, from_run = evaluate_run(run, dataset)
    errors = find_errors(evaluator)
    threshold = choose_threshold(errors) if score is None else score
    return RunDetections(run.label, from_run, score_detections(evaluator), errors, threshold)


def _draw_charts(dataset: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Image]:
    scores = {run.label: run.scores for run in runs}
    names = dataset.class_names
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
    dataset: DetectionSet, runs: Sequence[RunDetections], number: int
) -> dict[str, Image]:
    sources = dataset.content["images"], dataset.image_root, dataset.class_names
    errors = {run.label: (run.errors, run.threshold) for run in runs}
    images = draw_predictions(*sources, errors, number)
    for index, run in enumerate(runs, start=1):
        suffix = f"_{index}" if len(runs) > 1 else ""
        missed, alarms = _find_worst(dataset, run)
        cells = _CELLS_PER_IMAGE * number
        sheets = {
            "missed": draw_missed_boxes(*sources, run.errors, missed[:cells], run.label),
            "false_alarms": draw_false_alarms(*sources, run.errors, alarms[:cells], run.label),
        }
        images |= {f"{name}{suffix}": sheet for name, sheet in sheets.items() if sheet}
    return images


def _find_worst(dataset: DetectionSet, run: RunDetections) -> tuple[list[int], list[int]]:
    """Returns missed boxes and false alarms, the worst first."""
    areas = {image["id"]: image["width"] * image["height"] for image in dataset.content["images"]}
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
            f"set {number} ({dataset.json_file.name}): {', '.join(run.label for run in own)}"
            for number, (dataset, own) in enumerate(groups, start=1)
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


def _collect(dataset: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Any]:
    first, names = runs[0].scores, dataset.class_names
    return {
        "annotations": dataset.json_file.name,
        "images": len(dataset.content["images"]),
        "boxes": dict(zip(names, first.num_boxes.tolist(), strict=True)),
        "recall": first.recall,
        "error_types": {**ERROR_TYPES, MISSED: MISSED_MEANING},
        "runs": {run.label: _collect_run(dataset, run) for run in runs},
    }


def _collect_run(dataset: DetectionSet, run: RunDetections) -> dict[str, Any]:
    names, scores, errors = dataset.class_names, run.scores, run.errors
    missed, alarms = _find_worst(dataset, run)

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
