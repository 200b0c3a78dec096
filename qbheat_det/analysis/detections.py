# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "detections" for detectors, and the figure "classes" for classifiers."""

import dataclasses
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from matplotlib.figure import Figure as Chart
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data import merge_images, open_source, register_source
from qbheat_det.data.images import read_image
from qbheat_det.engine.trainer import Trainer
from qbheat_det.inference.drawing import Color, RGBImage, draw_boxes, get_class_color
from qbheat_det.modeling.contracts import TILE
from qbheat_det.tasks import DETECTION

from . import detection_metrics as metrics
from . import plotting
from .figures import Figure, Image, NotApplicable, Table
from .plotting import add_heading, chart_image, crop_box, plot_confusion, tile_images
from .run import FigureOptions, Run, run_each

_MISSED_COLOR: Color = (64, 156, 255)
_WRONG_COLOR: Color = (255, 150, 30)
_PANEL_SIDE = 560  # largest side of an image with boxes, in pixels
_CROP_SIDE = 240  # longer side of a crop, in pixels
_NUM_BEST = 4  # number of images with few errors at the top
_MAX_CROPS = 8  # largest number of crops, for missed boxes and for wrong detections
_MAX_CLASSES = 40  # in the AP chart; of more classes, it shows the 20 best and the 20 worst
_CLASSES_EXPLANATION = (
    "Rows are true classes, columns predicted ones; the color is the share of the row. Blue cells "
    "are correct, red ones wrong. Colors exaggerate small shares.",
)


@dataclass(frozen=True)
class DetectionSet:
    """A registered dataset. ``class_names`` and ``category_ids`` are indexed by class."""

    name: str
    json_file: Path
    image_root: Path
    content: dict[str, Any]  # content of ``json_file``
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]


@dataclass(frozen=True)
class RunDetections:
    """Metrics and errors of a run.

    Detections with scores below ``threshold`` are neither drawn nor counted as errors.
    """

    label: str
    scores: metrics.DetectionScores
    errors: metrics.DetectionErrors
    threshold: float
    weights: Path
    image_ids: set[int]  # of the images that the run could read


def draw_detections(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    data: str | None = None,
    threshold: float | None = None,
) -> Figure:
    """Draws AP, boxes and errors of detectors on the first detector's test set, or on ``data``.

    ``data`` is in any format of ``--data``. If it has a validation part, only this part is used.
    ``options.images`` is the image folder of a COCO json. Detections with scores below
    ``threshold`` are neither drawn nor counted as errors. If it is None, each run uses the
    threshold that maximizes its F1, rounded down to two decimals.

    Raises:
        NotApplicable: no detector's test set is on this machine.
        UserError: ``data`` is invalid or has no boxes.
    """
    if data:
        opened = open_source(data, str(options.images or ""))
        if not opened.has_boxes:
            raise UserError(f"'{data}' has no boxes")
        source = opened.val or opened.train
        register_source(data, source, annotations=opened.annotations[source.part])
    evaluation = _Evaluation(data, threshold)
    results = run_each(runs, evaluation, nothing="no detections")
    evaluated = list(results.by_label.values())
    dataset = evaluation.find_common_set(evaluated)
    figure = results.draw(
        "detections",
        "Detections",
        _explain(evaluated),
        _draw_images(dataset, evaluated, options.num_images),
        _tabulate(evaluated),
        **_collect_numbers(dataset, evaluated),
    )
    if len(evaluated) > 1:
        return figure
    single = next(run for run in runs if run.label == evaluated[0].label)
    headline, command = summarize(evaluated[0], single)
    caution = warn_of_other_pictures(dataset)
    return dataclasses.replace(figure, headline=headline, command=command, caution=caution)


class _Evaluation:
    """Evaluates runs on one test set: ``data``, or that of the first run."""

    def __init__(self, data: str | None, threshold: float | None) -> None:
        """``draw_detections`` describes the arguments."""
        self._data = data
        self._threshold = threshold
        self._dataset: DetectionSet | None = None

    def __call__(self, run: Run) -> RunDetections:
        """Evaluates a run. Raises ``NotApplicable`` if its dataset differs from the first run's."""
        run.require_task(DETECTION)
        dataset = read_set(self._data or run.find_set("test"))
        first = self._dataset
        # Other formats are converted to COCO json once per run, so the file names differ.
        if first and (dataset.image_root, dataset.content) != (first.image_root, first.content):
            raise NotApplicable(f"the test set of '{run.label}' is '{dataset.json_file}'")
        detections, image_ids = _detect(run, dataset)
        evaluator = metrics.evaluate_boxes(keep_images(dataset.content, image_ids), detections)
        self._dataset = first or dataset
        errors = metrics.find_errors(evaluator)
        threshold = self._threshold
        if threshold is None:
            # Two decimals, so that the command on the page finds the same boxes.
            threshold = math.floor(100 * metrics.choose_threshold(errors)) / 100
        return RunDetections(
            label=run.label,
            scores=metrics.score_detections(evaluator),
            errors=errors,
            threshold=threshold,
            weights=run.weights,
            image_ids=image_ids,
        )

    def find_common_set(self, evaluated: Sequence[RunDetections]) -> DetectionSet:
        """Returns the test set with the images that all evaluated runs could read."""
        assert self._dataset
        common_ids = set.intersection(*(run.image_ids for run in evaluated))
        content = keep_images(self._dataset.content, common_ids)
        return dataclasses.replace(self._dataset, content=content)


def _draw_images(
    dataset: DetectionSet, evaluated: Sequence[RunDetections], num_images: int
) -> dict[str, Image]:
    """Returns the charts and pictures by name: AP, confusions, boxes and errors."""
    images: dict[str, Image] = {}
    if len(evaluated) == 1:
        images |= draw_best(dataset, evaluated[0])
    caption = f"AP on {len(dataset.content['images']):,} images."
    images["ap"] = chart_image(plot_ap(evaluated, dataset.class_names), caption=caption)
    suffixes = [""]
    if len(evaluated) > 1:
        suffixes = [f"_{number}" for number in range(1, len(evaluated) + 1)]
    num_classes = len(dataset.class_names)
    if num_classes > 1:
        for suffix, run in zip(suffixes, evaluated, strict=True):
            counts = metrics.count_confusions(run.errors, run.threshold, num_classes)
            chart = plot_confusion(counts, [*dataset.class_names, "background"], unit="boxes")
            caption = f"{run.label}: true and detected classes, scores from {run.threshold:.2g}"
            images[f"confusion{suffix}"] = chart_image(chart, caption=caption)
    images |= draw_predictions(dataset, evaluated, num_images)
    for suffix, run in zip(suffixes, evaluated, strict=True):
        sheet = draw_errors(dataset, run)
        if sheet is not None:
            images[f"errors{suffix}"] = sheet
    return images


def summarize(result: RunDetections, run: Run) -> tuple[str, str]:
    """Returns a sentence with the numbers of found and wrong objects, and a command to predict."""
    counts = metrics.count_errors(result.errors, result.threshold)
    num_boxes = counts["correct"] + counts["missed"]
    threshold = f"{result.threshold:.2g}"
    headline = (
        f"Finds {counts['correct']:,} of {num_boxes:,} objects in {len(result.image_ids):,} "
        f"images, with {counts['wrong']:,} wrong boxes, at threshold {threshold}"
    )
    command = shlex.join(["qbheat", "predict", "--weights", str(run.path), "--images", "photos/"])
    return headline, f"{command} --output drawn/ --threshold {threshold}"


def warn_of_other_pictures(dataset: DetectionSet) -> str:
    """Returns a sentence if each image has objects. Otherwise, returns ""."""
    with_objects = {annotation["image_id"] for annotation in dataset.content["annotations"]}
    if any(image["id"] not in with_objects for image in dataset.content["images"]):
        return ""
    return (
        f"All these images have objects. In other pictures, a detector that only knows "
        f"{join_first(dataset.class_names)} may take similar things for them, with high scores. "
        "Some images without objects in the training and test data prevent and show this."
    )


def read_set(name: str) -> DetectionSet:
    """Reads a registered dataset. Raises ``NotApplicable`` if it has no boxes."""
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    content: dict[str, Any] = {}
    if json_file:  # it was checked when the dataset was registered
        content = json.loads(Path(json_file).read_bytes())
    if not content.get("annotations"):
        raise NotApplicable(f"'{name}' has no boxes in COCO's format")
    categories = sorted(content["categories"], key=lambda category: category["id"])
    return DetectionSet(
        name=name,
        json_file=Path(json_file),
        image_root=Path(metadata.get("image_root") or ""),
        content=content,
        class_names=tuple(str(category["name"]) for category in categories),
        category_ids=tuple(int(category["id"]) for category in categories),
    )


def keep_images(content: dict[str, Any], image_ids: set[int]) -> dict[str, Any]:
    """Returns the content of a COCO json with only the images ``image_ids`` and their objects."""
    images = [image for image in content["images"] if image["id"] in image_ids]
    annotations = [
        annotation for annotation in content["annotations"] if annotation["image_id"] in image_ids
    ]
    return {**content, "images": images, "annotations": annotations}


def _detect(run: Run, dataset: DetectionSet) -> tuple[list[dict[str, Any]], set[int]]:
    """Returns the detections of a run in COCO format, and the ids of the images it could read.

    Reads the detections of the run's last evaluation if the run's weights made them. Otherwise,
    runs the model. Classes are compared by name, and may have another order.
    """
    names = tuple(run.cfg.MODEL.CLASS_NAMES)
    if sorted(names) != sorted(dataset.class_names):
        raise NotApplicable(
            f"'{run.label}' has the classes {join_first(names)}, unlike '{dataset.json_file}' "
            f"({join_first(dataset.class_names)})"
        )
    results_file = run.find_detections(dataset.name)
    if results_file is None or names != dataset.class_names:
        return _run_detector(run, dataset)
    image_ids = {image["id"] for image in dataset.content["images"]}
    predictions_file = results_file.with_name("instances_predictions.pth")
    if predictions_file.is_file():  # also lists images without detections
        predictions = torch.load(predictions_file, weights_only=True)
        image_ids = {prediction["image_id"] for prediction in predictions}
    return list(json.loads(results_file.read_bytes())), image_ids


@torch.no_grad()
def _run_detector(run: Run, dataset: DetectionSet) -> tuple[list[dict[str, Any]], set[int]]:
    """Runs the model. Returns its detections in COCO format, and the ids of the readable images."""
    loader = Trainer.build_test_loader(run.cfg, dataset.name)
    model = run.model
    id_of_name = dict(zip(dataset.class_names, dataset.category_ids, strict=True))
    category_ids = [id_of_name[name] for name in run.cfg.MODEL.CLASS_NAMES]

    def predict() -> Iterator[tuple[Any, Any, Instances]]:
        """Yields (image id, tile or None, detections) for each image or tile."""
        for inputs in tqdm(loader, desc=f"detecting for {run.label}", unit="batch"):
            for entry, output in zip(inputs, model(inputs), strict=True):
                yield entry["image_id"], entry.get(TILE), output["instances"].to("cpu")

    results: list[dict[str, Any]] = []
    image_ids = set()
    for image_id, instances in merge_images(predict()):  # merges the tiles of an image
        image_ids.add(image_id)
        for result in instances_to_coco_json(instances, image_id):
            results.append({**result, "category_id": category_ids[result["category_id"]]})
    return results, image_ids


@plotting.themed
def plot_ap(runs: Sequence[RunDetections], class_names: Sequence[str]) -> Chart:
    """Draws the mean AP, and the AP of each class that has boxes, with one bar per run.

    If more than 40 classes have boxes, draws only the 20 best and the 20 worst of them.
    """
    num_boxes = runs[0].scores.num_boxes
    total_ap = np.sum([run.scores.class_ap for run in runs], axis=0)  # (K,)
    descending = np.argsort(-total_ap, kind="stable").tolist()
    order = [k for k in descending if num_boxes[k]]
    if len(order) > _MAX_CLASSES:
        half = _MAX_CLASSES // 2
        order = order[:half] + order[-half:]
    names = [f"all classes ({num_boxes.sum():,})"]
    for k in order:
        names.append(f"{plotting.to_text(class_names[k], max_length=24)} ({num_boxes[k]:,})")
    row_height = max(0.3, 0.15 * len(runs))  # inches
    figure, axes = plotting.start_chart(height=1.3 + len(names) * row_height)
    styles = plotting.list_styles(len(runs))
    bar_height = 0.8 / len(runs)  # a class has a row of height 1; its bars fill 80 % of it
    for index, run in enumerate(runs):
        row_centers = np.arange(len(names))
        positions = row_centers - 0.4 + (index + 0.5) * bar_height
        values = np.nan_to_num([run.scores.summary["AP"], *run.scores.class_ap[order]])
        bars = axes.barh(
            positions,
            values,
            0.92 * bar_height,
            color=styles[index]["color"],
            label=plotting.to_text(run.label),
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first row is at the top
    axes.set_xlabel("AP (%), IoU 0.50 to 0.95; numbers of boxes in brackets")
    plotting.add_legend(figure, axes)
    return figure


def draw_best(dataset: DetectionSet, run: RunDetections) -> dict[str, Image]:
    """Draws the detections on the images with the smallest share of errors.

    Of images without errors, those with the most objects come first. Images in which nothing is
    found are left out.
    """
    num_errors = metrics.count_errors_by_image(run.errors, run.threshold)
    num_objects = Counter(run.errors.ground_truth.image_ids.tolist())
    missed = metrics.find_missed_boxes(run.errors, run.threshold)
    num_missed = Counter(run.errors.ground_truth.image_ids[missed].tolist())

    def sort_key(record: Mapping[str, Any]) -> tuple[float, int, int]:
        image_id = record["id"]
        return num_errors[image_id] / num_objects[image_id], -num_objects[image_id], image_id

    records = [
        record
        for record in dataset.content["images"]
        if num_objects[record["id"]] > num_missed[record["id"]]
    ]
    images: dict[str, Image] = {}
    for index, record in enumerate(sorted(records, key=sort_key)[:_NUM_BEST], start=1):
        image_id = record["id"]
        pixels, scale = _read_panel(dataset, record)
        num_found = num_objects[image_id] - num_missed[image_id]
        num_wrong = num_errors[image_id] - num_missed[image_id]
        images[f"best_{index}"] = Image.from_rgb(
            _draw_boxes_of(run, dataset, image_id, pixels, scale),
            alt=f"Boxes on {record['file_name']}",
            caption=f"{record['file_name']}: {num_found} of {num_objects[image_id]} found, "
            f"{num_wrong} wrong",
            wide=False,
        )
    return images


def draw_predictions(
    dataset: DetectionSet, runs: Sequence[RunDetections], number: int
) -> dict[str, Image]:
    """Draws ground truth and detections on ``number`` images.

    Chooses the images with the most errors or, for several runs, those on which the runs' numbers
    of errors differ most. Equal images are in the order of their ids.
    """
    counts = [metrics.count_errors_by_image(run.errors, run.threshold) for run in runs]

    def sort_key(record: Mapping[str, Any]) -> tuple[int, int]:
        """Returns a small key for an image that shows many errors or differences."""
        num_errors = [count[record["id"]] for count in counts]  # of each run
        if len(num_errors) == 1:
            interest = num_errors[0]
        else:
            interest = max(num_errors) - min(num_errors)
        return -interest, record["id"]

    records = sorted(dataset.content["images"], key=sort_key)
    ground_truth = runs[0].errors.ground_truth
    images: dict[str, Image] = {}
    for index, record in enumerate(records[:number], start=1):
        pixels, scale = _read_panel(dataset, record)
        in_image = ground_truth.image_ids == record["id"]
        classes = ground_truth.classes[in_image].tolist()
        labels = [dataset.class_names[k] for k in classes]
        colors = [get_class_color(k) for k in classes]
        drawn = draw_boxes(pixels, ground_truth.xyxy[in_image] * scale, labels, colors)
        panels = [add_heading(drawn, "Ground truth")]
        for run in runs:
            drawn = _draw_boxes_of(run, dataset, record["id"], pixels, scale)
            panels.append(add_heading(drawn, f"{run.label}, scores from {run.threshold:.2g}"))
        columns = 2 if len(panels) % 2 == 0 else 3  # ground truth and each run
        images[f"predictions_{index}"] = Image.from_rgb(
            tile_images(panels, columns=columns),
            alt=f"Boxes on {record['file_name']}",
            caption=str(record["file_name"]),
        )
    return images


def _draw_boxes_of(
    run: RunDetections, dataset: DetectionSet, image_id: int, pixels: RGBImage, scale: float
) -> RGBImage:
    """Draws a run's detections on an image, which has ``scale`` times the size of its file."""
    detections = run.errors.detections
    scores = run.errors.scores
    kept = (detections.image_ids == image_id) & (scores >= run.threshold)
    classes = detections.classes[kept].tolist()
    labels = [
        f"{dataset.class_names[k]} {score:.2f}"
        for k, score in zip(classes, scores[kept], strict=True)
    ]
    colors = [get_class_color(k) for k in classes]
    return draw_boxes(pixels, detections.xyxy[kept] * scale, labels, colors)


def _read_panel(dataset: DetectionSet, record: Mapping[str, Any]) -> tuple[RGBImage, float]:
    """Reads an image. Returns it with at most ``_PANEL_SIDE`` pixels per side, and the scale."""
    pixels = _read_image(dataset, record)
    scale = min(1.0, _PANEL_SIDE / max(pixels.shape[:2]))
    if scale < 1:
        pixels = plotting.resize_longest_side(pixels, _PANEL_SIDE)
    return pixels, scale


def _read_image(dataset: DetectionSet, record: Mapping[str, Any]) -> RGBImage:
    path = dataset.image_root / record["file_name"]
    return np.ascontiguousarray(read_image(str(path), format="RGB"))


def draw_errors(dataset: DetectionSet, run: RunDetections) -> Image | None:
    """Draws crops of the largest missed boxes and of wrong detections with the highest scores.

    Returns None if no box is missed and no detection is wrong.
    """
    errors = run.errors
    records = {record["id"]: record for record in dataset.content["images"]}
    crops: list[RGBImage] = []
    texts: list[str] = []

    def add_crop(boxes: metrics.Boxes, index: int, text: str, color: Color) -> None:
        pixels = _read_image(dataset, records[int(boxes.image_ids[index])])
        crop = crop_box(pixels, boxes.xyxy[index], color, _CROP_SIDE)
        crops.append(add_heading(crop, text))
        texts.append(text)

    for index in metrics.find_missed_boxes(errors, run.threshold)[:_MAX_CROPS].tolist():
        name = dataset.class_names[errors.ground_truth.classes[index]]
        add_crop(errors.ground_truth, index, f"missed: {name}", _MISSED_COLOR)
    for index in metrics.find_wrong(errors, run.threshold)[:_MAX_CROPS].tolist():
        name = dataset.class_names[errors.detections.classes[index]]
        add_crop(errors.detections, index, f"{name} {errors.scores[index]:.2f}", _WRONG_COLOR)
    if not crops:
        return None
    caption = f"{run.label}: largest missed boxes, and wrong detections with the highest scores"
    return Image.from_rgb(tile_images(crops, columns=4), alt="; ".join(texts), caption=caption)


def _explain(runs: Sequence[RunDetections]) -> list[str]:
    """Returns the paragraphs of the figure's explanation."""
    thresholds = ", ".join(f"{run.threshold:.3g} ({run.label})" for run in runs)
    paragraphs = [
        "AP is COCO's and uses all detections. Errors and images use detections from a score "
        f"threshold: {thresholds}. By default it maximizes F1 at IoU 0.50 (--threshold).",
        "A correct detection matches a box of its class at IoU 0.50. A missed box has no match.",
        "A wrong detection may be an object without a label, which qbheat inspect --labels lists.",
        "If the weights or the threshold were chosen on these images, the numbers for new images "
        "are slightly lower.",
    ]
    if len(runs) > 1:
        paragraphs.append("The images are those on which the runs' numbers of errors differ most.")
    else:
        paragraphs.append("The first images are found best, the last ones have the most errors.")
    return paragraphs


def _tabulate(runs: Sequence[RunDetections]) -> Table:
    """Returns a table with a column per run and a row per metric."""
    columns = []
    for run in runs:
        column = {}
        for key, value in run.scores.summary.items():
            column[f"{key} (%)"] = "no such boxes" if math.isnan(value) else f"{value:.2f}"
        column["boxes"] = f"{run.scores.num_boxes.sum():,}"
        column["errors from score"] = f"{run.threshold:.3g}"
        for name, count in metrics.count_errors(run.errors, run.threshold).items():
            column[name] = f"{count:,}"
        columns.append(column)
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return Table(("", *(run.label for run in runs)), rows)


def _collect_numbers(dataset: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Any]:
    """Returns the numbers of the figure for its JSON file."""
    names = dataset.class_names
    numbers_of_runs = {}
    for run in runs:
        numbers_of_runs[run.label] = {
            **run.scores.summary,
            "class_ap": dict(zip(names, run.scores.class_ap, strict=True)),
            "errors_from_score": run.threshold,
            "errors": metrics.count_errors(run.errors, run.threshold),
        }
    return {
        "images": len(dataset.content["images"]),
        "boxes": dict(zip(names, runs[0].scores.num_boxes.tolist(), strict=True)),
        "runs": numbers_of_runs,
    }


def draw_classes(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the confusion matrix of each classifier's last evaluation."""
    results = run_each(runs, _read_confusions, nothing="no confusion matrix")
    images = {}
    rows = []
    data = {}
    for index, label in enumerate(results.by_label, start=1):
        names, counts = results.by_label[label]
        top1 = f"{100 * counts.trace() / max(1, counts.sum()):.2f}"
        key = f"confusion_{index}" if len(results.by_label) > 1 else "confusion"
        caption = f"{label}: top-1 {top1} %"
        images[key] = chart_image(plot_confusion(counts, names), caption=caption)
        rows.append((label, top1, f"{counts.sum():,}"))
        data[label] = {"classes": names, "matrix": counts}
    table = Table(("Run", "top-1 (%)", "images"), rows)
    title = "Confusion of classes"
    return results.draw("classes", title, _CLASSES_EXPLANATION, images, table, runs=data)


def _read_confusions(run: Run) -> tuple[list[str], metrics.Indices]:
    """Reads the class names and confusion matrix (K, K) of a run's last evaluation."""
    folder = run.folder or (run.checkpoint or run.path).parent
    files = list(folder.glob("inference/*/classification.json"))
    if not files:
        raise NotApplicable(f"'{run.label}' has no inference/*/classification.json")
    content = json.loads(max(files, key=lambda path: path.stat().st_mtime).read_bytes())
    names = []
    num_correct = []  # of each class
    for entry in content["classes"]:
        names.append(entry["name"])
        top1 = entry["top1"] or 0.0  # percent; None for a class without images
        num_correct.append(entry["images"] * top1 / 100)
    index_of = {name: index for index, name in enumerate(names)}
    counts = np.diag(np.round(num_correct).astype(np.int64))
    for pair in content["confusions"]:
        counts[index_of[pair["class"]], index_of[pair["taken_for"]]] = pair["images"]
    return names, counts
