# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "classes": what a classifier takes for what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.confusion_matrix import plot_confusion
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.engine.trainer import Trainer
from qbheat_det.evaluation import ClassificationEvaluator, find_confusions

from .last_evaluation import get_last_logged, read_last_evaluation
from .options import SightOptions
from .side_by_side import look_at_each, require_kind
from .subject import Subject

Counts = npt.NDArray[np.int64]
_SAME_SHARE = 1e-6  # per cent
_SHOWN = 3  # confusions that a picture's text names
_HOW_TO_READ = (
    "A row is a class, a column what its images were taken for; the colour is the share of the "
    "row. Blue cells are right, red ones wrong, and small shares are drawn stronger than they are."
)


@dataclass(frozen=True)
class Confusion:
    """How the images of each class were classified.

    Attributes:
        counts: (K, K), images of class i that were taken for class j.
        from_run: whether that is what the run's last evaluation found.
    """

    counts: Counts
    from_run: bool


def see_classes(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws the confusion matrix of each classifier, on its test set.

    What cannot be judged is named with its reason.

    Raises:
        NothingToSee: there is no classifier whose test set is here, or none can be judged.
    """

    def look(subject: Subject) -> tuple[Subject, Confusion]:
        require_kind(subject, "classifier", "is no classifier")
        return subject, _find_confusion(subject)

    looked = look_at_each(subjects, look, nothing="no confusion of classes")
    found = looked.found
    pictures = {
        f"confusion_{number}" if len(found) > 1 else "confusion": _draw(subject, confusion.counts)
        for number, (subject, confusion) in enumerate(found.values(), start=1)
    }
    rows = [(label, *_summarise(confusion.counts)) for label, (_, confusion) in found.items()]
    return Exhibit(
        "classes",
        "Classes that are taken for others",
        [_HOW_TO_READ, *looked.explain()],
        pictures,
        {
            "runs": {label: _collect(*one) for label, one in found.items()},
            "left_out": looked.left_out,
        },
        Table(("Run", "top-1 (%)", "balanced (%)", "images", "classes"), rows),
    )


def _find_confusion(subject: Subject) -> Confusion:
    names = tuple(subject.cfg.MODEL.CLASS_NAMES)
    counts = _rebuild(read_last_evaluation(subject, "classification.json"), names)
    if counts is not None and counts.sum():
        top1 = 100 * counts.trace() / counts.sum()
        if abs(top1 - get_last_logged(subject, "classification/top1")) < _SAME_SHARE:
            return Confusion(counts, True)
    return Confusion(_infer(subject, names), False)


def _rebuild(content: Any, names: Sequence[str]) -> Counts | None:
    """From what ``ClassificationEvaluator`` wrote to its matrix; None where that is not to be had.

    Images whose scores were nan are in no cell, so that their top-1 is another than that logged.
    """
    place = {name: k for k, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    try:
        for one in content["classes"]:
            right = round(one["images"] * (one["top1"] or 0.0) / 100)
            counts[place[one["name"]], place[one["name"]]] = right
        for pair in content["confusions"]:
            counts[place[pair["class"]], place[pair["taken_for"]]] = pair["images"]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return counts


@torch.no_grad()
def _infer(subject: Subject, names: Sequence[str]) -> Counts:
    name = subject.find_set("test")
    evaluator = ClassificationEvaluator(name, class_names=names)
    evaluator.reset()
    model = subject.model
    loader = Trainer.build_test_loader(subject.cfg, name)
    for inputs in tqdm(loader, desc=f"{subject.label} classifies", unit="batch"):
        evaluator.process(inputs, model(inputs))
    evaluator.evaluate()
    return evaluator.confusion


def _draw(subject: Subject, counts: Counts) -> Picture:
    names = subject.cfg.MODEL.CLASS_NAMES
    top1 = _summarise(counts)[0]
    title = f"{subject.label}: top-1 {top1} %"
    worst = "; ".join(
        f"{names[i]} taken for {names[j]} {number} times"
        for i, j, number in find_confusions(counts)[:_SHOWN]
    )
    return Picture.from_chart(
        lambda theme: plot_confusion(counts, names, title=title, theme=theme, format="svg"),
        alt=f"{title}. {worst or 'Nothing is confused.'}",
        caption=title,
    )


def _summarise(counts: Counts) -> tuple[str, str, str, str]:
    """Returns top-1, mean of classes, images and classes that have any, as text."""
    totals = counts.sum(axis=1)
    right = counts.diagonal()
    have = totals > 0
    top1 = 100 * right.sum() / totals.sum() if have.any() else math.nan
    balanced = 100 * float((right[have] / totals[have]).mean()) if have.any() else math.nan
    return f"{top1:.2f}", f"{balanced:.2f}", f"{totals.sum():,}", f"{have.sum():,}"


def _collect(subject: Subject, confusion: Confusion) -> Mapping[str, Any]:
    names, counts = subject.cfg.MODEL.CLASS_NAMES, confusion.counts
    totals = counts.sum(axis=1)
    return {
        "counted_from": "the run's last evaluation" if confusion.from_run else "inference",
        "classes": [
            {"name": name, "images": total, "right": right}
            for name, total, right in zip(names, totals, counts.diagonal(), strict=True)
        ],
        "confusions": [
            {"class": names[i], "taken_for": names[j], "images": number}
            for i, j, number in find_confusions(counts)
        ],
    }
