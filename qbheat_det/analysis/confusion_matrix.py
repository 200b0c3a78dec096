# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "classes": which classes a classifier confuses, as its last evaluation counted them.

An evaluation writes ``inference/<set>/classification.json`` into the folder of the run.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure as MplFigure

from qbheat_det.core.figures import Figure, NotApplicable, Table, register_figure
from qbheat_det.core.files import write_atomically
from qbheat_det.evaluation import find_confusions

from .figure import FigureOptions, run_each
from .plotting import INK, chart_image, start_figure, themed, to_text
from .run import Run

Counts = npt.NDArray[np.int64]
_MOST_NAMED = 110  # classes whose rows have room for text
_MOST_LISTED = 30
_EXPLANATION = (
    "A row is a class, a column the class that its images were assigned; the color is the share "
    "of the row. Blue cells are correct and red ones wrong. Small shares are drawn stronger than "
    "they are.",
)


@register_figure("classes")
def draw_classes(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the confusion matrix of each classifier's last evaluation."""
    results = run_each(
        runs,
        lambda run: read_confusions(_find_file(run)),
        nothing="no confusion matrix",
        needs_weights=False,
    )
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
        data[label] = {"classes": names, "matrix": counts}
    table = Table(("Run", "top-1 (%)", "balanced (%)", "images", "classes"), rows)
    return results.draw("classes", "Confusion of classes", _EXPLANATION, images, table, runs=data)


def draw_confusion(classification_json: Path, output_png: Path) -> None:
    """Draws the confusion matrix of an evaluation."""
    names, counts = read_confusions(classification_json)
    figure = plot_confusion(counts, names, title=classification_json.parent.name)
    write_atomically(output_png, chart_image(figure, format="png").content)


def read_confusions(classification_json: Path) -> tuple[list[str], Counts]:
    """Returns class names and counts (K, K) of a file of ``ClassificationEvaluator``."""
    content = json.loads(classification_json.read_bytes())
    names = [entry["name"] for entry in content["classes"]]
    index = {name: k for k, name in enumerate(names)}
    correct = [entry["images"] * (entry["top1"] or 0.0) / 100 for entry in content["classes"]]
    counts = np.diag(np.round(correct).astype(np.int64))
    for pair in content["confusions"]:
        counts[index[pair["class"]], index[pair["taken_for"]]] = pair["images"]
    return names, counts


@themed
def plot_confusion(counts: Counts, class_names: Sequence[str], *, title: str = "") -> MplFigure:
    """Draws a confusion matrix (K, K), rows the classes, beside the most frequent confusions.

    With more than 110 classes rows have no names, and the list gives the number of each class.
    """
    number = len(class_names)
    printable = ["".join(c if c.isprintable() else "?" for c in name) for name in class_names]
    names = [to_text(name, longest=26) for name in printable]
    side = float(np.clip(0.11 * number, 3.6, 9.0))
    figure = start_figure(height=side + 1.8, width=side + 6.5)
    axes, text = figure.subplots(1, 2, width_ratios=(side + 1.8, 4.7))
    shares = counts / counts.sum(axis=1).clip(min=1)[:, None]
    strength = np.sqrt(shares)[..., None]
    wrong, correct = np.array([0.84, 0.27, 0.31]), np.array([0.12, 0.44, 0.92])
    color = np.where(np.eye(number, dtype=bool)[..., None], correct, wrong)
    axes.imshow(1 - strength * (1 - color))
    axes.grid(visible=False)
    axes.set_xlabel("classified as")
    axes.set_ylabel("class")
    axes.set_title(to_text(title, longest=80))
    if number <= _MOST_NAMED:
        size = 8 if number <= 60 else 5
        axes.set_xticks(range(number), names, rotation=90, fontsize=size)
        axes.set_yticks(range(number), names, fontsize=size)
    total, labels = int(counts.sum()), names
    if number > _MOST_NAMED:
        labels = [f"{name} ({i})" for i, name in enumerate(names)]
    lines = [f"Most confused ({total - counts.trace():,} of {total:,} images are wrong)", ""]
    for i, j, count in find_confusions(counts)[: min(_MOST_LISTED, int(5 * side))]:
        lines.append(f"{labels[i]} → {labels[j]}:  {count:,} of {counts[i].sum():,}")
    text.set_axis_off()
    text.text(0, 1, "\n".join(lines), fontsize=8, va="top", linespacing=1.5, color=INK)
    return figure


def _find_file(run: Run) -> Path:
    """Returns the newest evaluation in the folder of a run."""
    folder = run.folder or (run.checkpoint or run.path).parent
    files = list(folder.glob("inference/*/classification.json"))
    if not files:
        raise NotApplicable(f"'{run.label}' has no inference/*/classification.json")
    return max(files, key=lambda path: path.stat().st_mtime)
