# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "heat": class activation maps beside steady heat with the same border.

Papers: QB-Heat, arXiv:2211.13228, Sec. 1 and Fig. 1; class activation maps (CAM) are
arXiv:1512.04150, Eq. 2. A map exists where a linear classifier reads the mean of a feature map; the
first token, which has no position, is not in it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from scipy.sparse.csgraph import laplacian
from scipy.sparse.linalg import splu
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, register_figure
from qbheat_det.inference.drawing import RGBImage
from qbheat_det.modeling.classification import ImageClassifier, LinearDecoder

from . import plotting
from .figure import FigureOptions, batch_images, crop_squares, run_on_images
from .run import Run

FloatMap = npt.NDArray[np.float64]

_ROUNDING = 1e-9  # relative; below it, a map is constant
_EXPLANATION = (
    "The paper starts from the similarity of a classifier's class activation map (CAM) to heat. "
    "Here heat inside the CAM's own border is steady, u_xx + u_yy = 0. Agreement shows that a CAM "
    "is smooth, not that features obey the heat equation.",
)


class ClassActivation(NamedTuple):
    """Maps (N, H, W) whose mean and ``rest``, of bias and first token, (N,), sum to the logit."""

    maps: Tensor
    rest: Tensor
    scores: Tensor
    classes: Tensor


@torch.no_grad()
def compute_class_activation(
    model: ImageClassifier, images: Tensor, chosen: int | None = None
) -> ClassActivation:
    """Returns the map of each normalised image (N, 3, S, S), by default of the predicted class."""
    decoder = cast(LinearDecoder, model.decoder)
    features = model.backbone(images)
    logits = decoder(features).float()
    classes = logits.argmax(dim=1)
    if chosen is not None:
        classes = torch.full_like(classes, chosen)
    weights, bias = _fold_normalization(decoder)
    channels = decoder.pool.channels
    pooled = features[decoder.pool.in_feature].float()
    maps = torch.einsum("nchw,nc->nhw", pooled, weights[classes, :channels])
    rest = bias[classes]
    if decoder.pool.token_dim:
        first = features["tokens"][:, 0].float()
        rest = rest + (first * weights[classes, channels:]).sum(dim=1)
    scores = logits.softmax(dim=1).gather(1, classes[:, None])[:, 0]
    return ClassActivation(maps, rest, scores, classes)


def _fold_normalization(decoder: LinearDecoder) -> tuple[Tensor, Tensor]:
    """Returns weights (K, C + D) and bias (K,) for features as they come from the pool."""
    weights, bias = decoder.classifier.weight.float(), decoder.classifier.bias.float()
    norm = decoder.norm
    if not isinstance(norm, nn.BatchNorm1d):
        return weights, bias
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    folded = weights * torch.rsqrt(variance.float() + norm.eps)
    return folded, bias - folded @ mean.float()


def solve_steady_heat(values: npt.ArrayLike) -> FloatMap:
    """Solves Laplace's equation inside the border of maps (..., H, W), by the five-point stencil.

    The outermost values are given; the others become the mean of their four neighbours. Raises
    ``NotApplicable`` if there is nothing inside the border.
    """
    maps = np.array(values, dtype=np.float64)
    height, width = maps.shape[-2:]
    if height < 3 or width < 3:
        raise NotApplicable(f"a map of {height} x {width} has no position inside its border")
    inside = np.zeros((height, width), dtype=np.bool_)
    inside[1:-1, 1:-1] = True
    # Number of neighbours on the diagonal, -1 for each of them: of a grid, the sum of two paths'.
    rows, columns = (
        laplacian(sparse.diags([1.0, 1.0], [1, -1], shape=(n, n)).tocsr()) for n in (height, width)
    )
    stencil = sparse.kronsum(columns, rows).tocsr()[inside.ravel()]
    flat = maps.reshape(-1, height * width)
    inflow = -(stencil[:, ~inside.ravel()] @ flat[:, ~inside.ravel()].T)
    flat[:, inside.ravel()] = splu(stencil[:, inside.ravel()].tocsc()).solve(inflow).T
    return maps


def correlate_inside(one: FloatMap, other: FloatMap) -> float:
    """Returns Pearson's correlation of maps (H, W) inside their borders; nan if one is constant."""
    inside = [values[1:-1, 1:-1].ravel() for values in (one, other)]
    if any(np.ptp(values) <= _ROUNDING * np.abs(values).max() for values in inside):
        return math.nan
    return float(np.corrcoef(inside[0], inside[1])[0, 1])


class _Heat(NamedTuple):
    """Of one image: pixels (S, S, 3), class with its score, class activation, heat (H, W)."""

    image: RGBImage
    name: str
    score: float
    activation: FloatMap
    steady: FloatMap


@register_figure("heat")
def draw_heat(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    heat_class: str | None = None,
    heat_size: int | None = None,
) -> Figure:
    """Draws CAM and steady heat of images ``heat_size`` pixels a side."""
    results = run_on_images(
        runs,
        lambda run, files: _compute(run, files, heat_class, heat_size),
        options,
        nothing="no class activation maps",
    )
    images, data = {}, {}
    for index, (label, found) in enumerate(results.found.items(), 1):
        images[f"maps_{index}"] = _draw_maps(label, found)
        data[label] = [
            {"class": one.name, "score": one.score,
             "correlation": correlate_inside(one.activation, one.steady)} for one in found
        ]  # fmt: skip
    return results.draw("heat", "Class activation and steady heat", _EXPLANATION, images, runs=data)


def _compute(run: Run, files: Sequence[str], wanted: str | None, size: int | None) -> list[_Heat]:
    run.require_kind("classifier")
    model = run.model
    if not isinstance(model, ImageClassifier) or not isinstance(model.decoder, LinearDecoder):
        raise NotApplicable(f"'{run.label}' has no linear layer over the mean of a map")
    names = [str(name) for name in run.cfg.MODEL.CLASS_NAMES]
    if wanted is not None and wanted not in names:
        raise UserError(f"--heat-class '{wanted}' is no class of '{run.label}'")
    entries = crop_squares(run.cfg, files, size)
    found = []
    for entry in entries:
        (images,) = batch_images(model, [entry], "")
        chosen = names.index(wanted) if wanted is not None else None
        cam = compute_class_activation(model, images, chosen)
        activation = cam.maps[0].double().cpu().numpy()
        steady = solve_steady_heat(activation)
        pixels = plotting.to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
        name = names[int(cam.classes[0])]
        found.append(_Heat(pixels, name, float(cam.scores[0]), activation, steady))
    return found


def _draw_maps(label: str, found: Sequence[_Heat]) -> Image:
    rows, names = [], []
    for one in found:
        image = plotting.enlarge(one.image)
        low, high = float(one.activation.min()), float(one.activation.max())
        scale: dict[str, Any] = {"low": low, "high": high, "colors": "inferno"}
        cells = [
            plotting.enlarge(plotting.color_map(values, **scale), len(image), exact=True)
            for values in (one.activation, one.steady)
        ]
        stride = len(image) / len(one.activation)
        rows.append([image, plotting.overlay_map(image, one.activation, stride=stride, **scale)])
        rows[-1] += cells
        names.append(f"{plotting.to_text(one.name)} {one.score:.2f}\n{low:.3g} to {high:.3g}")
    columns = ["image", "CAM over it", "CAM", "steady heat"]
    chart = plotting.plot_grid(rows, column_names=columns, row_names=names)
    caption = f"{label}: class and score, range of colours in logits."
    return plotting.chart_image(chart, caption=caption, format="jpg")
