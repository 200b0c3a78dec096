# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "queries": where the object queries of MF-DETR look for their boxes."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.attention import measure_spread
from qbheat_det.analysis.attention_pictures import AttentionRow, draw_attention, stack_sheets
from qbheat_det.analysis.detection_pictures import RGBImage, get_class_name
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.query_attention import QueryAttention, measure_inside, read_queries
from qbheat_det.analysis.reconstruction_views import to_rgb
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.engine.sample_images import read_spread
from qbheat_det.modeling.detr.mf_detr import MFDETR

from .flag_types import whole
from .options import SightOptions
from .refusal import NothingToSee
from .same_pictures import SamePictures
from .side_by_side import look_at_each
from .subject import Subject

_BOXES = 3
_CELL = 200
_DELAY = 2.0  # seconds without a bar
_HOW_TO_READ = (
    "MF-DETR finds each object by one of its queries, which look at a map of the image at three "
    "scales, coarse to fine. A row is a box that was predicted; the colours are the attention of "
    "its query in the last block of each scale, the mean over the heads, which sums to 1 over the "
    "pixels. Each picture has its own scale, from 0 to a value above which at most a twentieth of "
    "the attention lies.",
    "Queries that find objects look at what tells where a box ends, and at what tells its class. "
    "The table has the share of attention inside the box beside the share of the image that the "
    "box covers: attention without any aim has the same share in both.",
)


@dataclass(frozen=True)
class _Looked:
    """Of one subject, for each image: pixels, attention and names of the classes found."""

    images: list[RGBImage]
    attention: list[QueryAttention]
    classes: list[list[str]]


def add_query_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--query-boxes",
        type=whole(),
        default=_BOXES,
        metavar="N",
        help=f"predictions to draw of each image, most confident first (default: {_BOXES})",
    )


def see_queries(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws the attention of the most confident queries of each image.

    Raises:
        NothingToSee: no subject is an MF-DETR, or there are no pictures.
        UserError: a flag makes no sense.
    """
    boxes = options.extra.get("query_boxes") or _BOXES
    if boxes < 1 or options.num_images < 1:
        raise UserError("--query-boxes and the number of images are at least 1")
    chosen = SamePictures(subjects, options.num_images, options.images)

    def look(subject: Subject) -> _Looked:
        model = _find_detector(subject)
        return _look(subject, model, chosen.pick(subject), boxes)

    looked = look_at_each(subjects, look, nothing="no object queries")
    figures = {label: _list_figures(one) for label, one in looked.found.items()}
    return Exhibit(
        "queries",
        "Where object queries look",
        [*_HOW_TO_READ, *chosen.explain(), *looked.explain()],
        {
            f"image_{index + 1}": _draw_image(looked.found, index)
            for index in range(len(chosen.files))
        },
        {"images": chosen.files, "subjects": figures, "left_out": looked.left_out},
        _tabulate(figures),
    )


def _find_detector(subject: Subject) -> MFDETR:
    name = subject.cfg.MODEL.META_ARCHITECTURE
    if name != "MFDETR":
        raise NothingToSee(
            f"'{subject.label}' is of architecture {name}, and object queries are MF-DETR's"
        )
    model = subject.model
    assert isinstance(model, MFDETR)
    return model


def _look(subject: Subject, model: MFDETR, files: Sequence[str], boxes: int) -> _Looked:
    cfg = subject.cfg
    records = [{"file_name": name} for name in files]
    entries = read_spread(records, build_mapper(cfg, is_train=False), len(records))
    bar = tqdm(entries, unit="image", desc=f"queries, {subject.label}", delay=_DELAY, leave=False)
    attention = [read_queries(model, entry, boxes) for entry in bar]
    return _Looked(
        images=[to_rgb(entry["image"], cfg.INPUT.FORMAT).astype(np.uint8) for entry in entries],
        attention=attention,
        classes=[
            [get_class_name(cfg.MODEL.CLASS_NAMES, c) for c in one.found.pred_classes.tolist()]
            for one in attention
        ],
    )


def _draw_image(found: Mapping[str, _Looked], index: int) -> Picture:
    sheets, said = [], []
    for label, one in found.items():
        attention, classes = one.attention[index], one.classes[index]
        scores = attention.found.scores.tolist()
        rows = [
            AttentionRow(
                label=f"{name}\nscore {score:.2f}",
                maps=[maps[row].mean(dim=0).numpy() for maps in attention.maps.values()],
                strides=list(attention.maps),
                together=False,
                box=attention.found.pred_boxes.tensor[row].double().numpy(),
            )
            for row, (name, score) in enumerate(zip(classes, scores, strict=True))
        ]
        columns = [f"stride {stride}" for stride in attention.maps]
        sheets.append(draw_attention(one.images[index], rows, columns, title=label, cell=_CELL))
        said.append(f"{label}: {', '.join(classes)}")
    alt = f"Attention of the queries of boxes in image {index + 1}, {'; '.join(said)}"
    return Picture.from_rgb(stack_sheets(sheets), alt=alt, caption=f"Image {index + 1}.")


def _list_figures(one: _Looked) -> list[list[dict[str, Any]]]:
    """Returns for each image, for each of its boxes, what is written to JSON."""
    images = []
    for image, attention, classes in zip(one.images, one.attention, one.classes, strict=True):
        boxes = attention.found.pred_boxes.tensor
        inside = {s: measure_inside(maps, boxes, s) for s, maps in attention.maps.items()}
        spread = {
            s: measure_spread(maps.flatten(2), dim=2).mean(dim=1)
            for s, maps in attention.maps.items()
        }
        area = attention.found.pred_boxes.area() / (image.shape[0] * image.shape[1])
        images.append(
            [
                {
                    "class": name,
                    "score": float(attention.found.scores[i]),
                    "query": int(attention.found.query[i]),
                    "box": boxes[i].tolist(),
                    "share_of_image": float(area[i]),
                    "attention_inside": {str(s): float(share[i]) for s, share in inside.items()},
                    "attention_spread": {str(s): float(share[i]) for s, share in spread.items()},
                }
                for i, name in enumerate(classes)
            ]
        )
    return images


def _tabulate(figures: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> Table:
    strides = ("32", "16", "8")
    rows = []
    for label, images in figures.items():
        boxes = [box for image in images for box in image]
        area = fmean(box["share_of_image"] for box in boxes)
        inside = [fmean(box["attention_inside"][stride] for box in boxes) for stride in strides]
        rows.append((label, f"{100 * area:.0f}", *(f"{100 * share:.0f}" for share in inside)))
    header = ("Run", "box, % of the image", *(f"attention inside, stride {s}, %" for s in strides))
    return Table(header, rows)
