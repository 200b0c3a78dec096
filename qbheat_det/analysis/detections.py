# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "detections" for detectors, and the figure "classes" for classifiers."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from matplotlib.figure import Figure as MplFigure
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

_TRUTH_COLOR: Color = (64, 156, 255)
_FOUND_COLOR: Color = (255, 150, 30)
_PANEL_SIDE, _CROP_SIDE = 560, 240  # pixels
_CELLS = 8  # number of crops of missed boxes, and of wrong detections
_MOST_CLASSES = 40  # largest number in the AP chart, else the best and worst 20
_CLASSES_EXPLANATION = (
    "Rows are true classes, columns predicted ones; the color is the share of the row. Blue cells "
    "are correct, red ones wrong. Colors exaggerate small shares.",
)


@dataclass(frozen=True)
class DetectionSet:
    """A registered dataset. Class names and category ids are in contiguous order."""

    name: str
    json_file: Path
    image_root: Path
    content: dict[str, Any]  # content of ``json_file``
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]


@dataclass(frozen=True)
class RunDetections:
    """Metrics and errors of a run. Detections below ``threshold`` are not drawn or counted."""

    label: str
    scores: metrics.DetectionScores
    errors: metrics.DetectionErrors
    threshold: float
    weights: Path


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
    ``threshold`` are not drawn or counted. If it is None, the threshold that maximizes F1 is used.

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
    sets: list[DetectionSet] = []
    read: list[set[int]] = []  # the ids of the images that each run could read

    def evaluate(run: Run) -> RunDetections:
        run.require_task(DETECTION)
        dataset = read_set(data or run.find_set("test"))
        # Converted data sets have a file for each run, so compare the contents.
        if sets and (dataset.image_root, dataset.content) != (sets[0].image_root, sets[0].content):
            raise NotApplicable(f"the test set of '{run.label}' is '{dataset.json_file}'")
        detections, image_ids = _detect(run, dataset)
        content = keep_images(dataset.content, image_ids)
        evaluator = metrics.evaluate_boxes(content, detections)
        sets.append(dataset)
        read.append(image_ids)
        errors = metrics.find_errors(evaluator)
        chosen = metrics.choose_threshold(errors) if threshold is None else threshold
        scores = metrics.score_detections(evaluator)
        return RunDetections(run.label, scores, errors, chosen, run.weights)

    results = run_each(runs, evaluate, nothing="no detections")
    found = list(results.found.values())
    content = keep_images(sets[0].content, set.intersection(*read))
    dataset = dataclasses.replace(sets[0], content=content)
    about = f"AP on {len(dataset.content['images']):,} images."
    images = {"ap": chart_image(plot_ap(found, dataset.class_names), caption=about)}
    images |= draw_predictions(dataset, found, options.num_images)
    for index, run in enumerate(found, start=1):
        suffix = f"_{index}" if len(found) > 1 else ""
        if sheet := draw_errors(dataset, run):
            images[f"errors{suffix}"] = sheet
        if (number := len(dataset.class_names)) > 1:
            counts = metrics.count_confusions(run.errors, run.threshold, number)
            chart = plot_confusion(counts, [*dataset.class_names, "background"], unit="boxes")
            about = f"{run.label}: true and detected classes, scores from {run.threshold:.2g}"
            images[f"confusion{suffix}"] = chart_image(chart, caption=about)
    text, table, numbers = _explain(found), _tabulate(found), _collect(dataset, found)
    return results.draw("detections", "Detections", text, images, table, **numbers)


def read_set(name: str) -> DetectionSet:
    """Reads a registered dataset. Raises ``NotApplicable`` if it has no boxes."""
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    # The file was checked when the dataset was registered.
    content = json.loads(Path(json_file).read_bytes()) if json_file else {}
    if not content.get("annotations"):
        raise NotApplicable(f"'{name}' has no boxes in COCO's format")
    categories = sorted(content["categories"], key=lambda category: category["id"])
    names, ids = zip(*((str(one["name"]), int(one["id"])) for one in categories), strict=True)
    root = Path(metadata.get("image_root") or "")
    return DetectionSet(name, Path(json_file), root, content, names, ids)


def keep_images(content: dict[str, Any], image_ids: set[int]) -> dict[str, Any]:
    """Returns COCO's lists without the images that are not in ``image_ids``, and their objects."""
    images = [one for one in content["images"] if one["id"] in image_ids]
    annotations = [one for one in content["annotations"] if one["image_id"] in image_ids]
    return {**content, "images": images, "annotations": annotations}


@torch.no_grad()
def _detect(run: Run, dataset: DetectionSet) -> tuple[list[dict[str, Any]], set[int]]:
    """Returns the detections of a run, in COCO format, and the ids of the images it could read."""
    names = tuple(run.cfg.MODEL.CLASS_NAMES)
    if names != dataset.class_names:
        raise NotApplicable(
            f"'{run.label}' has the classes {join_first(names)}, unlike '{dataset.json_file}' "
            f"({join_first(dataset.class_names)})"
        )
    if stored := run.find_detections(dataset.name):
        every = stored.with_name("instances_predictions.pth")
        image_ids = {one["id"] for one in dataset.content["images"]}
        if every.is_file():  # also lists images without detections
            image_ids = {one["image_id"] for one in torch.load(every, weights_only=True)}
        return list(json.loads(stored.read_bytes())), image_ids
    loader = Trainer.build_test_loader(run.cfg, dataset.name)
    model = run.model
    found = (
        (entry["image_id"], entry.get(TILE), output["instances"].to("cpu"))
        for inputs in tqdm(loader, desc=f"detecting for {run.label}", unit="batch")
        for entry, output in zip(inputs, model(inputs), strict=True)
    )
    results: list[dict[str, Any]] = []
    image_ids = set()
    for image_id, boxes in merge_images(found):
        image_ids.add(image_id)
        results += instances_to_coco_json(boxes, image_id)
    for entry in results:
        entry["category_id"] = dataset.category_ids[entry["category_id"]]
    return results, image_ids


@plotting.themed
def plot_ap(runs: Sequence[RunDetections], class_names: Sequence[str]) -> MplFigure:
    """Draws the mean AP, and the AP of each class that has boxes, with one bar per run.

    If more than 40 classes have boxes, draws only the 20 best and the 20 worst of them.
    """
    num_boxes = runs[0].scores.num_boxes
    total = np.sum([run.scores.class_ap for run in runs], axis=0)
    order = [int(k) for k in np.argsort(-total, kind="stable") if num_boxes[k]]
    if len(order) > _MOST_CLASSES:
        order = order[: _MOST_CLASSES // 2] + order[-_MOST_CLASSES // 2 :]
    names = [f"{plotting.to_text(class_names[k], longest=24)} ({num_boxes[k]:,})" for k in order]
    names.insert(0, f"all classes ({num_boxes.sum():,})")
    figure, axes = plotting.start_chart(height=1.3 + len(names) * max(0.3, 0.15 * len(runs)))
    width = 0.8 / len(runs)
    for index, (run, style) in enumerate(zip(runs, plotting.list_styles(len(runs)), strict=True)):
        rows = np.arange(len(names)) - 0.4 + (index + 0.5) * width
        values = np.nan_to_num([run.scores.summary["AP"], *run.scores.class_ap[order]])
        label = plotting.to_text(run.label)
        bars = axes.barh(rows, values, 0.92 * width, color=style["color"], label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("AP (%), IoU 0.50 to 0.95; numbers of boxes in brackets")
    plotting.add_legend(figure, axes)
    return figure


def draw_predictions(
    dataset: DetectionSet, runs: Sequence[RunDetections], number: int
) -> dict[str, Image]:
    """Draws ground truth and detections on ``number`` images.

    Chooses the images with the most errors or, for several runs, those on which the runs' numbers
    of errors differ most.
    """
    counts = [metrics.count_errors_by_image(run.errors, run.threshold) for run in runs]
    records = sorted(dataset.content["images"], key=lambda record: record["id"])

    def rank(record: Mapping[str, Any]) -> int:
        errors = [count[record["id"]] for count in counts]
        return min(errors) - max(errors) if len(errors) > 1 else -errors[0]

    records.sort(key=rank)
    truth = runs[0].errors.truth
    sources = [("Ground truth", truth, np.full(len(truth.classes), np.inf), 0.0)]
    sources += [(f"{run.label}, scores from {run.threshold:.2g}", run.errors.found,
                 run.errors.scores, run.threshold) for run in runs]  # fmt: skip
    images: dict[str, Image] = {}
    for record in records[:number]:
        pixels = _read(dataset, record)
        scale = min(1.0, _PANEL_SIDE / max(pixels.shape[:2]))
        small = plotting.shrink(pixels, _PANEL_SIDE) if scale < 1 else pixels
        panels = []
        for title, boxes, scores, threshold in sources:
            kept = (boxes.image_ids == record["id"]) & (scores >= threshold)
            classes = boxes.classes[kept].tolist()
            labels = [dataset.class_names[k] + (f" {score:.2f}" if np.isfinite(score) else "")
                      for k, score in zip(classes, scores[kept], strict=True)]  # fmt: skip
            colors = [get_class_color(k) for k in classes]
            drawn = draw_boxes(small, boxes.xyxy[kept] * scale, labels, colors)
            panels.append(add_heading(drawn, title))
        sheet = tile_images(panels, columns=3 if len(panels) % 2 else 2)
        about = {"alt": f"Boxes on {record['file_name']}", "caption": str(record["file_name"])}
        images[f"predictions_{len(images) + 1}"] = Image.from_rgb(sheet, **about)
    return images


def _read(dataset: DetectionSet, record: Mapping[str, Any]) -> RGBImage:
    path = dataset.image_root / record["file_name"]
    return np.ascontiguousarray(read_image(str(path), format="RGB"))


def draw_errors(dataset: DetectionSet, run: RunDetections) -> Image | None:
    """Draws crops of the largest missed boxes and of wrong detections with the highest scores.

    Returns None if there are neither.
    """
    errors, names = run.errors, dataset.class_names
    records = {record["id"]: record for record in dataset.content["images"]}
    crops = [
        (errors.truth, box, f"missed: {names[errors.truth.classes[box]]}", _TRUTH_COLOR)
        for box in metrics.find_missed_boxes(errors, run.threshold)[:_CELLS].tolist()
    ] + [
        (errors.found, box, f"{names[errors.found.classes[box]]} {errors.scores[box]:.2f}",
         _FOUND_COLOR) for box in metrics.find_wrong(errors, run.threshold)[:_CELLS].tolist()
    ]  # fmt: skip
    cells = []
    for boxes, index, text, color in crops:
        pixels = _read(dataset, records[int(boxes.image_ids[index])])
        cells.append(add_heading(crop_box(pixels, boxes.xyxy[index], color, _CROP_SIDE), text))
    if not cells:
        return None
    caption = f"{run.label}: largest missed boxes, and wrong detections with the highest scores"
    sheet = tile_images(cells, columns=4)
    return Image.from_rgb(sheet, alt="; ".join(text for *_, text, _ in crops), caption=caption)


def _explain(runs: Sequence[RunDetections]) -> list[str]:
    thresholds = ", ".join(f"{run.threshold:.3g} ({run.label})" for run in runs)
    use = f"qbheat predict --weights {shlex.quote(str(runs[0].weights))} --images photos/"
    use += f" --threshold {runs[0].threshold:.2g}"
    return [
        *([f"Detect objects in other images: {use}"] if len(runs) == 1 else []),
        "AP is COCO's and uses all detections. Errors and images use detections from a score "
        f"threshold: {thresholds}. By default it maximizes F1 at IoU 0.50 (--threshold).",
        "A correct detection matches a box of its class at IoU 0.50. A missed box has no match.",
        "The images are those on which the runs' numbers of errors differ most."
        if len(runs) > 1
        else "The images are those with the most errors.",
    ]


def _tabulate(runs: Sequence[RunDetections]) -> Table:
    columns = []
    for run in runs:
        column = {f"{key} (%)": f"{value:.2f}" for key, value in run.scores.summary.items()}
        column["boxes"] = f"{run.scores.num_boxes.sum():,}"
        column["errors from score"] = f"{run.threshold:.3g}"
        counts = metrics.count_errors(run.errors, run.threshold)
        columns.append(column | {name: f"{count:,}" for name, count in counts.items()})
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return Table(("", *(run.label for run in runs)), rows)


def _collect(dataset: DetectionSet, runs: Sequence[RunDetections]) -> dict[str, Any]:
    names, first = dataset.class_names, runs[0].scores
    return {
        "images": len(dataset.content["images"]),
        "boxes": dict(zip(names, first.num_boxes.tolist(), strict=True)),
        "runs": {
            run.label: {
                **run.scores.summary,
                "class_ap": dict(zip(names, run.scores.class_ap, strict=True)),
                "errors_from_score": run.threshold,
                "errors": metrics.count_errors(run.errors, run.threshold),
            }
            for run in runs
        },
    }


def draw_classes(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the confusion matrix of each classifier's last evaluation."""
    results = run_each(runs, _read_confusions, nothing="no confusion matrix")
    images, rows, data = {}, [], {}
    for number, (label, (names, counts)) in enumerate(results.found.items(), start=1):
        top1 = f"{100 * counts.trace() / max(1, counts.sum()):.2f}"
        title = f"{label}: top-1 {top1} %"
        name = f"confusion_{number}" if len(results.found) > 1 else "confusion"
        images[name] = chart_image(plot_confusion(counts, names), caption=title)
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
    names = [entry["name"] for entry in content["classes"]]
    index = {name: k for k, name in enumerate(names)}
    correct = [entry["images"] * (entry["top1"] or 0.0) / 100 for entry in content["classes"]]
    counts = np.diag(np.round(correct).astype(np.int64))
    for pair in content["confusions"]:
        counts[index[pair["class"]], index[pair["taken_for"]]] = pair["images"]
    return names, counts
