# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "heat": class activation maps beside steady heat with the same border.

Papers: QB-Heat, arXiv:2211.13228, Sec. 1 and Fig. 1; class activation maps (CAM) are
arXiv:1512.04150, Eq. 2. A map exists where a linear classifier reads the mean of a feature map; the
first token, which has no position, is not in it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from scipy.sparse.csgraph import laplacian
from scipy.sparse.linalg import splu
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.modeling.classification import ImageClassifier, LinearDecoder

from . import plotting
from .figure import FigureOptions, SharedImages, batch_images, crop_squares, run_each
from .run import Run

FloatMap = npt.NDArray[np.float64]
Agreement = Mapping[str, float]
""""correlation" (Pearson's) and "relative_error", ‖predicted - true‖ / ‖true - its mean‖."""

_NUM_IMAGES = 64  # that are averaged over
_SHUFFLES = 8  # of one map
_ROUNDING = 1e-9  # relative; below it, a map is constant
_COLORS = "inferno"
_EXPLANATION = (
    "The paper starts from the similarity of a classifier's class activation map (CAM) to heat. "
    "Here heat inside the CAM's own border is steady, u_xx + u_yy = 0. Relative error is 0 for the "
    "same map, 1 for the mean of the CAM; the control are CAMs with shuffled positions. Agreement "
    "shows that a CAM is smooth, not that features obey the heat equation.",
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
    """Returns the map of each image (N, 3, S, S), of class ``chosen`` or of the predicted one."""
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

    The outermost values are given; the others become the mean of their four neighbours.

    Raises:
        ValueError: a map has nothing inside its border.
    """
    maps = np.array(values, dtype=np.float64)
    height, width = maps.shape[-2:]
    if height < 3 or width < 3:
        raise ValueError(f"a map of {height} x {width} has no position inside its border")
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


def compare_maps(predicted: FloatMap, true: FloatMap) -> Agreement:
    """Compares maps (H, W) inside their borders; nan where undefined."""
    first, second = predicted[1:-1, 1:-1], true[1:-1, 1:-1]
    spreads = [np.linalg.norm(values - values.mean()) for values in (first, second)]
    norms = [_ROUNDING * np.linalg.norm(values) for values in (first, second)]
    vary = [spread > norm for spread, norm in zip(spreads, norms, strict=True)]
    correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1] if all(vary) else np.nan
    error = np.linalg.norm(first - second) / spreads[1] if vary[1] else np.nan
    return {"correlation": float(correlation), "relative_error": float(error)}


class HeatComparison(NamedTuple):
    """Steady heat (H, W) with a map's border, how it agrees with the map, and the control.

    The control are the same positions of a shuffled map.
    """

    steady: FloatMap
    agreement: Agreement
    shuffled: Agreement


def compare_with_heat(values: npt.ArrayLike, *, seed: int = 0) -> HeatComparison:
    """Compares a map (H, W) with the steady heat inside its border.

    Raises:
        ValueError: the map has nothing inside its border.
    """
    true = np.asarray(values, dtype=np.float64)
    steady = solve_steady_heat(true)
    generator = np.random.default_rng(seed)
    shuffled = [generator.permuted(true.ravel()).reshape(true.shape) for _ in range(_SHUFFLES)]
    pairs = zip(solve_steady_heat(np.stack(shuffled)), shuffled, strict=True)
    control = average([compare_maps(*pair) for pair in pairs])
    return HeatComparison(steady, compare_maps(steady, true), control)


def average(agreements: Sequence[Agreement]) -> Agreement:
    """Returns the mean of the values that are defined; nan where there are none."""
    means = {}
    for key in ("correlation", "relative_error"):
        known = [one[key] for one in agreements if not np.isnan(one[key])]
        means[key] = float(np.mean(known)) if known else np.nan
    return means


class _Heat(NamedTuple):
    classes: list[str]
    scores: list[float]
    maps: list[FloatMap]
    comparisons: list[HeatComparison]
    images: list[plotting.RGBImage]


@register_figure("heat")
def draw_heat(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    heat_class: str | None = None,
    heat_size: int | None = None,
) -> Figure:
    """Draws CAM and steady heat of images ``heat_size`` pixels a side, and how close they are.

    ``heat_class`` is the name or index of a class, None for the predicted one of each image.
    """
    shared = SharedImages(runs, max(options.num_images, _NUM_IMAGES), options.images)
    results = run_each(
        runs,
        lambda run: _compute(run, shared, options, heat_class, heat_size),
        nothing="no class activation maps",
    )
    found = results.found
    images = {
        f"maps_{i}": _draw_maps(label, one) for i, (label, one) in enumerate(found.items(), 1)
    }
    rows = []
    for label, one in found.items():
        for name, agreements in (
            (label, [heat.agreement for heat in one.comparisons]),
            (f"{label}, shuffled", [heat.shuffled for heat in one.comparisons]),
        ):
            rows.append((name, *(f"{value:.2f}" for value in average(agreements).values())))
    data = {
        label: [
            {"class": name, "score": score, "steady": heat.agreement, "shuffled": heat.shuffled}
            for name, score, heat in zip(one.classes, one.scores, one.comparisons, strict=True)
        ]
        for label, one in found.items()
    }
    return Figure(
        "heat",
        "Class activation and steady heat",
        [*_EXPLANATION, *shared.explain(), *results.explain()],
        images,
        {"images": shared.files, "runs": data, "left_out": results.left_out},
        Table(("Mean over images", "correlation", "relative error"), rows),
    )


def _compute(
    run: Run, shared: SharedImages, options: FigureOptions, wanted: str | None, size: int | None
) -> _Heat:
    run.require_kind("classifier")
    model = run.model
    if not isinstance(model, ImageClassifier) or not isinstance(model.decoder, LinearDecoder):
        raise NotApplicable(f"'{run.label}' has no linear layer over the mean of a map")
    names = [str(name) for name in run.cfg.MODEL.CLASS_NAMES]
    chosen = names.index(wanted) if wanted in names else None
    if wanted is not None and chosen is None:
        if not wanted.isdecimal() or int(wanted) >= model.num_classes:
            raise UserError(f"--heat-class '{wanted}' is no class of '{run.label}'")
        chosen = int(wanted)
    entries = crop_squares(run.cfg, shared.choose(run), size)
    activations = [
        compute_class_activation(model, images, chosen)
        for images in batch_images(model, entries, f"class activation, {run.label}")
    ]
    maps = [one.double().cpu().numpy() for batch in activations for one in batch.maps]
    try:
        comparisons = [compare_with_heat(one, seed=options.seed) for one in maps]
    except ValueError as error:
        raise NotApplicable(f"'{run.label}': {error}") from error
    classes = [i for batch in activations for i in batch.classes.tolist()]
    drawn = entries[: options.num_images]
    return _Heat(
        [names[i] if i < len(names) else str(i) for i in classes],
        [score for batch in activations for score in batch.scores.tolist()],
        maps,
        comparisons,
        [plotting.to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8) for entry in drawn],
    )


def _draw_maps(label: str, one: _Heat) -> Image:
    rows, names = [], []
    for index, image in enumerate(map(plotting.enlarge, one.images)):
        values, heat = one.maps[index], one.comparisons[index]
        low, high, side = float(values.min()), float(values.max()), len(image)
        cells = [plotting.enlarge(plotting.color_map(one_map, low, high, _COLORS), side, exact=True)
                 for one_map in (values, heat.steady)]  # fmt: skip
        stride = side / len(values)
        overlay = plotting.overlay_map(
            image, values, stride=stride, low=low, high=high, colors=_COLORS
        )
        rows.append([image, overlay, *cells])
        score = f"{plotting.to_text(one.classes[index])} {one.scores[index]:.2f}"
        names.append(f"{score}\n{low:.3g} to {high:.3g}")
    columns = ["image", "CAM over it", "CAM", "steady heat"]
    chart = plotting.plot_grid(rows, column_names=columns, row_names=names)
    caption = f"{label}: class and score, range of colours in logits."
    return plotting.chart_image(chart, caption=caption, format="jpg")
