# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "beyond": what lies outside the picture, by the exponential solution of QB-Heat."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from qbheat_det.analysis.beyond_pictures import DecodingModel, draw_beyond
from qbheat_det.analysis.beyond_the_frame import (
    measure_error,
    measure_growth,
)
from qbheat_det.analysis.detection_pictures import RGBImage
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture
from qbheat_det.analysis.propagation import Eigenbasis, JointEigenbasis, find_generator
from qbheat_det.analysis.propagation_charts import plot_over_distance
from qbheat_det.analysis.reconstruction_pictures import draw_sheet
from qbheat_det.analysis.spectrum import NAMES
from qbheat_det.analysis.spectrum_table import Models
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain import ReconstructionModel

from .flag_types import real
from .linear_models import read_linear_models
from .options import SightOptions
from .refusal import NothingToSee
from .same_pictures import SamePictures, crop_squares
from .side_by_side import look_at_each
from .subject import Subject

_ORDERS = {"exact": "log(I + M) / Δx", "first": "M / Δx"}
_SOURCES = ("border", "offset")
_DISTANCES = (0.25, 0.5, 1.0)
_FARTHEST = 4  # sides of the image
_GROWTH_UP_TO = 2.0  # sides
_GROWTH_STEPS = 17


@dataclass(frozen=True)
class Settings:
    """The sight's own flags."""

    scale: str
    generator: str
    source: str
    distances: Sequence[float]


@dataclass(frozen=True)
class Carried:
    """What the linear models of one subject make of images.

    Attributes:
        scale: whose models these are.
        sheet: (H, W, 3), the picture.
        figures: for JSON; growth and errors over the distance.
    """

    scale: str
    sheet: RGBImage
    figures: dict[str, Any]


def add_beyond_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--scale",
        choices=["corner", "centre"],
        default="corner",
        help="whose models carry features: those over half the image (corner, default) or over a "
        "quarter of it (centre)",
    )
    parser.add_argument(
        "--generator",
        choices=list(_ORDERS),
        default="exact",
        help="how A comes from the learned M: exact, log(I + M) / Δx, whose exponential over Δx is "
        "the learned step (default); or first, M / Δx, as the paper has it to the first order",
    )
    parser.add_argument(
        "--source",
        choices=_SOURCES,
        default="border",
        help="what is carried: the outermost features, over every distance (border, default), or "
        "those a whole number of learned steps away (offset)",
    )
    parser.add_argument(
        "--distances",
        type=real(highest=_FARTHEST, above=True),
        nargs="+",
        default=list(_DISTANCES),
        metavar="D",
        help="how far beyond the frame, in sides of the image (default: 0.25 0.5 1)",
    )


def see_beyond(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Carries the features of whole images beyond their frame, and decodes them.

    Raises:
        NothingToSee: no subject has linear models, or no pictures are here.
        UserError: a distance that cannot be.
    """
    settings = _read_settings(options.extra)
    chosen = SamePictures(subjects, options.num_images, options.images)

    def look(subject: Subject) -> Carried:
        models = read_linear_models(subject.weights, subject.label)
        return _carry(subject, models, chosen.pick(subject), settings)

    looked = look_at_each(subjects, look, nothing="nothing is carried")
    found = looked.found
    pictures = {
        f"{index}_pictures": Picture.from_rgb(
            carried.sheet,
            alt=f"Images in their frames and what {label} makes of what lies around them",
            caption=f"{label}: the image in its frame, and around it what its features become, "
            f"carried by the models of the {carried.scale}.",
        )
        for index, (label, carried) in enumerate(found.items(), 1)
    }
    return Exhibit(
        name="beyond",
        title="What lies outside the picture",
        explanation=[*_explain(settings), *chosen.explain(), *looked.explain()],
        pictures={**pictures, **draw_charts(found)},
        figures={
            "images": chosen.files,
            "generator": _ORDERS[settings.generator],
            "source": settings.source,
            "distances": list(settings.distances),
            "subjects": {label: carried.figures for label, carried in found.items()},
            "left_out": looked.left_out,
        },
    )


def _explain(settings: Settings) -> list[str]:
    which = {
        "border": "Around the frame stand the outermost features, carried over their distance",
        "offset": "Around the frame stand features a whole number of learned steps away, carried",
    }[settings.source]
    how = {
        "exact": "A = log(I + M) / Δx, whose exponential over Δx is the learned step exactly",
        "first": "A = M / Δx, the first order of it, whose exponential is not the learned step",
    }[settings.generator]
    return [
        f"{which} by e^{{Ax}} e^{{By}} (Eq. 3), A1 to the right, A2 to the left, B1 down and B2 "
        f"up, and decoded by the decoder of pre-training, window by window. {how}. The paper "
        "itself stops at the frame.",
        "Where the loss normalises patches, the decoder says nothing of their brightness and "
        "contrast: around the frame these are the mean ones of the image everywhere, so that all "
        "layout and colour that is seen there is the decoder's. The last column is the control "
        "that learned nothing: features go on unchanged.",
        "Growth says by how much features become larger or smaller as they are carried: with an "
        "eigenvalue of positive real part they grow without end, and the farther, the less do "
        "they look like anything that the decoder was trained on. The last chart compares carried "
        "features with those that the encoder gives at that place of the same image, inside the "
        "frame: 1 is no better than the mean of the map. Nothing in pre-training asks the two to "
        "agree, only that decoded pixels do, and the encoder sees whole images here, quarters "
        "there.",
    ]


def _read_settings(extra: Mapping[str, Any]) -> Settings:
    distances = [float(distance) for distance in extra.get("distances", _DISTANCES)]
    if not distances or not all(0 < distance <= _FARTHEST for distance in distances):
        raise UserError(f"--distances are above 0 and at most {_FARTHEST} sides, not {distances}")
    return Settings(
        scale=str(extra.get("scale", "corner")),
        generator=str(extra.get("generator", "exact")),
        source=str(extra.get("source", "border")),
        distances=sorted(distances),
    )


def _carry(subject: Subject, models: Models, files: Sequence[str], settings: Settings) -> Carried:
    """Works out the sheet and the figures of one subject."""
    scale = settings.scale if settings.scale in models else next(iter(models))
    offset, matrices = models[scale]
    try:
        generators = {
            name: find_generator(matrices[name], offset, order=cast(Any, settings.generator))
            for name in NAMES
        }
    except ValueError as error:
        raise NothingToSee(f"nothing is carried by '{subject.label}': {error}") from error
    model = cast(ReconstructionModel, subject.model)
    with torch.no_grad():
        images = model.preprocess_image(crop_squares(subject.cfg, files))
        z = model.encode(images).float()
        size = z.shape[1]
        columns = _draw_columns(subject, images, z, generators, offset, settings)
        growth_at = np.linspace(0, _GROWTH_UP_TO, _GROWTH_STEPS).tolist()
        z = z.cpu()
        figures = {
            "scale": scale,
            "offset": offset,
            "growth": {"distances": growth_at, **measure_growth(z, generators, growth_at)},
            "error": {
                "distances": [steps / size for steps in range(1, size)],
                **measure_error(z, generators),
                "not_carried": measure_error(z, _stand_still(generators)),
            },
            "eigenvectors": _compare_ways(generators, offset),
        }
    note = f"A = {_ORDERS[settings.generator]} of the {scale}, Δx = {offset:g} W"
    return Carried(scale, draw_sheet(columns, note=note, min_side=160), figures)


def _draw_columns(
    subject: Subject,
    images: Tensor,
    z: Tensor,
    generators: Mapping[str, Tensor],
    offset: float,
    settings: Settings,
) -> dict[str, list[RGBImage]]:
    """Returns pictures of all images by the title of their column."""
    size = z.shape[1]

    def draw(by: Mapping[str, Tensor], margin: int) -> list[RGBImage]:
        return draw_beyond(
            cast(DecodingModel, subject.model),
            images,
            z,
            by,
            margin=margin,
            stride=1 if settings.source == "border" else max(1, round(size * offset)),
            pixel_format=subject.cfg.INPUT.FORMAT,
        )

    still = _stand_still(generators)
    margins = sorted({max(1, round(size * distance)) for distance in settings.distances})
    columns = {"the image": draw(still, 0)}
    columns |= {f"{margin / size:g} W beyond": draw(generators, margin) for margin in margins}
    return columns | {f"A = 0, {margins[-1] / size:g} W": draw(still, margins[-1])}


def _stand_still(generators: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns A = 0, which carries every feature as it is: the control."""
    return {name: torch.zeros_like(matrix) for name, matrix in generators.items()}


def _compare_ways(generators: Mapping[str, Tensor], offset: float) -> dict[str, Any]:
    """Returns how far the way by eigenvectors is from the exponential, over the offset."""
    found: dict[str, Any] = {}
    for name, a in generators.items():
        try:
            basis = Eigenbasis.of(a)
        except ValueError as error:
            found[name] = str(error)
            continue
        one, other = torch.matrix_exp(a * offset), basis.exponential(offset)
        found[name] = {
            "condition": basis.condition,
            "difference": float((one - other).norm() / one.norm()),
        }
    try:
        found["A1 B1 remainder"] = JointEigenbasis.of(generators["A1"], generators["B1"]).remainder
    except ValueError as error:
        found["A1 B1 remainder"] = str(error)
    return found


def draw_charts(found: Mapping[str, Carried]) -> dict[str, Picture]:
    """Draws growth and error over the distance: the directions of one, the means of several."""
    growth: dict[str, tuple[list[float], list[float]]] = {}
    error: dict[str, tuple[list[float], list[float]]] = {}
    for label, carried in found.items():
        for kind, lines in (("growth", growth), ("error", error)):
            values = carried.figures[kind]
            ways = {way: values[way] for way in ("right", "left", "down", "up")}
            ways = ways if len(found) == 1 else {label: _mean_of(ways)}
            lines |= {name: (values["distances"], line) for name, line in ways.items()}
        name = "not carried" if len(found) == 1 else f"{label}, not carried"
        values = carried.figures["error"]
        error[name] = (values["distances"], _mean_of(values["not_carried"]))
    mean = "" if len(found) == 1 else ", mean of the four directions"
    return {
        "growth": _draw_chart(
            growth,
            f"Growth of carried features{mean}",
            "norm over that at distance 0",
            (1, "as large as they were"),
        ),
        "error": _draw_chart(
            error,
            f"Carried features beside the encoder's own{mean}",
            "error over deviation from the mean",
            (1, "the mean of the map"),
        ),
    }


def _draw_chart(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    label: str,
    level: tuple[float, str],
) -> Picture:
    ends = "; ".join(f"{name} {y[-1]:.3g} at {x[-1]:.3g}" for name, (x, y) in lines.items())
    return Picture.from_chart(
        lambda theme: plot_over_distance(
            lines, title=title, label=label, level=level[0], level_label=level[1], theme=theme
        ),
        alt=f"{title}, {label}: {ends}",
        caption=f"{title}.",
    )


def _mean_of(ways: Mapping[str, Sequence[float]]) -> list[float]:
    return [float(value) for value in np.mean(list(ways.values()), axis=0)]
