# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "beyond": features that the linear models of QB-Heat carry beyond the visible frame.

Paper: QB-Heat, arXiv:2211.13228, Eq. 3 and 5. A model learns one step z(x + Δx) = (I + M) z(x).
With ∂z/∂x = A z, the step to any distance d is e^{dA} = (I + M)^{d / Δx}, and A = log(I + M) / Δx.
The paper does not compare such features with the encoder's.

Here, the frame is a square as large as the quarter that the encoder sees in pre-training. The
features in its outermost row or column are carried outward. The true features are those of the same
row or column if the frame is moved by this distance in a larger image. Distances are relative to W,
the side of an image in pre-training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np
import scipy.linalg
import torch
from matplotlib.figure import Figure as Chart
from torch import Tensor

from qbheat_det.modeling.pretrain.qb_heat import DIRECTIONS, QBHeat

from . import plotting
from .attention import batch_images, crop_squares
from .figures import Figure, NotApplicable, Table
from .run import FigureOptions, Run, run_on_images
from .spectrum import NAMES, Models, read_linear_models

_NUM_IMAGES = 64
_EXPLANATION = (
    "The linear models carry the features at the border of a frame outward, by (I + M) to the "
    "power of d / Δx. Errors are relative to the encoder's features in a frame moved by the "
    "distance d. A constant, the mean of the true features, has an error of 1.",
    "Controls: the features at the border, unchanged, and the mean of the features in the frame.",
)


@dataclass(frozen=True)
class Propagation:
    """Errors of predicted features.

    Attributes:
        distances: distances from the frame's border, as shares of W.
        errors: the relative squared error at each distance, by predictor.
    """

    distances: Sequence[float]
    errors: Mapping[str, Sequence[float]]


def find_generator(step: Tensor, offset: float) -> Tensor:
    """Returns A = log(I + M) / Δx, (C, C), float64 or complex128, of a learned step M (C, C).

    It is complex if I + M has a negative eigenvalue. Raises ``NotApplicable`` if I + M is singular,
    and has no logarithm.
    """
    whole = torch.eye(len(step), dtype=torch.float64) + step.detach().cpu().double()
    if not float(torch.linalg.cond(whole)) < 1 / torch.finfo(whole.dtype).eps:  # nan for 0
        raise NotApplicable("I + M is singular, so features cannot be carried by a part of a step")
    return torch.from_numpy(np.asarray(scipy.linalg.logm(whole.numpy()))) / offset


def carry(z: Tensor, generator: Tensor, distance: float) -> Tensor:
    """Returns e^{dA} z, the features (..., C) at a distance d, in float64.

    If A is complex, the imaginary part of the result is dropped. It is 0 after whole steps.
    """
    power = scipy.linalg.expm(distance * generator.numpy())
    return z.double() @ torch.from_numpy(np.real(power)).T


def measure_errors(images: Tensor, model: QBHeat, models: Models) -> Propagation:
    """Compares predicted with true features on normalized images (N, 3, 1.5 S, 1.5 S).

    The frame has S / 2 pixels, and moves by up to S / 2 pixels in four directions. Errors are sums
    over images, directions and positions.
    """
    patch = model.decoder.patch_size
    half_grid = model.decoder.grid_size // 2  # positions in the frame, and of the largest move
    side = half_grid * patch

    def encode(name: str, distance: int) -> Tensor:
        """Returns the features (N, h, w, C) of the frame moved by a number of positions."""
        right, down = DIRECTIONS[name]
        row = side + down * distance * patch
        column = side + right * distance * patch
        return model.encode(images[..., row : row + side, column : column + side]).cpu().double()

    generators = {}
    for scale, (offset, matrices) in models.items():
        title = f"learned, {scale} (Δx = {offset:g} W)"
        generators[title] = {name: find_generator(matrices[name], offset) for name in NAMES}
    frame = encode("A1", 0)
    mean = frame.mean(dim=(1, 2)).unsqueeze(1)  # (N, 1, C)
    errors: dict[str, list[float]] = {}
    distances = []
    for moved in range(1, half_grid + 1):
        distance = moved / (2 * half_grid)
        distances.append(distance)
        squares: dict[str, float] = {}
        variance = 0.0
        for name in NAMES:
            border = _border(frame, name)  # (N, h, C)
            true = _border(encode(name, moved), name)
            predictions = {"border, unchanged": border, "mean of the frame": mean}
            for title, by_name in generators.items():
                predictions[title] = carry(border, by_name[name], distance)
            for title, predicted in predictions.items():
                square = float((predicted - true).square().sum())
                squares[title] = squares.get(title, 0.0) + square
            variance += float((true - true.mean(dim=(0, 1))).square().sum())
        for title, square in squares.items():
            errors.setdefault(title, []).append(square / variance if variance else float("nan"))
    return Propagation(distances, errors)


def _border(z: Tensor, name: str) -> Tensor:
    """Returns the outermost row or column (N, h, C) of features (N, h, h, C) in a direction."""
    right, down = DIRECTIONS[name]
    if right:
        return z[:, :, -1 if right > 0 else 0]
    return z[:, -1 if down > 0 else 0]


def draw_beyond(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the error of carried features over the distance, one chart for each QB-Heat run.

    The number of images is ``_NUM_IMAGES``.
    """

    @torch.no_grad()
    def compute(run: Run, files: Sequence[str]) -> Propagation:
        models = read_linear_models(run.weights, run.label)
        model = cast(QBHeat, run.model)
        entries = crop_squares(run.cfg, files, model.image_size * 3 // 2)
        images = torch.cat(list(batch_images(model, entries, f"beyond, {run.label}")))
        return measure_errors(images, model, models)

    options = replace(options, num_images=_NUM_IMAGES)
    results = run_on_images(runs, compute, options, nothing="no features beyond the frame")
    images = {}
    rows = []
    for index, (label, result) in enumerate(results.by_label.items(), start=1):
        images[f"errors_{index}"] = plotting.chart_image(
            plot_errors(result, label), caption=f"{label}: error of features beyond the frame."
        )
        quarter = result.distances.index(0.25)
        for title, errors in result.errors.items():
            chosen = (errors[0], errors[quarter], errors[-1])
            rows.append((f"{label}: {title}", *(f"{error:.3f}" for error in chosen)))
    note = f"{len(results.files):,} images."
    return results.draw(
        "beyond",
        "Features beyond the frame",
        (*_EXPLANATION, note),
        images,
        Table(("Error of", "one position", "0.25 W", "0.5 W"), rows),
        runs={label: asdict(result) for label, result in results.by_label.items()},
    )


@plotting.themed
def plot_errors(result: Propagation, label: str) -> Chart:
    """Draws a line per predictor, over the distance from the border."""
    figure, axes = plotting.start_chart(height=3.8)
    styles = plotting.list_styles(len(result.errors))
    for style, (title, errors) in zip(styles, result.errors.items(), strict=True):
        axes.plot(result.distances, errors, **style, label=title)
    axes.axhline(1.0, color=plotting.AXIS_COLOR, lw=0.8)
    axes.set_yscale("log")  # powers of matrices grow exponentially
    axes.set_title(plotting.to_text(label))
    axes.set_xlabel("distance beyond the frame, in sides of the image W")
    axes.set_ylabel("relative squared error")
    plotting.add_legend(figure, axes)
    return figure
