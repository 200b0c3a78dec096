# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "beyond": features propagated beyond the image by the exponential solution, and decoded.

Paper: QB-Heat, arXiv:2211.13228, Eq. 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import cv2
import numpy as np
import torch
from matplotlib.ticker import LogFormatter
from torch import Tensor

from qbheat_det.core.figures import Figure, Image, NotApplicable, register_figure
from qbheat_det.modeling.pretrain import ReconstructionModel, patchify, unpatchify

from .figure import FigureOptions, SharedImages, crop_squares, run_each
from .linear_models import NAMES, read_linear_models
from .plotting import (
    INK,
    RGBImage,
    add_legend,
    chart_image,
    list_styles,
    plot_grid,
    start_chart,
    themed,
    to_rgb,
    to_text,
)
from .propagation import (
    DIRECTIONS,
    Order,
    decode_map,
    extend_map,
    find_generator,
    measure_error,
    measure_growth,
    restore_pixels,
)
from .run import Run

_FORMULAS = {"exact": "log(I + M) / Δx", "first": "M / Δx"}
_SOURCES = {
    "border": "the outermost features, propagated over their distance",
    "offset": "features a whole number of offsets away, propagated",
}
_GROWTH_AT = np.linspace(0, 2, 17).tolist()  # sides of the image
_SIDE = 240  # pixels of a cell: the wider the margin, the smaller the image in it
_EXPLANATION = (
    "Where the loss normalises patches, the decoder does not predict their brightness and "
    "contrast: outside the image these are the image's averages everywhere, and all layout and "
    "colour is the decoder's. The last column is the control: features continue unchanged, A = 0.",
    "Growth is the norm of propagated features over that at distance 0; with an eigenvalue of "
    "positive real part it has no bound, and features become unlike those the decoder was trained "
    "on. The error compares propagated features with the encoder's at that position, inside the "
    "image: 1 is no better than the mean of the map. Pre-training does not ask the two to agree, "
    "only decoded pixels; and the encoder has whole images here, quarters there.",
)


@dataclass(frozen=True)
class _Propagation:
    """Of one run: cells by the title of their column, a note, and numbers over the distance."""

    columns: Mapping[str, Sequence[RGBImage]]
    note: str
    data: dict[str, Any]


@register_figure("beyond")
def draw_beyond(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    scale: Literal["corner", "centre"] = "corner",
    generator: Order = "exact",
    source: Literal["border", "offset"] = "border",
    distances: Sequence[float] = (0.25, 0.5, 1.0),
) -> Figure:
    """Propagates the features of whole images beyond their borders, and decodes them.

    Args:
        runs: to compare.
        options: ``images`` and ``num_images``.
        scale: whose linear models are used, where a run has both.
        generator: see ``find_generator``.
        source: propagate the outermost features, or features a multiple of the offset away.
        distances: margins around the image, in sides of the image.

    Raises:
        NotApplicable: no run has linear models, or there are no images.
        UserError: no run can be read.
    """
    shared = SharedImages(runs, options.num_images, options.images)

    def compute(run: Run) -> _Propagation:
        return _compute(run, shared, scale, generator, source, distances)

    results = run_each(runs, compute, nothing="no propagation")
    found = results.found
    images = {}
    for index, (label, one) in enumerate(found.items(), 1):
        rows = list(zip(*one.columns.values(), strict=True))
        chart = plot_grid(rows, column_names=list(one.columns), note=one.note)
        caption = f"{label}: images in a frame, surrounded by decoded propagated features."
        images[f"{index}_images"] = chart_image(chart, caption=caption, format="jpg")
    first = (
        f"Around the image are {_SOURCES[source]} by e^{{Ax}} e^{{By}} (Eq. 3), A1 to the right, "
        f"A2 to the left, B1 down and B2 up, with A = {_FORMULAS[generator]}, and decoded window "
        "by window. The paper itself stops at the border."
    )
    return Figure(
        "beyond",
        "Propagation beyond the image",
        [first, *_EXPLANATION, *shared.explain(), *results.explain()],
        images | _draw_charts({label: one.data for label, one in found.items()}),
        {
            "images": shared.files,
            "generator": _FORMULAS[generator],
            "source": source,
            "distances": sorted(distances),
            "runs": {label: one.data for label, one in found.items()},
            "left_out": results.left_out,
        },
    )


@torch.no_grad()
def _compute(
    run: Run,
    shared: SharedImages,
    scale: str,
    order: Order,
    source: str,
    distances: Sequence[float],
) -> _Propagation:
    models = read_linear_models(run.weights, run.label)
    scale = scale if scale in models else next(iter(models))
    offset, matrices = models[scale]
    try:
        generators = {name: find_generator(matrices[name], offset, order=order) for name in NAMES}
    except ValueError as error:
        raise NotApplicable(f"'{run.label}': {error}") from error
    still = {name: torch.zeros_like(a) for name, a in generators.items()}
    model = cast(ReconstructionModel, run.model)
    images = model.preprocess_image(crop_squares(run.cfg, shared.choose(run)))
    z = model.encode(images).float()
    size = z.shape[1]
    stride = 1 if source == "border" else max(1, round(size * offset))

    def draw(by: Mapping[str, Tensor], margin: int) -> list[RGBImage]:
        pixels = decode_beyond(model, images, z, by, margin=margin, stride=stride)
        patch = model.decoder.patch_size
        return [_frame(to_rgb(p, run.cfg.INPUT.FORMAT), margin * patch) for p in pixels]

    margins = sorted({max(1, round(size * distance)) for distance in distances})
    columns = {"image": draw(still, 0)}
    columns |= {f"{margin / size:g} W beyond": draw(generators, margin) for margin in margins}
    columns[f"A = 0, {margins[-1] / size:g} W"] = draw(still, margins[-1])
    z = z.cpu()
    data = {
        "scale": scale,
        "offset": offset,
        "growth": {"distances": _GROWTH_AT, **measure_growth(z, generators, _GROWTH_AT)},
        "error": {
            "distances": [steps / size for steps in range(1, size)],
            **measure_error(z, generators),
            "unchanged": measure_error(z, still),
        },
    }
    return _Propagation(columns, f"A = {_FORMULAS[order]} of the {scale}, Δx = {offset:g} W", data)


def decode_beyond(
    model: ReconstructionModel,
    images: Tensor,
    z: Tensor,
    generators: Mapping[str, Tensor],
    *,
    margin: int,
    stride: int,
) -> Tensor:
    """Returns images with decoded features around them.

    Args:
        model: decodes.
        images: (N, 3, S, S), normalised.
        z: (N, G, G, C), their features.
        generators: as of ``extend_map``.
        margin: positions around the image.
        stride: as of ``extend_map``.

    Returns:
        (N, 3, T, T), T = S (1 + 2 margin / G), in the pixels of the mapper.
    """
    size, patch = model.decoder.grid_size, model.decoder.patch_size
    large = extend_map(z.cpu(), generators, margin, stride=stride).to(z.device)
    true = patchify(images, patch).unflatten(1, (size, size))
    patches = restore_pixels(true, decode_map(large, model.decoder, size), model.loss.restore)
    return unpatchify(patches.flatten(1, 2), patch) * model.pixel_std + model.pixel_mean


def _frame(pixels: Any, margin: int) -> RGBImage:
    """Returns (_SIDE, _SIDE, 3) with a line around the image inside ``margin`` pixels."""
    image = np.rint(np.clip(pixels, 0, 255)).astype(np.uint8)
    before = len(image)
    way = cv2.INTER_AREA if before > _SIDE else cv2.INTER_CUBIC
    cell = cv2.resize(image, (_SIDE, _SIDE), interpolation=way)
    if margin:
        start, end = (round(_SIDE * at / before) for at in (margin, before - margin))
        cell = cv2.rectangle(cell, (start - 1, start - 1), (end, end), (255, 255, 255), 1)
    return np.asarray(cell, dtype=np.uint8)


def _draw_charts(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Image]:
    """Draws growth and error over the distance: four directions of one run, means of several."""
    growth: dict[str, tuple[list[float], list[float]]] = {}
    error: dict[str, tuple[list[float], list[float]]] = {}
    for label, one in data.items():
        for measure, lines in (("growth", growth), ("error", error)):
            values = one[measure]
            ways = {way: values[way] for way in DIRECTIONS}
            ways = ways if len(data) == 1 else {label: _mean(ways)}
            lines |= {name: (values["distances"], line) for name, line in ways.items()}
        name = "unchanged" if len(data) == 1 else f"{label}, unchanged"
        error[name] = (one["error"]["distances"], _mean(one["error"]["unchanged"]))
    return {
        "growth": _draw_chart(growth, "Growth of propagated features", "norm over that at 0"),
        "error": _draw_chart(
            error, "Propagated features against the encoder's", "error over that of the mean"
        ),
    }


@themed
def _draw_chart(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, label: str
) -> Image:
    figure, axes = start_chart(height=3.6)
    for (name, (x, y)), style in zip(lines.items(), list_styles(len(lines)), strict=True):
        axes.plot(x, y, label=to_text(name), **style)
    axes.axhline(1, color=INK, lw=1, ls="--")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
    axes.set_title(title)
    axes.set_xlabel("distance, sides of the image")
    axes.set_ylabel(label)
    add_legend(figure, axes)
    return chart_image(figure, caption=f"{title}.")


def _mean(ways: Mapping[str, Sequence[float]]) -> list[float]:
    return [float(value) for value in np.mean(list(ways.values()), axis=0)]
