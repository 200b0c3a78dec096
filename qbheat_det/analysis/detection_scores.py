# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's metrics of a run's detections, and their charts."""

import contextlib
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from matplotlib.figure import Figure as MplFigure
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.figures import NotApplicable
from qbheat_det.core.text import join_first
from qbheat_det.engine.trainer import Trainer
from qbheat_det.evaluation import complete_annotations

from .plotting import add_legend, list_styles, start_chart, start_figure, themed, to_text, to_texts
from .run import Run

Array = npt.NDArray[np.float64]
Entry = Mapping[str, Any]

CURVE_IOUS = {0.5: 0, 0.75: 5}
"""Rows in COCO's IoU thresholds (0.50 to 0.95) whose precision-recall curves are kept."""
_MOST_CLASSES = 40  # in a chart; of more classes, the best and the worst, half each


@dataclass(frozen=True)
class DetectionScores:
    """COCO's metrics of a set of detections; nan where there are no boxes of ground truth.

    Attributes:
        summary: "AP", "AP50", "AP75", "APs", "APm", "APl", in percent.
        class_ap: (K,), averaged over all IoU thresholds, in percent.
        num_boxes: (K,), boxes of ground truth, without crowds.
        recall: (R,), in [0, 1].
        precision: (2, R), mean of the classes at ``CURVE_IOUS``, in [0, 1].
    """

    summary: dict[str, float]
    class_ap: Array
    num_boxes: npt.NDArray[np.int64]
    recall: Array
    precision: Array


Scores = Mapping[str, DetectionScores]
"""By the labels of the runs; all of the same ground truth."""


@dataclass(frozen=True)
class DetectionSet:
    """A registered dataset with its annotation file; class names and ids in contiguous order."""

    name: str
    json_file: Path
    image_root: Path
    content: dict[str, Any]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]

    @classmethod
    def read(cls, name: str) -> "DetectionSet":
        """
        Raises:
            NotApplicable: the dataset has no annotation file in COCO's format, or no boxes.
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
        names, ids = zip(*((str(one["name"]), int(one["id"])) for one in categories), strict=True)
        root = Path(metadata.get("image_root") or "")
        return cls(name, Path(json_file), root, content, names, ids)


@torch.no_grad()
def detect(run: Run, dataset: DetectionSet) -> list[dict[str, Any]]:
    """Returns the detections of a run on all images of a dataset, in COCO's format.

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
    loader = Trainer.build_test_loader(run.cfg, dataset.name)
    model = run.model
    results: list[dict[str, Any]] = []
    for inputs in tqdm(loader, desc=f"detecting for {run.label}", unit="batch"):
        for entry, output in zip(inputs, model(inputs), strict=True):
            results += instances_to_coco_json(output["instances"].to("cpu"), entry["image_id"])
    for entry in results:
        entry["category_id"] = dataset.category_ids[entry["category_id"]]
    return results


def evaluate_boxes(ground_truth: Entry, detections: Sequence[Entry]) -> Any:
    """Matches detections with ground truth as COCO does.

    Args:
        ground_truth: content of an annotation file, which is not changed. It may lack what the
            evaluation can do without: "iscrowd", "area", "info".
        detections: COCO's results: "image_id", "category_id" of the file, "bbox" (XYWH, pixels)
            and "score" each.

    Returns:
        An accumulated ``pycocotools.cocoeval.COCOeval``. Its annotations and detections are
        numbered from 1 in their order, since id 0 means "unmatched" to pycocotools.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        coco = _index(ground_truth)
        if detections:  # loadRes reads the first entry
            found = coco.loadRes([dict(entry) for entry in detections])
        else:
            found = _index({**coco.dataset, "annotations": []})
        evaluator = COCOeval(coco, found, "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
    return evaluator


def score_detections(evaluator: Any) -> DetectionScores:
    """Reads the metrics of ``evaluate_boxes``. Without detections, AP is 0 wherever boxes are."""
    # (T, R, K, A, M): thresholds, recalls, classes, ranges of areas (the first is all), limits of
    # detections (the last is 100).
    precision = np.array(evaluator.eval["precision"], dtype=np.float64)[..., -1]
    precision[precision < 0] = np.nan  # COCO's mark of a class without boxes
    classes = [entry["category_id"] for entry in evaluator.cocoGt.anns.values()
               if not entry["iscrowd"]]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # mean of nan alone is nan
        parts = {"AP": precision[..., 0], "AP50": precision[0, ..., 0],
                 "AP75": precision[5, ..., 0]}  # fmt: skip
        parts |= {key: precision[..., area] for area, key in enumerate(("APs", "APm", "APl"), 1)}
        return DetectionScores(
            summary={key: float(100 * np.nanmean(part)) for key, part in parts.items()},
            class_ap=100 * np.nanmean(precision[..., 0], axis=(0, 1)),
            num_boxes=np.array([classes.count(k) for k in evaluator.params.catIds], np.int64),
            recall=np.asarray(evaluator.params.recThrs),
            precision=np.nanmean(precision[list(CURVE_IOUS.values()), :, :, 0], axis=2),
        )


@themed
def plot_ap_by_class(scores: Scores, class_names: Sequence[str]) -> MplFigure:
    """Draws the AP of each of (K,) classes with boxes, the best on top, a bar for each run."""
    num_boxes = next(iter(scores.values())).num_boxes
    total = np.sum([score.class_ap for score in scores.values()], axis=0)
    order = [int(k) for k in np.argsort(-total, kind="stable") if num_boxes[k]]
    if len(order) > _MOST_CLASSES:
        order = order[: _MOST_CLASSES // 2] + order[-_MOST_CLASSES // 2 :]
    figure, axes = start_chart(height=1.3 + len(order) * max(0.3, 0.15 * len(scores)))
    width = 0.8 / len(scores)
    styles = list_styles(len(scores))
    for index, ((name, one), style) in enumerate(zip(scores.items(), styles, strict=True)):
        rows = np.arange(len(order)) - 0.4 + (index + 0.5) * width
        values = np.nan_to_num(one.class_ap[order])
        bars = axes.barh(rows, values, 0.92 * width, color=style["color"], label=to_text(name))
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axes.margins(x=0.12)
    names = to_texts([class_names[k] for k in order], longest=24)
    labels = [f"{name} ({num_boxes[k]:,})" for name, k in zip(names, order, strict=True)]
    axes.set_yticks(range(len(order)), labels)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlabel("AP (%), IoU 0.50 to 0.95")
    axes.set_title("Average precision of each class (number of boxes)")
    add_legend(figure, axes)
    return figure


@themed
def plot_precision_recall(scores: Scores) -> MplFigure:
    """Draws precision over recall, the mean of all classes, at IoU 0.50 and at 0.75."""
    figure = start_figure(height=3.8, width=6.4)
    panels = figure.subplots(1, len(CURVE_IOUS), sharey=True)
    for row, (axes, iou) in enumerate(zip(panels, CURVE_IOUS, strict=True)):
        for (name, score), style in zip(scores.items(), list_styles(len(scores)), strict=True):
            line = style | {"marker": ""}
            axes.plot(score.recall, score.precision[row], label=to_text(name), **line)
        axes.set_title(f"IoU {iou:.2f}, mean of classes")
        axes.set_xlabel("recall")
        axes.set_ylim(0, 1.03)
    panels[0].set_ylabel("precision")
    add_legend(figure, panels[0])
    return figure


def _index(content: Entry) -> COCO:
    coco = COCO()
    coco.dataset = {**content, "annotations": [dict(one) for one in content["annotations"]]}
    complete_annotations(coco.dataset)
    coco.createIndex()
    return coco
