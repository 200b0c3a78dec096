# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "beyond": features propagated beyond the image by the exponential solution, and decoded.

Paper: QB-Heat, arXiv:2211.13228, Eq. 1, 3 and 5. With ∂z/∂x = A z and ∂z/∂y = B z, a feature is
z(x, y) = e^{Ax} e^{By} z(0, 0), x to the right and y down, in sides of the image (G positions). The
paper stops at the border. Chosen here: A1 goes to the right, A2 to the left, B1 down and B2 up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import cv2
import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from qbheat_det.core.figures import Figure, NotApplicable, register_figure
from qbheat_det.inference.drawing import RGBImage
from qbheat_det.modeling.pretrain import ReconstructionModel, patchify, unpatchify

from .figure import FigureOptions, crop_squares, run_on_images
from .plotting import chart_image, plot_grid, to_rgb
from .run import Run
from .spectrum import NAMES, read_linear_models

Generators = Mapping[str, Tensor]
"""A1, A2, B1 and B2 (C, C) by name, per side of the image."""
DIRECTIONS = {"right": "A1", "left": "A2", "down": "B1", "up": "B2"}
_SIDE = 240  # pixels of a cell: the wider the margin, the smaller the image in it
_EXPLANATION = (
    "Around the image are its outermost features, propagated by e^{Ax} e^{By} (Eq. 3) and decoded. "
    "The last column is the control: features continue unchanged, A = 0.",
)


def find_generator(step: Tensor, offset: float) -> Tensor:
    """Returns A = log(I + M) / Δx (C, C), float64, of a learned step M (C, C).

    Its exponential over Δx is the learned step z(x + Δx) = (I + M) z(x). It is complex where an
    eigenvalue of I + M is negative: no real A reverses a direction within one step.
    ``NotApplicable`` if I + M is singular and has no logarithm.
    """
    step = step.detach().cpu().double()
    whole = torch.eye(len(step), dtype=step.dtype) + step
    if not float(torch.linalg.cond(whole)) < 1 / torch.finfo(step.dtype).eps:  # nan for zero
        raise NotApplicable("I + M is singular, so it has no logarithm")
    return torch.from_numpy(np.asarray(scipy.linalg.logm(whole.numpy()))) / offset


def propagate(z: Tensor, a: Tensor, x: float) -> Tensor:
    """Returns e^{Ax} z for features z (..., C), in the wider type of A (C, C) and z."""
    wide = torch.promote_types(a.dtype, z.dtype)
    return z.to(wide) @ torch.matrix_exp(a * x).to(wide).mT


def extend_map(z: Tensor, generators: Generators, margin: int) -> Tensor:
    """Propagates the outermost features (N, G, G, C) by ``margin`` positions, along y, then x."""
    a = {way: generators[name] for way, name in DIRECTIONS.items()}
    tall = _extend_axis(z.transpose(1, 2), a["down"], a["up"], margin)
    wide = _extend_axis(tall.transpose(1, 2), a["right"], a["left"], margin)
    return (wide.real if wide.is_complex() else wide).to(z.dtype)


def _extend_axis(z: Tensor, forth: Tensor, back: Tensor, margin: int) -> Tensor:
    """Extends (N, K, L, C) along L, whose image has K positions, by ``forth`` at the end."""
    size = min(z.shape[1:3])
    steps = range(1, margin + 1)
    after = [propagate(z[:, :, -1:], forth, step / size) for step in steps]
    before = [propagate(z[:, :, :1], back, step / size) for step in reversed(steps)]
    parts = [*before, z, *after]
    wide = torch.promote_types(parts[0].dtype, parts[-1].dtype)
    return torch.cat([part.to(wide) for part in parts], dim=2)


def decode_map(z: Tensor, decode: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Decodes a map (N, L, L, C) in windows of the image's ``size`` G, of which L is a multiple.

    ``decode`` maps windows (n, G, G, C) to patches (n, G * G, P), the result is (N, L, L, P).
    """
    number = z.shape[1] // size
    windows = z.unflatten(1, (number, size)).unflatten(3, (number, size)).transpose(2, 3)
    patches = decode(windows.flatten(0, 2)).unflatten(1, (size, size))
    rows = patches.unflatten(0, (len(z), number, number)).transpose(2, 3)
    return rows.flatten(3, 4).flatten(1, 2)


def restore_pixels(
    patches: Tensor, predicted: Tensor, restore: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Puts patches (N, G, G, P) of the image into the middle of the decoded ones (N, L, L, P).

    Patches outside get the average mean and deviation of the image's, by ``restore`` of
    ``ReconstructionLoss``: from predictions and true patches (N, K, P) to pixels.
    """
    size, length = patches.shape[1], predicted.shape[1]
    mean = patches.mean(dim=(1, 2, 3)).view(-1, 1, 1)
    deviation = patches.std(dim=-1).mean(dim=(1, 2)).view(-1, 1, 1)
    ramp = torch.linspace(-1, 1, patches.shape[-1], device=patches.device)
    typical = (mean + deviation * ramp / ramp.std()).expand(-1, length * length, -1)
    made = restore(predicted.flatten(1, 2), typical).unflatten(1, (length, length))
    start = (length - size) // 2
    made[:, start : start + size, start : start + size] = patches
    return made


@register_figure("beyond")
def draw_beyond(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    scale: Literal["corner", "centre"] = "corner",
    distances: Sequence[float] = (0.25, 0.5, 1.0),
) -> Figure:
    """Propagates the features of whole images by ``distances`` beyond their borders, and decodes.

    ``scale`` says whose linear models are used. Raises ``NotApplicable`` if no run has those of
    QB-Heat, or there are no images.
    """
    results = run_on_images(
        runs,
        lambda run, files: _compute(run, files, scale, distances),
        options,
        nothing="no propagation",
    )
    images = {}
    for index, (label, (columns, used, offset)) in enumerate(results.found.items(), 1):
        rows = list(zip(*columns.values(), strict=True))
        note = f"Models of the {used}, Δx = {offset:g} W"
        chart = plot_grid(rows, column_names=list(columns), note=note)
        caption = f"{label}: images and their surroundings."
        images[f"{index}_images"] = chart_image(chart, caption=caption, format="jpg")
    data = {k: {"scale": one[1], "offset": one[2]} for k, one in results.found.items()}
    return results.draw("beyond", "Propagation beyond the image", _EXPLANATION, images, runs=data)


@torch.no_grad()
def _compute(
    run: Run, files: Sequence[str], scale: str, distances: Sequence[float]
) -> tuple[dict[str, list[RGBImage]], str, float]:
    """Returns images by the title of their column, whose linear models they are, and Δx."""
    models = read_linear_models(run.weights, run.label)
    scale = scale if scale in models else next(iter(models))
    offset, matrices = models[scale]
    generators = {name: find_generator(matrices[name], offset) for name in NAMES}
    unchanged = {name: torch.zeros_like(a) for name, a in generators.items()}
    model = cast(ReconstructionModel, run.model)
    images = model.preprocess_image(crop_squares(run.cfg, files))
    z = model.encode(images).float()
    size = z.shape[1]

    def draw(by: Generators, margin: int) -> list[RGBImage]:
        pixels = decode_beyond(model, images, z, by, margin)
        border = margin * model.decoder.patch_size
        return [_frame(to_rgb(image, run.cfg.INPUT.FORMAT), border) for image in pixels]

    margins = sorted({max(1, round(size * distance)) for distance in distances})
    columns = {"image": draw(unchanged, 0)}
    columns |= {f"{margin / size:g} W beyond": draw(generators, margin) for margin in margins}
    columns[f"A = 0, {margins[-1] / size:g} W"] = draw(unchanged, margins[-1])
    return columns, scale, offset


def decode_beyond(
    model: ReconstructionModel, images: Tensor, z: Tensor, generators: Generators, margin: int
) -> Tensor:
    """Returns images (N, 3, L, L) in the mapper's pixels, L of S plus twice ``margin`` patches.

    The normalised images (N, 3, S, S) have the features (N, G, G, C) decoded around them;
    generators of zeros continue features unchanged.
    """
    size, patch = model.decoder.grid_size, model.decoder.patch_size
    whole = size * math.ceil(margin / size)  # whole windows, the one in the middle is the image
    large = extend_map(z.cpu(), generators, whole).to(z.device)
    start, length = whole - margin, size + 2 * margin
    decoded = decode_map(large, model.decoder, size)[:, start:, start:][:, :length, :length]
    true = patchify(images, patch).unflatten(1, (size, size))
    patches = restore_pixels(true, decoded, model.loss.restore)
    return unpatchify(patches.flatten(1, 2), patch) * model.pixel_std + model.pixel_mean


def _frame(pixels: Any, border: int) -> RGBImage:
    """Returns (_SIDE, _SIDE, 3) with a line around the image inside ``border`` pixels."""
    cell = cv2.resize(pixels, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA).clip(0, 255)
    if border:
        start, end = (round(_SIDE * at / len(pixels)) for at in (border, len(pixels) - border))
        cell = cv2.rectangle(cell, (start - 1, start - 1), (end, end), (255, 255, 255), 1)
    return np.rint(cell).astype(np.uint8)
