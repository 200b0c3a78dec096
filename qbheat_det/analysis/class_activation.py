# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "heat": class activation maps beside steady heat with the same border.

Papers: QB-Heat, arXiv:2211.13228, Sec. 1 and Fig. 1; class activation maps (CAM) are
arXiv:1512.04150, Eq. 2. A map exists where a linear classifier reads the mean of a feature map; the
first token, which has no position, is not in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
import torch
from matplotlib.figure import Figure as Chart
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.core.text import join_first
from qbheat_det.modeling.classification import ImageClassifier, LinearDecoder

from .figure import FigureOptions, SharedImages, batch_images, crop_squares, run_each
from .plotting import (
    RGBImage,
    chart_image,
    color_map,
    enlarge,
    list_styles,
    overlay_map,
    plot_grid,
    start_figure,
    themed,
    to_rgb,
    to_text,
)
from .run import Run
from .steady_heat import Agreement, FloatMap, HeatComparison, average, compare_with_heat

_COLORS = "inferno"
_LABELS = {
    "steady": "steady heat",
    "with_source": "with a source",
    "corners": "between corners",
    "border_mean": "mean of border",
    "shuffled": "shuffled map",
}
_EXPLANATION = (
    "The paper starts from the similarity of a classifier's class activation map (CAM) to heat "
    "that spreads over a plate. Here the plate has the CAM's own border, and heat inside it is "
    "steady, u_xx + u_yy = 0. It has no peak inside the border (the maximum principle), so that "
    "the last map also fixes the CAM's largest value inside, as a source.",
    "Controls are a bilinear map between the corners, the border's mean, and the CAM with its "
    "positions shuffled. Relative error is 0 for the same map, 1 for the mean of the CAM. "
    "Agreement shows that a CAM is smooth, not that features obey the heat equation.",
)


@dataclass(frozen=True)
class ClassActivation:
    """Class activation maps of N images, one class each.

    Attributes:
        maps: (N, H, W), in logits: their mean over positions, and ``rest``, sum to the logit.
        rest: (N,), what no position adds: the bias, and the first token if it is read.
        scores: (N,), softmax over all classes, in [0, 1].
        classes: (N,), index.
    """

    maps: Tensor
    rest: Tensor
    scores: Tensor
    classes: Tensor


@torch.no_grad()
def compute_class_activation(
    model: ImageClassifier, images: Tensor, chosen: int | None = None
) -> ClassActivation:
    """Returns the map of each image (N, 3, S, S), of class ``chosen`` or of the predicted one.

    The model has a linear decoder and is in eval mode.
    """
    decoder = cast(LinearDecoder, model.decoder)
    features = model.backbone(images)
    logits = decoder(features).float()
    classes = logits.argmax(dim=1)
    if chosen is not None:
        classes = torch.full_like(classes, chosen)
    weights, bias = fold_normalization(decoder)
    channels = decoder.pool.channels
    pooled = features[decoder.pool.in_feature].float()
    maps = torch.einsum("nchw,nc->nhw", pooled, weights[classes, :channels])
    rest = bias[classes]
    if decoder.pool.token_dim:
        first = features["tokens"][:, 0].float()
        rest = rest + (first * weights[classes, channels:]).sum(dim=1)
    return ClassActivation(
        maps=maps,
        rest=rest,
        scores=logits.softmax(dim=1).gather(1, classes[:, None])[:, 0],
        classes=classes,
    )


def fold_normalization(decoder: LinearDecoder) -> tuple[Tensor, Tensor]:
    """Returns weights (K, C + D) and bias (K,) for features as they come from the pool.

    Behind a BatchNorm of mean m and variance v these are w / sqrt(v + eps) and
    b - w m / sqrt(v + eps), else those of the linear layer.
    """
    weights, bias = decoder.classifier.weight.float(), decoder.classifier.bias.float()
    norm = decoder.norm
    if not isinstance(norm, nn.BatchNorm1d):
        return weights, bias
    assert norm.running_mean is not None
    assert norm.running_var is not None
    folded = weights * torch.rsqrt(norm.running_var.float() + norm.eps)
    return folded, bias - folded @ norm.running_mean.float()


@dataclass(frozen=True)
class _Heat:
    """One run: class, score, map and comparison of each image, and the pixels of the drawn ones."""

    classes: list[str]
    scores: list[float]
    maps: list[FloatMap]
    comparisons: list[HeatComparison]
    images: list[RGBImage]

    @property
    def agreements(self) -> dict[str, list[Agreement]]:
        """Of all images, by the keys of ``_LABELS``."""
        return {kind: [one.agreements[kind] for one in self.comparisons] for kind in _LABELS}


@register_figure("heat")
def draw_heat(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    heat_class: str | None = None,
    heat_images: int = 64,
    heat_size: int | None = None,
) -> Figure:
    """Draws CAM and steady heat of images, and how close they are beside controls.

    Args:
        runs: to compare.
        options: ``images``, ``num_images``, and ``seed`` of the shuffles.
        heat_class: name or index of the class; None takes the predicted class of each image.
        heat_images: images that are averaged over, at least those drawn.
        heat_size: side of the images in pixels; None takes the run's.
    """
    shared = SharedImages(runs, max(options.num_images, heat_images), options.images)

    def compute(run: Run) -> _Heat:
        return _compute(run, shared, options, heat_class, heat_size)

    results = run_each(runs, compute, nothing="no class activation maps")
    found = results.found
    images = {
        f"maps_{i}": _draw_maps(label, one) for i, (label, one) in enumerate(found.items(), 1)
    }
    images["agreement"] = chart_image(
        plot_agreements({label: one.agreements for label, one in found.items()}),
        caption="Median and quartiles over the images, over positions inside the border.",
    )
    rows = []
    for label, one in found.items():
        for kind, agreements in one.agreements.items():
            mean = average(agreements)
            numbers = (f"{mean.correlation:.2f}", f"{mean.relative_error:.2f}")
            rows.append((f"{label}, {_LABELS[kind]}", *numbers))
    return Figure(
        "heat",
        "Class activation and steady heat",
        [*_EXPLANATION, *shared.explain(), *results.explain()],
        images,
        {
            "images": shared.files,
            "runs": {
                label: [
                    {"class": name, "score": score, "source": heat.source}
                    | {kind: asdict(agreement) for kind, agreement in heat.agreements.items()}
                    for name, score, heat in zip(
                        one.classes, one.scores, one.comparisons, strict=True
                    )
                ]
                for label, one in found.items()
            },
            "left_out": results.left_out,
        },
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
    chosen = None if wanted is None else _find_class(run.label, names, model.num_classes, wanted)
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
    return _Heat(
        classes=[names[i] if i < len(names) else str(i) for i in classes],
        scores=[score for batch in activations for score in batch.scores.tolist()],
        maps=maps,
        comparisons=comparisons,
        images=[
            to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
            for entry in entries[: options.num_images]
        ],
    )


def _find_class(label: str, names: Sequence[str], num_classes: int, wanted: str) -> int:
    if wanted in names:
        return names.index(wanted)
    if wanted.isdecimal() and int(wanted) < num_classes:
        return int(wanted)
    raise UserError(
        f"--heat-class '{wanted}' is no class of '{label}', which has {join_first(names, 8)} and "
        f"the indices 0 to {num_classes - 1}"
    )


def _draw_maps(label: str, one: _Heat) -> Image:
    rows, names = [], []
    for index, image in enumerate(map(enlarge, one.images)):
        values, comparison = one.maps[index], one.comparisons[index]
        low, high = float(values.min()), float(values.max())
        side = image.shape[0]
        maps = (values, comparison.steady, comparison.with_source)
        cells = [enlarge(color_map(m, low, high, _COLORS), side, exact=True) for m in maps]
        stride = side / len(values)
        overlay = overlay_map(image, values, stride=stride, low=low, high=high, colors=_COLORS)
        rows.append([image, overlay, *cells])
        names.append(
            f"{to_text(one.classes[index])} {one.scores[index]:.2f}\n{low:.3g} to {high:.3g}"
        )
    columns = ["image", "CAM over it", "CAM", "steady heat", "… with a source"]
    chart = plot_grid(rows, column_names=columns, row_names=names)
    return chart_image(
        chart, caption=f"{label}: class and score, range of colours in logits.", format="jpg"
    )


@themed
def plot_agreements(agreements: Mapping[str, Mapping[str, Sequence[Agreement]]]) -> Chart:
    """Draws median and quartiles over images of correlation and relative error, a mark a run."""
    figure = start_figure(height=2.4 + 0.5 * len(agreements), width=7.6)
    panels = figure.subplots(1, 2, sharey=True)
    measures = {"correlation": "correlation inside", "relative_error": "relative error inside"}
    styles = list_styles(len(agreements))
    for axes, (measure, text) in zip(panels, measures.items(), strict=True):
        for index, ((label, kinds), style) in enumerate(
            zip(agreements.items(), styles, strict=True)
        ):
            values = np.array([[asdict(a)[measure] for a in kinds[kind]] for kind in _LABELS])
            known = ~np.isnan(values).all(axis=1)
            first, median, third = np.nanpercentile(values[known], (25, 50, 75), axis=1)
            rows = np.flatnonzero(known) + 0.16 * (index - (len(agreements) - 1) / 2)
            errors = [median - first, third - median]
            axes.errorbar(
                median, rows, xerr=errors, label=to_text(label), **style | {"linestyle": "none"}
            )
        axes.set_xlabel(text)
    panels[0].set_title("CAM and maps made from its border")
    panels[0].set_yticks(range(len(_LABELS)), _LABELS.values())
    panels[0].invert_yaxis()
    if len(agreements) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center")
    return figure
