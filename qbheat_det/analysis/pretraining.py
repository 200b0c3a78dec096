# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figures "reconstructions" and "correlation".

Paper: QB-Heat, arXiv:2211.13228. Reconstructions use the masks of Fig. 2 and 4. Spatial correlation
is defined in Appendix D and Fig. 12, following "Barlow Twins", arXiv:2103.03230. This module first
subtracts the mean over channels from each feature vector.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev
from typing import Any, cast

import numpy as np
import torch
from fvcore.nn.precise_bn import BN_MODULE_TYPES
from matplotlib.figure import Figure as Chart
from matplotlib.markers import CARETUPBASE
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.checkpoint import info_of
from qbheat_det.inference.drawing import RGBImage
from qbheat_det.modeling.contracts import FixedSizeModel, get_backbone, get_encoder
from qbheat_det.modeling.pretrain import ReconstructionModel
from qbheat_det.probing import find_feature
from qbheat_det.probing.features import recalibrate_bn
from qbheat_det.tasks import DETECTION, PRETRAINING

from . import plotting
from .attention import batch_images, crop_squares, find_size
from .figures import Figure, Image, NotApplicable, Table
from .run import Entries, FigureOptions, Run, run_on_images

_GREY = 128
_NORMALIZED = "Each masked patch has the image's mean and contrast."
_RECONSTRUCTIONS = (
    "Masked pixels are gray. Losses are mean squared errors over masked patches. For normalized "
    "patches, predicting zero costs about 1.",
)
_TITLE = "Spatial correlation of feature maps"
_NUM_IMAGES = 64
_PAPER_SIZE = 224
_BINS = 24
_ROUNDING = 1e-6  # relative
_CORRELATION = (
    "The spatial correlation of an image is the mean |correlation| over channels of two different "
    "positions of the encoder's map. It is 1 if all positions are equal up to sign and scale. "
    "Dotted lines are the control: untrained encoders, with BatchNorm statistics of these images. "
    "Different maps or image sizes are not comparable.",
)


@dataclass(frozen=True)
class Reconstructions:
    """Reconstructions of N images, and their losses.

    Attributes:
        columns: the N images (S, S, 3) of each column of the figure, by the column's title.
        losses: for each kind of view, one dict per image with "loss". If the view is a quarter of
            the image, "place" names the quarter.
        mean_losses: the mean loss of each kind of view.
        note: a remark on the reconstructions, or "".
    """

    columns: Mapping[str, Sequence[RGBImage]]
    losses: Mapping[str, Sequence[Mapping[str, Any]]]
    mean_losses: Mapping[str, float]
    note: str


def reconstruct_images(
    model: ReconstructionModel, entries: Entries, *, pixel_format: str
) -> Reconstructions:
    """Reconstructs images from each kind of view. Successive images show different quarters."""
    inputs = [plotting.to_rgb(entry["image"], pixel_format).astype(np.uint8) for entry in entries]
    columns: dict[str, list[RGBImage]] = {"input": inputs}
    losses: dict[str, list[dict[str, Any]]] = {}
    for view, quadrants in model.views.items():
        places = [quadrants[i % len(quadrants)] for i in range(len(inputs)) if quadrants]
        outputs = model(entries, places) if quadrants else model(entries)
        shown, completed, losses[view] = [], [], []
        for image, output in zip(inputs, outputs, strict=True):
            visible = output["visible"].cpu().numpy()[..., None]
            shown.append(np.where(visible, image, np.uint8(_GREY)))
            made = np.rint(plotting.to_rgb(output["reconstruction"], pixel_format).clip(0, 255))
            completed.append(np.where(visible, image, made.astype(np.uint8)))
            place = {"place": output["place"]} if quadrants else {}
            losses[view].append({**place, "loss": float(output["loss_reconstruction"])})
        columns[f"visible {view}"] = shown
        columns[f"from the {view}"] = completed
    means = {view: fmean(row["loss"] for row in rows) for view, rows in losses.items()}
    note = _NORMALIZED if model.loss.normalize_patches else ""
    return Reconstructions(columns, losses, means, note)


def draw_reconstructions(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws one grid per run: input, visible part and reconstruction of each view."""

    def compute(run: Run, files: list[str]) -> Reconstructions:
        run.require_task(PRETRAINING)
        if not isinstance(model := run.model, ReconstructionModel):
            raise NotApplicable(f"{type(model).__name__} has no decoder to pixels")
        entries = crop_squares(run.cfg, files)
        torch.manual_seed(0)  # so that every run has the same random masks
        with torch.no_grad():
            return reconstruct_images(model, entries, pixel_format=run.cfg.INPUT.FORMAT)

    results = run_on_images(runs, compute, options, nothing="no reconstructions")
    found = results.found
    views = list(dict.fromkeys(view for one in found.values() for view in one.losses))
    data, rows = {}, []
    for label, one in found.items():
        data[label] = {"losses": one.losses, "mean_losses": one.mean_losses, "note": one.note}
        means = one.mean_losses
        rows.append((label, *(f"{means[view]:.3f}" if view in means else "-" for view in views)))
    images = {f"grid_{i}": _draw_grid(*run) for i, run in enumerate(found.items(), 1)}
    table = Table(("Mean loss of these images", *(f"from the {view}" for view in views)), rows)
    return results.draw(
        "reconstructions", "Reconstructions", _RECONSTRUCTIONS, images, table, runs=data
    )


def _draw_grid(label: str, made: Reconstructions) -> Image:
    """Draws one row per image, with the columns of ``made.columns``."""
    # At least 160 pixels wide, without smoothing.
    factor = max(1, -(-160 // len(next(iter(made.columns.values()))[0])))
    rows = [
        [image.repeat(factor, axis=0).repeat(factor, axis=1) for image in images]
        for images in zip(*made.columns.values(), strict=True)
    ]
    chart = plotting.plot_grid(rows, column_names=list(made.columns), note=made.note)
    caption = f"{label}: images, visible parts, and predictions.".removeprefix(": ")
    return plotting.chart_image(chart, caption=caption, format="jpg")


def measure_spatial_correlation(features: Tensor) -> Tensor:
    """Returns the spatial correlation (N,), in [0, 1], of N feature maps (N, C, H, W).

    It is the mean absolute correlation of the feature vectors (C,) over all pairs of different
    positions. A position whose features are equal in all channels has correlation 0. Raises
    ``NotApplicable`` if feature maps have only one position.
    """
    vectors = features.float().flatten(2).transpose(1, 2)
    centred = vectors - vectors.mean(dim=-1, keepdim=True)
    # For constant features, only rounding errors remain, which are set to 0.
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
    """The spatial correlation of each image, for the encoder of one run."""

    map: str
    values: list[float]
    is_control: bool


def draw_correlation(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    correlated_images: int = _NUM_IMAGES,
    map: str | None = None,
) -> Figure:
    """Draws histograms of spatial correlation, one chart per feature map and one line per run.

    ``map`` is the name of the feature map. None uses the coarsest map of a detector's encoder, and
    the map ``in_feature`` of other models.
    """
    side = find_size(runs, _PAPER_SIZE)
    results = run_on_images(
        runs,
        lambda run, files: _correlate(run, map, files, side),
        replace(options, num_images=correlated_images),
        nothing="no spatial correlation",
    )
    found = results.found
    note = f"{len(results.files):,} images, the center square of each at {side} pixels."
    images = {}
    for name in dict.fromkeys(one.map for one in found.values()):
        chart = plot_histograms({k: one for k, one in found.items() if one.map == name}, name)
        caption = f"Spatial correlation of the map {name}. Triangles are means."
        images[f"histograms_{name}"] = plotting.chart_image(chart, caption=caption)
    rows = []
    for label, one in found.items():
        means = (f"{fmean(one.values):.3f}", f"{pstdev(one.values):.3f}")
        rows.append((label, one.map, *means, "untrained" if one.is_control else ""))
    table = Table(("Run", "map", "mean", "standard deviation", "control"), rows)
    data = {k: asdict(one) for k, one in found.items()}
    text = (*_CORRELATION, note)
    return results.draw("correlation", _TITLE, text, images, table, size=side, runs=data)


@plotting.themed
def plot_histograms(found: Mapping[str, _Correlation], name: str) -> Chart:
    """Draws one histogram per run with common bins, and marks the means."""
    figure, axes = plotting.start_chart(height=3.4 + 0.2 * len(found))
    edges = np.histogram_bin_edges(np.concatenate([v.values for v in found.values()]), bins=_BINS)
    styles = plotting.list_styles(len(found))
    for (label, one), style in zip(found.items(), styles, strict=True):
        dash = ":" if one.is_control else style["linestyle"]
        shares = 100 * np.histogram(one.values, bins=edges)[0] / len(one.values)
        mean = fmean(one.values)
        text = f"{plotting.to_text(label)}: mean {mean:.3f}, {len(one.values):,} images"
        axes.stairs(shares, edges, color=style["color"], ls=dash, lw=1.8, label=text)
        axes.plot(mean, 0, marker=CARETUPBASE, ms=8, color=style["color"], zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Spatial correlation of the map {name}")
    axes.set_xlabel("mean |correlation| between two positions")
    axes.set_ylabel("images (%)")
    figure.legend(loc="outside lower center")
    return figure


def _correlate(run: Run, wanted: str | None, files: Sequence[str], size: int) -> _Correlation:
    backbone = get_backbone(run.model)
    if backbone is None:
        raise NotApplicable(f"{type(run.model).__name__} has no backbone")
    encoder = get_encoder(backbone)
    if wanted is None and run.task is not DETECTION:
        name = cast(FixedSizeModel, run.model).in_feature
    else:  # by default, the coarsest feature map of a detector
        name = find_feature(encoder, wanted or "")
    entries = crop_squares(run.cfg, files, size)
    info = info_of(str(run.weights))
    untrained = info is not None and info.iteration <= 0 and run.task is not DETECTION
    if untrained and any(isinstance(module, BN_MODULE_TYPES) for module in encoder.modules()):
        encoder, keys = copy.deepcopy(encoder), run.cfg.MODEL
        images = [entry["image"] for entry in entries]
        recalibrate_bn(encoder, images, pixel_mean=keys.PIXEL_MEAN, pixel_std=keys.PIXEL_STD)
    batches = batch_images(run.model, entries, f"correlation, {run.label}")
    with torch.no_grad():
        encoder.eval()
        found = [measure_spatial_correlation(encoder(images)[name]) for images in batches]
    return _Correlation(name, torch.cat(found).tolist(), untrained)
