# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which classes a classifier confuses: the chart, and the figure "classes" of finished runs."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.figures import Figure, Table, register_figure
from qbheat_det.core.files import write_atomically
from qbheat_det.engine.trainer import Trainer
from qbheat_det.evaluation import ClassificationEvaluator, find_confusions

from .figure import FigureOptions, run_each
from .plotting import INK, chart_image, start_figure, themed, to_text, to_texts
from .run import Run

Counts = npt.NDArray[np.int64]
_MOST_NAMED = 110  # classes whose rows have room for text
_MOST_LISTED = 30
_EXPLANATION = (
    "A row is a class, a column the class that its images were assigned; the color is the share "
    "of the row. Blue cells are correct and red ones wrong. Small shares are drawn stronger than "
    "they are."
)


@register_figure("classes")
def draw_classes(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the confusion matrix of each classifier on its test set.

    Raises:
        NotApplicable: there is no classifier with a test set on this machine.
    """
    results = run_each(runs, _count_confusions, nothing="no confusion matrix")
    images, rows, data = {}, [], {}
    for number, (label, (names, counts)) in enumerate(results.found.items(), start=1):
        totals, correct = counts.sum(axis=1), counts.diagonal()
        used = totals > 0
        top1 = 100 * correct.sum() / max(1, totals.sum())
        balanced = 100 * float(np.mean(correct[used] / totals[used])) if used.any() else np.nan
        title = f"{label}: top-1 {top1:.2f} %"
        name = f"confusion_{number}" if len(results.found) > 1 else "confusion"
        images[name] = chart_image(plot_confusion(counts, names, title=title), caption=title)
        rows.append((label, f"{top1:.2f}", f"{balanced:.2f}", f"{totals.sum():,}", f"{used.sum()}"))
        data[label] = {
            "classes": [
                {"name": name, "images": total, "correct": number}
                for name, total, number in zip(names, totals, correct, strict=True)
            ],
            "matrix": counts,
        }
    return Figure(
        "classes",
        "Confusion of classes",
        [_EXPLANATION, *results.explain()],
        images,
        {"runs": data, "left_out": results.left_out},
        Table(("Run", "top-1 (%)", "balanced (%)", "images", "classes"), rows),
    )


def draw_confusion(classification_json: Path, output_png: Path) -> None:
    """Draws the confusion matrix of a ``classification.json`` of ``ClassificationEvaluator``.

    Raises:
        UserError: the image cannot be written.
    """
    content = json.loads(classification_json.read_bytes())
    names = [entry["name"] for entry in content["classes"]]
    index = {name: k for k, name in enumerate(names)}
    correct = [entry["images"] * (entry["top1"] or 0.0) / 100 for entry in content["classes"]]
    counts = np.diag(np.round(correct).astype(np.int64))
    for pair in content["confusions"]:
        counts[index[pair["class"]], index[pair["taken_for"]]] = pair["images"]
    title = f"{content['dataset']}: top-1 {content['top1'] or 0:.1f} %"
    image = chart_image(plot_confusion(counts, names, title=title), format="png")
    write_atomically(output_png, lambda stream: stream.write(image.content))


@themed
def plot_confusion(counts: Counts, class_names: Sequence[str], *, title: str = "") -> MplFigure:
    """Draws a confusion matrix (K, K), rows the classes, beside the most frequent confusions.

    With more than 110 classes rows have no names, and the list gives the number of each class.
    """
    number = len(class_names)
    printable = ["".join(c if c.isprintable() else "?" for c in name) for name in class_names]
    names = to_texts(printable, longest=26)
    side = float(np.clip(0.11 * number, 3.6, 9.0))
    figure = start_figure(height=side + 1.8, width=side + 6.5)
    matrix, text = figure.subplots(1, 2, width_ratios=(side + 1.8, 4.7))
    _draw_matrix(matrix, counts, names)
    matrix.set_title(to_text(title, longest=80))
    wrong, total = int(counts.sum() - counts.trace()), int(counts.sum())
    lines = [f"Most confused ({wrong:,} of {total:,} images are wrong)", ""]
    labels = [f"{name} ({i})" for i, name in enumerate(names)] if number > _MOST_NAMED else names
    for i, j, count in find_confusions(counts)[: min(_MOST_LISTED, int(5 * side))]:
        lines.append(f"{labels[i]} → {labels[j]}:  {count:,} of {counts[i].sum():,}")
    text.set_axis_off()
    text.text(0, 1, "\n".join(lines), fontsize=8, va="top", linespacing=1.5, color=INK)
    return figure


def _draw_matrix(axes: Axes, counts: Counts, names: Sequence[str]) -> None:
    shares = counts / counts.sum(axis=1).clip(min=1)[:, None]
    strength = np.sqrt(shares)[..., None]
    wrong, correct = np.array([0.84, 0.27, 0.31]), np.array([0.12, 0.44, 0.92])
    color = np.where(np.eye(len(names), dtype=bool)[..., None], correct, wrong)
    axes.imshow(1 - strength * (1 - color))
    axes.grid(visible=False)
    axes.set_xlabel("classified as")
    axes.set_ylabel("class")
    if len(names) <= _MOST_NAMED:
        size = 8 if len(names) <= 60 else 5
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
        axes.set_yticks(range(len(names)), names, fontsize=size)


@torch.no_grad()
def _count_confusions(run: Run) -> tuple[Sequence[str], Counts]:
    """Returns class names and matrix of a run on its test set."""
    run.require_kind("classifier")
    names, name = tuple(run.cfg.MODEL.CLASS_NAMES), run.find_set("test")
    evaluator = ClassificationEvaluator(name, class_names=names)
    evaluator.reset()
    model = run.model
    loader = Trainer.build_test_loader(run.cfg, name)
    for inputs in tqdm(loader, desc=f"classifying for {run.label}", unit="batch"):
        evaluator.process(inputs, model(inputs))
    evaluator.evaluate()
    return names, evaluator.confusion
