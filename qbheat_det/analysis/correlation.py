# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "correlation": spatial correlation of an encoder's feature map, image by image.

Paper: QB-Heat, arXiv:2211.13228, Appendix D and Fig. 12, after "Barlow Twins", arXiv:2103.03230.
As there, the mean over the channels is subtracted. Histograms are of shares of images, not counts.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import cast

import numpy as np
import torch
from detectron2.config import CfgNode
from fvcore.nn.precise_bn import BN_MODULE_TYPES
from matplotlib.figure import Figure as Chart
from matplotlib.markers import CARETUPBASE
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.checkpoint import info_of
from qbheat_det.core.figures import Figure, NotApplicable, Table, register_figure
from qbheat_det.modeling.contracts import FixedSizeModel
from qbheat_det.probing import find_feature
from qbheat_det.probing.features import recalibrate_bn

from .figure import (
    Entries,
    FigureOptions,
    batch_images,
    crop_squares,
    find_encoder,
    find_size,
    run_on_images,
)
from .plotting import chart_image, list_styles, start_chart, themed, to_text
from .run import Run

_TITLE = "Spatial correlation of feature maps"
_NUM_IMAGES = 64
_PAPER_SIZE = 224
_BINS = 24
_ROUNDING = 1e-6  # relative
_EXPLANATION = (
    "The spatial correlation of an image is the mean |correlation| over channels of two different "
    "positions of the encoder's map: 1 where all are the same up to sign and scale. An untrained "
    "encoder is the control, with dotted lines; its BatchNorms get statistics of these images. "
    "Different maps or image sizes are not comparable.",
)


def measure_spatial_correlation(features: Tensor) -> Tensor:
    """From maps (N, C, H, W) to the mean |correlation| between two positions, (N,), in [0, 1].

    A position whose features are all equal is correlated with none. Raises ``NotApplicable`` for
    maps of less than two positions.
    """
    vectors = features.float().flatten(2).transpose(1, 2)
    centred = vectors - vectors.mean(dim=-1, keepdim=True)
    # Of features that are all equal only rounding is left, which is no direction.
    differ = centred.norm(dim=-1, keepdim=True) > _ROUNDING * vectors.norm(dim=-1, keepdim=True)
    vectors = F.normalize(centred * differ, dim=-1)
    positions = vectors.shape[1]
    if positions < 2:
        raise NotApplicable(f"correlation needs two positions of a map, but there is {positions}")
    correlations = (vectors @ vectors.transpose(1, 2)).abs()
    off_diagonal = correlations.sum(dim=(1, 2))
    off_diagonal = off_diagonal - correlations.diagonal(dim1=1, dim2=2).sum(dim=1)
    return (off_diagonal / (positions * (positions - 1))).clamp(0.0, 1.0)


@dataclass(frozen=True)
class _Correlation:
    """Of one run."""

    map: str
    values: list[float]
    is_control: bool


@register_figure("correlation")
def draw_correlation(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    correlated_images: int = _NUM_IMAGES,
    size: int | None = None,
    map: str | None = None,
) -> Figure:
    """Draws a histogram of spatial correlation for each run, in one chart a map.

    ``size`` is the side of the images, None for that of the first run; ``map`` the name of the
    feature map, None for the one that each model reads.
    """
    side = size or find_size(runs, _PAPER_SIZE)
    results = run_on_images(
        runs,
        lambda run, files: _correlate(run, map, files, side),
        options,
        nothing="no spatial correlation",
        number=correlated_images,
    )
    found = results.found
    note = f"{len(results.files):,} images, the centre square of each at {side} pixels."
    images = {}
    for name in dict.fromkeys(one.map for one in found.values()):
        chart = plot_histograms({k: one for k, one in found.items() if one.map == name}, name)
        caption = f"Spatial correlation of the map {name}. Triangles are means."
        images[f"histograms_{name}"] = chart_image(chart, caption=caption)
    rows = []
    for label, one in found.items():
        means = (f"{fmean(one.values):.3f}", f"{pstdev(one.values):.3f}")
        rows.append((label, one.map, *means, "untrained" if one.is_control else ""))
    table = Table(("Run", "map", "mean", "standard deviation", "control"), rows)
    data = {k: asdict(one) for k, one in found.items()}
    text = (*_EXPLANATION, note)
    return results.draw("correlation", _TITLE, text, images, table, size=side, runs=data)


@register_figure("correlation", training=True)
def measure_in_training(
    model: nn.Module, load_images: Callable[[int], Entries], cfg: CfgNode
) -> Figure:
    """Measures the spatial correlation of the map that the model reads; draws nothing."""
    if not isinstance(model, FixedSizeModel):
        raise NotApplicable(f"{type(model).__name__} has no images of one size")
    entries = load_images(_NUM_IMAGES)
    name = model.in_feature
    encoder, batches = find_encoder(model), batch_images(model, entries, "correlation")
    found = [measure_spatial_correlation(encoder(images)[name]) for images in batches]
    values = torch.cat(found).tolist()
    return Figure(
        "correlation",
        _TITLE,
        data={"map": name, "images": [e.get("file_name", "") for e in entries], "values": values},
        scalars={"correlation/mean": fmean(values)},
    )


@themed
def plot_histograms(found: Mapping[str, _Correlation], name: str) -> Chart:
    """Draws a histogram for each run over common bins, and a mark at its mean."""
    figure, axes = start_chart(height=3.4 + 0.2 * len(found))
    edges = np.histogram_bin_edges(np.concatenate([v.values for v in found.values()]), bins=_BINS)
    styles = list_styles(len(found))
    for (label, one), style in zip(found.items(), styles, strict=True):
        dash = ":" if one.is_control else style["linestyle"]
        shares = 100 * np.histogram(one.values, bins=edges)[0] / len(one.values)
        mean = fmean(one.values)
        text = f"{to_text(label)}: mean {mean:.3f}, {len(one.values):,} images"
        axes.stairs(shares, edges, color=style["color"], ls=dash, lw=1.8, label=text)
        axes.plot(mean, 0, marker=CARETUPBASE, ms=8, color=style["color"], zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Spatial correlation of the map {name}")
    axes.set_xlabel("mean |correlation| between two positions")
    axes.set_ylabel("images (%)")
    figure.legend(loc="outside lower center")
    return figure


def _correlate(run: Run, wanted: str | None, files: Sequence[str], size: int) -> _Correlation:
    encoder = find_encoder(run.model)
    if wanted is None and run.kind != "detector":
        name = cast(FixedSizeModel, run.model).in_feature
    else:  # of a detector the coarsest
        name = find_feature(encoder, wanted or "")
    entries = crop_squares(run.cfg, files, size)
    info = info_of(str(run.weights))
    untrained = info is not None and info.iteration <= 0 and run.kind != "detector"

    if untrained and any(isinstance(module, BN_MODULE_TYPES) for module in encoder.modules()):
        encoder, keys = copy.deepcopy(encoder), run.cfg.MODEL
        images = [entry["image"] for entry in entries]
        recalibrate_bn(encoder, images, pixel_mean=keys.PIXEL_MEAN, pixel_std=keys.PIXEL_STD)
    batches = batch_images(run.model, entries, f"correlation, {run.label}")
    with torch.no_grad():
        encoder.eval()
        found = [measure_spatial_correlation(encoder(images)[name]) for images in batches]
    return _Correlation(name, torch.cat(found).tolist(), untrained)
