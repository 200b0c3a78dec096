# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "detections": how good a detector's boxes are, and where they are worst."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qbheat_det.analysis.charts import Theme
from qbheat_det.analysis.detection_charts import (
    MOST_BARS,
    MOST_PANELS,
    plot_ap_of_classes,
    plot_ap_of_sizes,
    plot_class_precision_recall,
    plot_precision_recall,
)
from qbheat_det.analysis.detection_errors import (
    KINDS,
    MISSED,
    MISSED_MEANING,
    Judged,
    choose_threshold,
    count_errors,
    find_false_alarms,
    find_worst_misses,
    is_lost,
    judge_detections,
)
from qbheat_det.analysis.detection_scores import DRAWN_IOUS, average_over_classes
from qbheat_det.analysis.detection_sheets import COLORS_EXPLAINED
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.core.errors import UserError

from .detection_views import draw_alarms, draw_misses, draw_predictions
from .flag_types import real
from .found_boxes import BoxSet, FoundBoxes, find_boxes, read_box_set, register_given_set
from .options import SightOptions
from .side_by_side import look_at_each, require_kind
from .subject import Subject

_CELLS_PER_PICTURE = 2  # of a sheet, for each picture that is asked for
_LISTED = 50  # misses and false alarms of a run in the JSON


@dataclass(frozen=True)
class JudgedRun:
    """A run's detections, and what is wrong with them.

    Attributes:
        label: of the run.
        found: its detections.
        judged: each of them.
        threshold: lowest score that counts where detections are counted or drawn.
        reason: why that one.
        misses: boxes, the worst first.
        alarms: detections on no box, the worst first.
    """

    label: str
    found: FoundBoxes
    judged: Judged
    threshold: float
    reason: str
    misses: npt.NDArray[np.int64]
    alarms: npt.NDArray[np.int64]


def add_detection_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="annotations in COCO's format to judge by (default: those of each run's test set)",
    )
    parser.add_argument("--images-root", metavar="DIR", help="folder of the images of --json")
    parser.add_argument(
        "--score",
        type=real(highest=1),
        metavar="S",
        help="lowest score of boxes that are drawn and counted as errors (default: for each run, "
        "that with the best F1); AP and curves always take all",
    )


def see_detections(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Judges the boxes of detectors on their test sets, in common charts where the set is one.

    ``options.images`` is not looked at: judging takes boxes of ground truth. What cannot be judged
    is named with its reason.

    Raises:
        NothingToSee: there is no detector whose test set is here, or none can be judged.
        UserError: the flags do not go together, or what they name is not sound.
    """
    sets, left_out = _gather(subjects, options)
    pictures: dict[str, Picture] = {}
    figures: list[dict[str, Any]] = []
    for number, (boxes, runs) in enumerate(sets, start=1):
        ending = f"_set{number}" if len(sets) > 1 else ""
        drawn = _draw_charts(boxes, runs) | _draw_views(boxes, runs, options)
        pictures |= {f"{name}{ending}": picture for name, picture in drawn.items()}
        figures.append(_collect(boxes, runs))
    everyone = [run for _, runs in sets for run in runs]
    return Exhibit(
        "detections",
        "Detections",
        _explain(sets, left_out),
        pictures,
        {"sets": figures, "left_out": left_out},
        _tabulate(everyone),
    )


def _gather(
    subjects: Sequence[Subject], options: SightOptions
) -> tuple[list[tuple[BoxSet, list[JudgedRun]]], list[str]]:
    json_file, image_root = (options.extra.get(key) for key in ("json", "images_root"))
    if bool(json_file) != bool(image_root):
        raise UserError("--json and --images-root go together")
    given = register_given_set(json_file, image_root) if json_file and image_root else None

    def look(subject: Subject) -> tuple[BoxSet, JudgedRun]:
        require_kind(subject, "detector", "is no detector")
        boxes = read_box_set(given or subject.find_set("test"))
        return boxes, _judge(subject, boxes, options.extra.get("score"))

    looked = look_at_each(subjects, look, nothing="no detections")
    sets: dict[str, tuple[BoxSet, list[JudgedRun]]] = {}
    for boxes, run in looked.found.values():
        sets.setdefault(str(boxes.json_file.resolve()), (boxes, []))[1].append(run)
    return list(sets.values()), looked.left_out


def _judge(subject: Subject, boxes: BoxSet, score: float | None) -> JudgedRun:
    found = find_boxes(subject, boxes)
    judged = judge_detections(boxes.content, found.results)
    threshold = choose_threshold(judged) if score is None else score
    areas = {image["id"]: image["width"] * image["height"] for image in boxes.content["images"]}
    return JudgedRun(
        label=subject.label,
        found=found,
        judged=judged,
        threshold=threshold,
        reason=_tell_reason(judged) if score is None else "--score",
        misses=find_worst_misses(judged, threshold, areas),
        alarms=find_false_alarms(judged, threshold),
    )


def _tell_reason(judged: Judged) -> str:
    if is_lost(judged):
        return "nothing is right at any score, so as many of the surest detections as boxes"
    return "highest F1" if len(judged.scores) else "there are no detections"


def _draw_charts(boxes: BoxSet, runs: Sequence[JudgedRun]) -> dict[str, Picture]:
    scores = {run.label: run.found.scores for run in runs}
    names = boxes.class_names
    ends = "; ".join(
        f"{label}: AP {score.summary['AP']:.2f}, AP50 {score.summary['AP50']:.2f}"
        for label, score in scores.items()
    )
    pictures = {
        "sizes": _draw(
            lambda theme: plot_ap_of_sizes(scores, theme=theme),
            "Average precision. Small is below 32 x 32 pixels, large above 96 x 96.",
            ends,
        )
    }
    if len(names) > 1:
        some = f" The best and the worst of {len(names)}." if len(names) > MOST_BARS else ""
        pictures["classes"] = _draw(
            lambda theme: plot_ap_of_classes(scores, names, theme=theme),
            f"Average precision of each class; in brackets, its boxes.{some}",
            ends,
        )
    pictures["precision_recall"] = _draw(
        lambda theme: plot_precision_recall(scores, theme=theme),
        "Precision over recall, the mean of all classes; the area is AP50, or AP75. Both panels "
        "have one range.",
        ends,
    )
    if len(names) > 1:
        some = f" The {MOST_PANELS} with most boxes." if len(names) > MOST_PANELS else ""
        pictures["class_precision_recall"] = _draw(
            lambda theme: plot_class_precision_recall(scores, names, theme=theme),
            f"Precision over recall of each class at IoU 0.50; in brackets, its boxes. All panels "
            f"have one range.{some}",
            ends,
        )
    return pictures


def _draw(plot: Callable[[Theme], bytes], caption: str, ends: str) -> Picture:
    return Picture.from_chart(plot, alt=f"{caption} {ends}", caption=caption)


def _draw_views(
    boxes: BoxSet, runs: Sequence[JudgedRun], options: SightOptions
) -> dict[str, Picture]:
    cells = _CELLS_PER_PICTURE * options.num_images
    pictures = draw_predictions(
        boxes, {run.label: (run.judged, run.threshold) for run in runs}, options.num_images
    )
    for number, run in enumerate(runs, start=1):
        ending = f"_{number}" if len(runs) > 1 else ""
        sheets = {
            "misses": draw_misses(boxes, run.judged, run.misses[:cells], run.label),
            "false_alarms": draw_alarms(boxes, run.judged, run.alarms[:cells], run.label),
        }
        pictures |= {f"{name}{ending}": sheet for name, sheet in sheets.items() if sheet}
    return pictures


def _explain(
    sets: Sequence[tuple[BoxSet, Sequence[JudgedRun]]], left_out: Sequence[str]
) -> list[str]:
    everyone = [run for _, runs in sets for run in runs]
    scores = ", ".join(f"{run.threshold:.3g} ({run.label})" for run in everyone)
    paragraphs = [
        "AP and curves are COCO's, of all detections. Errors are counted, and boxes drawn, from a "
        f"score upwards: {scores}; unless --score names it, it is the one at which F1 at IoU 0.50 "
        "is best.",
        *_tell_lost(everyone),
        f"Kinds of errors, after TIDE (arXiv:2008.08115): {_explain_kinds()}.",
        "Worst misses are the boxes that nothing is right on, those first that fill most of their "
        "image; the orange box is the highest score that is on it at all. False alarms are "
        "detections whose IoU with every box, of whatever class, is below 0.5, the highest scores "
        f"first. {COLORS_EXPLAINED}",
    ]
    if len(sets) > 1:
        listed = "; ".join(
            f"set {number} ({boxes.json_file.name}) for {', '.join(run.label for run in runs)}"
            for number, (boxes, runs) in enumerate(sets, start=1)
        )
        paragraphs.append(f"Figures of different test sets do not compare: {listed}.")
    if left_out:
        paragraphs.append(f"Left out: {'; '.join(left_out)}.")
    return paragraphs


def _tell_lost(runs: Sequence[JudgedRun]) -> list[str]:
    labels = ", ".join(run.label for run in runs if is_lost(run.judged))
    if not labels:
        return []
    return [
        f"Of {labels} no detection is right at any score, so F1 is 0 whatever the score: unless "
        "--score names another, errors count from the score at which there are as many detections "
        "as boxes, so that what it is surest of can be seen."
    ]


def _explain_kinds() -> str:
    return "; ".join(f"{kind}: {text}" for kind, text in {**KINDS, MISSED: MISSED_MEANING}.items())


def _tabulate(runs: Sequence[JudgedRun]) -> Table:
    rows = [
        [f"{key} (%)", *(_format(run.found.scores.summary[key]) for run in runs)]
        for key in runs[0].found.scores.summary
    ]
    rows.append(["boxes", *(f"{len(run.judged.truth.boxes):,}" for run in runs)])
    rows.append(["errors from score", *(f"{run.threshold:.3g}" for run in runs)])
    counts = [count_errors(run.judged, run.threshold) for run in runs]
    rows += [[kind, *(f"{count[kind]:,}" for count in counts)] for kind in (*KINDS, MISSED)]
    return Table(("", *(run.label for run in runs)), rows)


def _format(value: float) -> str:
    return "no boxes" if np.isnan(value) else f"{value:.2f}"


def _collect(boxes: BoxSet, runs: Sequence[JudgedRun]) -> dict[str, Any]:
    """Returns the numbers behind the pictures of one set."""
    first = runs[0].found.scores
    return {
        "annotations": boxes.json_file.name,
        "images": len(boxes.content["images"]),
        "boxes": dict(zip(boxes.class_names, first.num_boxes.tolist(), strict=True)),
        "boxes_of_size": first.num_of_size,
        "recall": first.recall,
        "kinds": {**KINDS, MISSED: MISSED_MEANING},
        "runs": {run.label: _collect_run(boxes, run) for run in runs},
    }


def _collect_run(boxes: BoxSet, run: JudgedRun) -> dict[str, Any]:
    scores, names = run.found.scores, boxes.class_names
    precision: dict[str, Mapping[str, Any]] = {}
    for t, iou in enumerate(DRAWN_IOUS):
        of_classes = dict(zip(names, scores.precision[t].T, strict=True))
        mean = average_over_classes(scores.precision[t])
        precision[f"IoU {iou:.2f}"] = {"mean": mean, "classes": of_classes}
    return {
        "detections_from": "the run's last evaluation" if run.found.from_run else "inference",
        **scores.summary,
        "class_ap": dict(zip(names, scores.class_ap, strict=True)),
        "class_ap50": dict(zip(names, scores.class_ap50, strict=True)),
        "errors_from_score": run.threshold,
        "errors_from_score_because": run.reason,
        "nothing_is_right": is_lost(run.judged),
        "errors": count_errors(run.judged, run.threshold),
        "num_misses": len(run.misses),
        "worst_misses": [_name_box(boxes, run.judged, int(b)) for b in run.misses[:_LISTED]],
        "num_false_alarms": len(run.alarms),
        "false_alarms": [_name_found(boxes, run.judged, int(d)) for d in run.alarms[:_LISTED]],
        "precision": precision,
    }


def _name_box(boxes: BoxSet, judged: Judged, index: int) -> dict[str, Any]:
    truth = judged.truth
    return {
        "image_id": truth.image_ids[index],
        "class": boxes.class_names[truth.classes[index]],
        "xyxy": truth.boxes[index],
    }


def _name_found(boxes: BoxSet, judged: Judged, index: int) -> dict[str, Any]:
    return {
        "image_id": judged.image_ids[index],
        "class": boxes.class_names[judged.classes[index]],
        "xyxy": judged.boxes[index],
        "score": judged.scores[index],
        "kind": judged.kinds[index],
        "iou": judged.ious[index],
    }
