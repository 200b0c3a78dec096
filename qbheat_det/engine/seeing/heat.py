# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "heat": class activation beside steady heat inside the same border (Fig. 1)."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.class_activation import ClassActivation, measure_class_activation
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.heat_pictures import LABELS, draw_heat_sheet, plot_agreements
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.reconstruction_views import to_rgb
from qbheat_det.analysis.steady_heat import HeatStudy, mean_of, study_map
from qbheat_det.core.errors import UserError
from qbheat_det.engine.hooks.visualize import undisturbed
from qbheat_det.modeling.classification import ImageClassifier, LinearDecoder

from .flag_types import some_text, whole
from .map_figures import list_map
from .options import SightOptions
from .refusal import NothingToSee
from .same_pictures import SamePictures, batch_images, count_batches, crop_squares
from .side_by_side import look_at_each, require_kind
from .subject import Subject

_STUDIED = 64
_DELAY = 2.0  # seconds without a bar
_HOW_TO_READ = (
    "The paper sets out from a likeness of pictures (Sec. 1, Fig. 1): the class activation map "
    "(CAM) of a classifier looks like heat that spreads over a plate. Here the plate has the CAM's "
    "own border, and heat inside it is steady: u_xx + u_yy = 0 (Laplace's equation), solved on the "
    "CAM's positions. A CAM that followed this equation would be the same picture.",
    "Steady heat has no peak inside a border (the maximum principle), so where the CAM peaks on an "
    "object in the middle, the two must differ; the last map also holds the CAM's hottest position "
    "inside, as a source of heat. One scale of colours for a row, in logits.",
    "Controls cost nothing: a bilinear map between the four corners, the border's mean, and the "
    "same study of the CAM with its positions shuffled. Relative error: 0 is the same map, 1 as "
    "good as the mean of the CAM inside. Likeness beyond the controls shows that a CAM is smooth, "
    "not that features obey the heat equation.",
)


@dataclass(frozen=True)
class _Heated:
    """Of one subject: maps and studies of all images, and pixels of those that are drawn."""

    classes: list[str]
    scores: list[float]
    maps: list[npt.NDArray[np.float64]]
    studies: list[HeatStudy]
    entries: list[dict[str, Any]]


def add_heat_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--heat-class",
        type=some_text,
        metavar="NAME",
        help="whose activation is shown, by the classifier's name of it or its index (default: of "
        "each image the class that is predicted)",
    )
    parser.add_argument(
        "--heat-images",
        type=whole(),
        default=_STUDIED,
        metavar="N",
        help=f"images that figures are taken over, the drawn ones among them (default: {_STUDIED})",
    )
    parser.add_argument(
        "--heat-size",
        type=whole(),
        metavar="S",
        help="side of the images in pixels; twice as large, the maps have four times the positions "
        "(default: that of the run)",
    )


def see_heat(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws CAM and steady heat of images, and how near they come beside controls.

    Raises:
        NothingToSee: no subject is a classifier that has class activation maps, or there are no
            pictures.
        UserError: a classifier does not know the class.
    """
    size = options.extra.get("heat_size")
    if size is not None and size < 1:
        raise UserError(f"--heat-size is at least 1, not {size}")
    number = max(options.num_images, int(options.extra.get("heat_images", _STUDIED)))
    chosen = SamePictures(subjects, number, options.images)

    def look(subject: Subject) -> _Heated:
        model = _find_classifier(subject)
        return _heat(subject, model, chosen.pick(subject), options)

    looked = look_at_each(subjects, look, nothing="no class activation maps")
    found = looked.found
    pictures = {
        f"maps_{i + 1}": _draw_maps(label, one, options.num_images)
        for i, (label, one) in enumerate(found.items())
    }
    agreements = {
        label: {kind: [study.agreements[kind].to_dict() for study in one.studies]
                for kind in LABELS}
        for label, one in found.items()
    }  # fmt: skip
    pictures["agreement"] = _draw_agreements(agreements)
    return Exhibit(
        "heat",
        "Class activation and steady heat",
        [*_HOW_TO_READ, *chosen.explain(), *looked.explain()],
        pictures,
        {
            "images": chosen.files,
            "subjects": {
                label: _list_figures(one, options.num_images) for label, one in found.items()
            },
            "left_out": looked.left_out,
        },
        _tabulate(agreements),
    )


def _find_classifier(subject: Subject) -> ImageClassifier:
    """
    Raises:
        NothingToSee: it is no classifier, or its model has no class activation maps.
    """
    require_kind(subject, "classifier", "has no class activation, which takes a classifier")
    model = subject.model
    if not isinstance(model, ImageClassifier) or not isinstance(model.decoder, LinearDecoder):
        raise NothingToSee(
            f"'{subject.label}' does not read the average of a map by a linear layer, which is "
            "what class activation is defined for; Grad-CAM, which is, is another quantity"
        )
    return model


def _heat(
    subject: Subject, model: ImageClassifier, files: Sequence[str], options: SightOptions
) -> _Heated:
    wanted, size = options.extra.get("heat_class"), options.extra.get("heat_size")
    names = [str(name) for name in subject.cfg.MODEL.CLASS_NAMES]
    chosen = None if wanted is None else _find_class(subject, names, model.num_classes, wanted)
    entries = crop_squares(subject.cfg, files, size)
    batches = tqdm(
        batch_images(model, entries), total=count_batches(entries), unit="batch",
        desc=f"class activation, {subject.label}", delay=_DELAY, leave=False,
    )  # fmt: skip
    with undisturbed(model):
        activations = [
            measure_class_activation(
                model, images, None if chosen is None else [chosen] * len(images)
            )
            for images in batches
        ]
    maps = [one.double().cpu().numpy() for batch in activations for one in batch.maps]
    try:
        studies = [study_map(one, seed=options.seed) for one in maps]
    except ValueError as error:
        raise NothingToSee(f"'{subject.label}': {error}") from error
    classes = _join(activations, "classes")
    return _Heated(
        classes=[names[i] if i < len(names) else str(i) for i in map(int, classes)],
        scores=_join(activations, "scores"),
        maps=maps,
        studies=studies,
        entries=[
            {**entry, "image": to_rgb(entry["image"], subject.cfg.INPUT.FORMAT).astype(np.uint8)}
            for entry in entries
        ],
    )


def _join(activations: Sequence[ClassActivation], name: str) -> list[float]:
    tensors: list[Tensor] = [getattr(activation, name) for activation in activations]
    return [float(value) for tensor in tensors for value in tensor.tolist()]


def _find_class(subject: Subject, names: Sequence[str], num_classes: int, wanted: str) -> int:
    if wanted in names:
        return names.index(wanted)
    if wanted.isdecimal() and int(wanted) < num_classes:
        return int(wanted)
    known = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise UserError(
        f"the classifier '{subject.label}' knows no class '{wanted}', but {known or 'no names'} "
        f"and the indices 0 to {num_classes - 1}"
    )


def _draw_maps(label: str, one: _Heated, number: int) -> Picture:
    sheet = draw_heat_sheet(
        [entry["image"] for entry in one.entries[:number]],
        one.maps[:number],
        one.studies[:number],
        [f"{name} {score:.2f}" for name, score in zip(one.classes, one.scores, strict=True)][
            :number
        ],
    )
    shown = ", ".join(one.classes[:number])
    alt = f"Class activation maps of {label} and steady heat inside their border: {shown}"
    return Picture.from_rgb(sheet, alt=alt, caption=f"{label}: class and score on the left.")


def _draw_agreements(agreements: dict[str, dict[str, list[dict[str, float | None]]]]) -> Picture:
    said = "; ".join(
        f"{label}: {', '.join(_summarize(kinds[kind], kind) for kind in LABELS)}"
        for label, kinds in agreements.items()
    )
    caption = "Median and quartiles over the images, over positions inside the border."
    alt = f"Correlation and relative error of what is made of a CAM's border. {said}"
    return Picture.from_chart(
        lambda theme: plot_agreements(agreements, theme=theme), alt=alt, caption=caption
    )


def _summarize(found: Sequence[dict[str, float | None]], kind: str) -> str:
    error = mean_of([one["relative_error"] for one in found])
    return f"{LABELS[kind]}, mean relative error {_format(error)}"


def _list_figures(one: _Heated, drawn: int) -> list[dict[str, Any]]:
    """Returns the figures of each image; of those that are drawn, the maps too, in logits."""
    rows = zip(one.entries, one.classes, one.scores, one.studies, strict=True)
    figures = [
        {"image": entry["file_name"], "class": name, "score": score, **study.to_dict()}
        for entry, name, score, study in rows
    ]
    for figure, values, study in zip(figures[:drawn], one.maps, one.studies, strict=False):
        figure["scale"] = [float(values.min()), float(values.max())]
        maps = {"cam": values, "steady": study.steady, "with_source": study.with_source}
        figure["maps"] = {name: list_map(found) for name, found in maps.items()}
    return figures


def _tabulate(agreements: dict[str, dict[str, list[dict[str, float | None]]]]) -> Table:
    rows = [
        (f"{label}, {LABELS[kind]}",
         *(_format(mean_of([one[figure] for one in kinds[kind]]))
           for figure in ("correlation", "relative_error")))
        for label, kinds in agreements.items() for kind in LABELS
    ]  # fmt: skip
    return Table(("Mean over images", "correlation", "relative error"), rows)


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
