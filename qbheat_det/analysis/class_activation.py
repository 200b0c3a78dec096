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

from .figure import FigureOptions, SharedImages, batch_images, crop_squares, run_each
from .plotting import (
    RGBImage,
    chart_image,
    color_map,
    enlarge,
    overlay_map,
    plot_grid,
    to_rgb,
    to_text,
)
from .run import Run

FloatMap = npt.NDArray[np.float64]
BoolMap = npt.NDArray[np.bool_]
Agreement = Mapping[str, float]
""""correlation" (Pearson's) and "relative_error", ‖predicted - true‖ / ‖true - its mean‖."""

_NUM_IMAGES = 64  # that are averaged over
_SHUFFLES = 8  # of one map
_ROUNDING = 1e-9  # relative; below it, a map is constant
_COLORS = "inferno"
_LABELS = {
    "steady": "steady heat",
    "with_source": "with a source",
    "shuffled": "shuffled map",
}
_EXPLANATION = (
    "The paper starts from the similarity of a classifier's class activation map (CAM) to heat. "
    "Here heat inside the CAM's own border is steady, u_xx + u_yy = 0; the last map also fixes the "
    "CAM's largest value inside, as a source. Relative error is 0 for the same map, 1 for the mean "
    "of the CAM. Agreement shows that a CAM is smooth, not that features obey the heat equation.",
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


def mark_border(height: int, width: int) -> BoolMap:
    """Returns (H, W), True at the outermost positions.

    Raises:
        ValueError: there is nothing inside the border.
    """
    if height < 3 or width < 3:
        raise ValueError(f"a map of {height} x {width} has no position inside its border")
    border = np.ones((height, width), dtype=np.bool_)
    border[1:-1, 1:-1] = False
    return border


def solve_steady_heat(values: npt.ArrayLike, fixed: BoolMap) -> FloatMap:
    """Solves Laplace's equation on maps (..., H, W) by the five-point stencil.

    Values are given where ``fixed`` (H, W) is True. Elsewhere the temperature is the mean of its
    neighbours', and no heat flows across the edge of the map.

    Raises:
        ValueError: nothing is fixed, or a fixed value is not finite.
    """
    maps = np.asarray(values, dtype=np.float64)
    flat, given = maps.reshape(-1, fixed.size), fixed.ravel()
    if not given.any() or not np.isfinite(flat[:, given]).all():
        raise ValueError("steady heat needs fixed temperatures that are finite")
    # Number of neighbours on the diagonal, -1 for each of them: of a grid, the sum of two paths'.
    height, width = (
        laplacian(sparse.diags([1.0, 1.0], [1, -1], shape=(n, n)).tocsr()) for n in fixed.shape
    )
    stencil = sparse.kronsum(width, height).tocsr()[~given]
    solved = np.where(given, flat, 0.0)
    inflow = -(stencil[:, given] @ flat[:, given].T)
    solved[:, ~given] = splu(stencil[:, ~given].tocsc()).solve(inflow).T
    return solved.reshape(maps.shape)


def compare_maps(predicted: npt.ArrayLike, true: npt.ArrayLike, where: BoolMap) -> Agreement:
    """Compares maps (H, W) at the positions of ``where`` (H, W); nan where undefined."""
    first, second = (np.asarray(values, dtype=np.float64)[where] for values in (predicted, true))
    if not first.size:
        return {"correlation": np.nan, "relative_error": np.nan}
    spreads = [np.linalg.norm(values - values.mean()) for values in (first, second)]
    norms = [_ROUNDING * np.linalg.norm(values) for values in (first, second)]
    vary = [spread > norm for spread, norm in zip(spreads, norms, strict=True)]
    return {
        "correlation": float(np.corrcoef(first, second)[0, 1]) if all(vary) else np.nan,
        "relative_error": float(np.linalg.norm(first - second) / spreads[1]) if vary[1] else np.nan,
    }


class HeatComparison(NamedTuple):
    """Steady heat (H, W) with a map's border fixed, and with ``source`` (row, column) fixed too.

    ``agreements`` compare both, and the controls, with the map; keys as those of ``_LABELS``.
    """

    steady: FloatMap
    with_source: FloatMap
    source: tuple[int, int]
    agreements: Mapping[str, Agreement]


def compare_with_heat(values: npt.ArrayLike, *, seed: int = 0) -> HeatComparison:
    """Compares a map (H, W) with the steady heat inside its border, and with controls.

    Raises:
        ValueError: the map has nothing inside its border, or a value is not finite.
    """
    true = np.asarray(values, dtype=np.float64)
    border = mark_border(*true.shape)
    inside = ~border
    hottest = np.unravel_index(np.argmax(np.where(inside, true, -np.inf)), true.shape)
    source = int(hottest[0]), int(hottest[1])
    fixed = border.copy()
    fixed[source] = True
    steady = solve_steady_heat(true, border)
    with_source = true if fixed.all() else solve_steady_heat(true, fixed)
    generator = np.random.default_rng(seed)
    shuffled = [generator.permuted(true.ravel()).reshape(true.shape) for _ in range(_SHUFFLES)]
    pairs = zip(solve_steady_heat(np.stack(shuffled), border), shuffled, strict=True)
    agreements = {
        "steady": compare_maps(steady, true, inside),
        "with_source": compare_maps(with_source, true, ~fixed),
        "shuffled": average([compare_maps(*pair, inside) for pair in pairs]),
    }
    return HeatComparison(steady, with_source, source, agreements)


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
    images: list[RGBImage]


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
        for kind, text in _LABELS.items():
            mean = average([comparison.agreements[kind] for comparison in one.comparisons])
            rows.append((f"{label}, {text}", *(f"{value:.2f}" for value in mean.values())))
    data = {
        label: [
            {"class": name, "score": score, "source": heat.source, **heat.agreements}
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
        [to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8) for entry in drawn],
    )


def _draw_maps(label: str, one: _Heat) -> Image:
    rows, names = [], []
    for index, image in enumerate(map(enlarge, one.images)):
        values, heat = one.maps[index], one.comparisons[index]
        low, high, side = float(values.min()), float(values.max()), len(image)
        maps = (values, heat.steady, heat.with_source)
        cells = [enlarge(color_map(m, low, high, _COLORS), side, exact=True) for m in maps]
        stride = side / len(values)
        overlay = overlay_map(image, values, stride=stride, low=low, high=high, colors=_COLORS)
        rows.append([image, overlay, *cells])
        score = f"{to_text(one.classes[index])} {one.scores[index]:.2f}"
        names.append(f"{score}\n{low:.3g} to {high:.3g}")
    columns = ["image", "CAM over it", "CAM", *list(_LABELS.values())[:2]]
    chart = plot_grid(rows, column_names=columns, row_names=names)
    caption = f"{label}: class and score, range of colours in logits."
    return chart_image(chart, caption=caption, format="jpg")
