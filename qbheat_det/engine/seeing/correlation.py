# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "correlation": how much the positions of an encoder's map say the same (Fig. 12)."""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

from detectron2.modeling import Backbone
from fvcore.nn.precise_bn import BN_MODULE_TYPES
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.correlation_chart import plot_correlations
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.spatial_correlation import correlate_images, summarize_correlation
from qbheat_det.checkpoint import info_of
from qbheat_det.core.errors import UserError
from qbheat_det.engine.hooks.visualize import undisturbed
from qbheat_det.modeling.contracts import FixedSizeModel
from qbheat_det.probing.backbones import find_feature
from qbheat_det.probing.batch_norm import recalibrate_bn

from .flag_types import some_text, whole
from .options import SightOptions
from .refusal import NothingToSee
from .same_pictures import (
    Entries,
    SamePictures,
    batch_images,
    count_batches,
    crop_squares,
    find_encoder,
    find_sizes,
)
from .side_by_side import look_at_each
from .subject import Subject

CORRELATED_IMAGES = 64
_PAPER_SIZE = 224
_ANEW = ", BatchNorm of these images"
_DELAY = 2.0  # seconds without a bar
_HOW_TO_READ = (
    "Of each image, the encoder's map is taken as one vector of channels a position; its spatial "
    "correlation is the mean |correlation| of two different positions, over all pairs (Appendix D "
    "and Fig. 12 of the paper). 1: every position says the same, up to sign and scale; 0: no "
    "position says anything of another. The paper finds more of it in larger encoders trained by "
    "MoCo-v2, and reads it as loss of spatial detail.",
    "An untrained encoder is the control: correlation that it has as well was not learned. "
    "Different maps, or images of different size, are not comparable.",
)
_ABOUT_CONTROLS = (
    "The BatchNorms of an untrained encoder hold statistics of no image, behind which all "
    "positions may look alike, whatever its weights. The chart has it with the statistics of these "
    "images; the table has both."
)


@dataclass(frozen=True)
class _Correlated:
    """Of one subject: the map, spatial correlation of each image, whether it is untrained.

    Of an untrained one also with statistics of BatchNorm from these images, if it has BatchNorms.
    """

    map: str
    channels: int
    values: list[float]
    is_control: bool
    with_statistics: list[float]

    @property
    def drawn(self) -> list[float]:
        """The values of the chart."""
        return self.with_statistics or self.values


def add_correlation_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--correlated-images",
        type=whole(),
        default=CORRELATED_IMAGES,
        metavar="N",
        help=f"images of the histograms (default: {CORRELATED_IMAGES}; the paper has 1000)",
    )
    parser.add_argument(
        "--size",
        type=whole(),
        metavar="S",
        help="side of the images in pixels, the same for all (default: that of the runs' "
        f"pre-training or classification where it is one, else the paper's {_PAPER_SIZE})",
    )
    parser.add_argument(
        "--map",
        type=some_text,
        metavar="NAME",
        help="which map of the encoders, such as s16 (default: one that all have; where there is "
        "none, of each the one that its model reads, of a detector the last of the coarsest, in "
        "charts apart)",
    )


def see_correlation(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws a histogram of spatial correlation for each subject, in one chart a map.

    Raises:
        NothingToSee: no subject has an encoder with such a map, or there are no pictures.
        UserError: a flag makes no sense.
    """
    number = options.extra.get("correlated_images", CORRELATED_IMAGES)
    sizes = set(find_sizes(subjects))
    size = options.extra.get("size") or (sizes.pop() if len(sizes) == 1 else _PAPER_SIZE)
    if number < 1 or size < 1:
        raise UserError("--correlated-images and --size are at least 1")
    chosen = SamePictures(subjects, number, options.images)
    wanted = options.extra.get("map") or _find_common_map(subjects)

    def look(subject: Subject) -> _Correlated:
        encoder = find_encoder(subject.model)
        name = _find_map(subject, encoder, wanted)
        return _correlate(subject, encoder, name, chosen.pick(subject), size)

    looked = look_at_each(subjects, look, nothing="no spatial correlation")
    found = looked.found
    return Exhibit(
        "correlation",
        "Spatial correlation of feature maps",
        [*_explain(found, size), *chosen.explain(), *looked.explain()],
        _draw_all(found),
        {
            "images": chosen.files,
            "size": size,
            "subjects": {label: _list_figures(one) for label, one in found.items()},
            "left_out": looked.left_out,
        },
        _tabulate(found),
    )


def _list_figures(one: _Correlated) -> dict[str, Any]:
    anew = one.with_statistics
    return {
        "map": one.map,
        "is_control": one.is_control,
        **summarize_correlation(one.values),
        **({"with_statistics_of_images": summarize_correlation(anew)} if anew else {}),
    }


def _tabulate(found: dict[str, _Correlated]) -> Table:
    rows = []
    for label, one in found.items():
        kinds = [(label, one.values)]
        if one.with_statistics:
            kinds.append((f"{label}{_ANEW}", one.with_statistics))
        for name, values in kinds:
            summary = summarize_correlation(values)
            what = f"{one.map}, {one.channels} channels"
            figures = (f"{summary['mean']:.3f}", f"{summary['deviation']:.3f}")
            rows.append((name, what, *figures, "untrained" if one.is_control else ""))
    return Table(("Run", "map", "mean", "standard deviation", "control"), rows)


def _correlate(
    subject: Subject, encoder: Backbone, name: str, files: Sequence[str], size: int
) -> _Correlated:
    entries = crop_squares(subject.cfg, files, size)
    untrained = _is_untrained(subject)
    values = _measure(subject, encoder, name, entries)
    anew: list[float] = []
    if untrained and any(isinstance(module, BN_MODULE_TYPES) for module in encoder.modules()):
        copied = copy.deepcopy(encoder)
        cfg = subject.cfg.MODEL
        images = [entry["image"] for entry in entries]
        recalibrate_bn(copied, images, pixel_mean=cfg.PIXEL_MEAN, pixel_std=cfg.PIXEL_STD)
        anew = _measure(subject, copied, name, entries)
    channels = int(encoder.output_shape()[name].channels or 0)
    return _Correlated(name, channels, values, untrained, anew)


def _measure(subject: Subject, encoder: Backbone, name: str, entries: Entries) -> list[float]:
    batches = tqdm(
        batch_images(subject.model, entries),
        total=count_batches(entries),
        unit="batch",
        desc=f"correlation, {subject.label}",
        delay=_DELAY,
        leave=False,
    )
    with undisturbed(encoder):
        try:
            return correlate_images(encoder, name, batches)
        except ValueError as error:
            raise NothingToSee(f"'{subject.label}': {error}") from error


def _find_map(subject: Subject, encoder: Backbone, wanted: str | None) -> str:
    try:
        if wanted is None and subject.kind != "detector":
            return cast(FixedSizeModel, subject.model).in_feature
        return find_feature(encoder, wanted or "")
    except UserError as error:
        raise NothingToSee(f"'{subject.label}': {error}") from error


def _find_common_map(subjects: Sequence[Subject]) -> str | None:
    """Returns the map that all models read, or else the coarsest that all encoders have."""
    own: list[str] = []
    strides: list[dict[str, int]] = []
    for subject in subjects:
        try:
            encoder = find_encoder(subject.model)
            own.append(_find_map(subject, encoder, None))
        except (NothingToSee, UserError):  # which is said where the subject is looked at
            continue
        shapes = encoder.output_shape().items()
        strides.append({name: shape.stride for name, shape in shapes if shape.stride})
    if len(set(own)) <= 1:
        return own[0] if own else None
    common = [name for name in strides[0] if all(name in others for others in strides)]
    # Of the coarsest the last, which is the deepest.
    return max(reversed(common), key=strides[0].__getitem__, default=None)


def _is_untrained(subject: Subject) -> bool:
    """Whether a single step, or none, went into a pre-training's or a classifier's weights."""
    info = info_of(str(subject.weights))
    return info is not None and info.iteration <= 0 and subject.kind != "detector"


def _explain(found: dict[str, _Correlated], size: int) -> list[str]:
    shown = next(iter(found.values()))
    paragraphs = [
        *_HOW_TO_READ,
        f"Here: {len(shown.values):,} images, the square in the middle of each at {size} pixels.",
    ]
    if len({one.map for one in found.values()}) > 1:
        paragraphs.append("No map is one of all the encoders, so each map has a chart of its own.")
    if any(one.with_statistics for one in found.values()):
        paragraphs.append(_ABOUT_CONTROLS)
    if not any(one.is_control for one in found.values()):
        paragraphs.append("There is no untrained encoder among the runs to compare with.")
    return paragraphs


def _draw_all(found: dict[str, _Correlated]) -> dict[str, Picture]:
    """Draws those of one map into one chart."""
    maps = list(dict.fromkeys(one.map for one in found.values()))
    return {
        f"histograms_{number}" if len(maps) > 1 else "histograms": _draw(
            {label: one for label, one in found.items() if one.map == name}, name
        )
        for number, name in enumerate(maps, 1)
    }


def _draw(found: dict[str, _Correlated], name: str) -> Picture:
    names = {
        label: f"{label}{_ANEW}" if one.with_statistics else label for label, one in found.items()
    }
    values = {names[label]: one.drawn for label, one in found.items()}
    controls = {names[label] for label, one in found.items() if one.is_control}
    means = "; ".join(
        f"{label} has a mean of {fmean(drawn):.3f}" for label, drawn in values.items()
    )
    alt = f"Histograms of spatial correlation of the map {name} over images: {means}"
    return Picture.from_chart(
        lambda theme: plot_correlations(values, name, controls=controls, theme=theme),
        alt=alt,
        caption=f"The map {name}. Triangles are means.",
    )
