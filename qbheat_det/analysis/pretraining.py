# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figures "reconstructions" and "correlation".

Paper: QB-Heat, arXiv:2211.13228. Reconstructions use the masks of Fig. 2 and 4. Appendix D defines
spatial correlation (Fig. 12), following "Barlow Twins", arXiv:2103.03230. Unlike there, the mean
over channels is first subtracted from each feature vector.

A view is the visible part of an image, such as a corner or random patches.
"""

import copy
import math
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

_MASK_VALUE = 128  # of masked pixels in the figure
_MIN_CELL_SIDE = 160  # of an image in the figure, in pixels
_RECONSTRUCTION_EXPLANATION = (
    "Masked pixels are gray. Losses are mean squared errors over masked patches. For normalized "
    "patches, predicting zero costs about 1.",
)
_NUM_CORRELATED_IMAGES = 64
_PAPER_IMAGE_SIDE = 224
_NUM_BINS = 24
_ROUNDING_ERROR = 1e-6  # relative to a vector's norm
_CORRELATION_EXPLANATION = (
    "The spatial correlation of an image is the mean |correlation| over channels of two different "
    "positions of the encoder's map. It is 1 if all positions are equal up to sign and scale. "
    "Dotted lines are the control: untrained encoders, with BatchNorm statistics of these images. "
    "Different maps or image sizes are not comparable.",
)


@dataclass(frozen=True)
class Reconstructions:
    """Reconstructions of N images, and their losses.

    Attributes:
        columns: the N RGB images (S, S, 3) of each column of the figure, by the column's title.
        losses: for each view, one dict per image with "loss". If the view is a quarter of the
            image, "place" is the name of the quarter.
        mean_losses: the mean loss of each view.
        note: a remark that is printed below the figure, or "".
    """

    columns: Mapping[str, Sequence[RGBImage]]
    losses: Mapping[str, Sequence[Mapping[str, Any]]]
    mean_losses: Mapping[str, float]
    note: str


def reconstruct_images(
    model: ReconstructionModel, entries: Entries, *, pixel_format: str
) -> Reconstructions:
    """Reconstructs images from each view of the model.

    If a view is one of several quarters, the images use the quarters in turn. ``entries`` are the
    model's inputs, and "image" is (3, S, S) in ``pixel_format`` ("RGB" or "BGR").
    """
    images = [plotting.to_rgb(entry["image"], pixel_format).astype(np.uint8) for entry in entries]
    columns: dict[str, list[RGBImage]] = {"input": images}
    losses: dict[str, list[dict[str, Any]]] = {}
    for view, quadrants in model.views.items():
        if quadrants:
            outputs = model(entries, [quadrants[i % len(quadrants)] for i in range(len(images))])
        else:
            outputs = model(entries)
        masked = []
        completed = []
        losses[view] = []
        for image, output in zip(images, outputs, strict=True):
            visible = output["visible"].cpu().numpy()[..., None]  # (S, S, 1)
            masked.append(np.where(visible, image, np.uint8(_MASK_VALUE)))
            reconstruction = plotting.to_rgb(output["reconstruction"], pixel_format)
            reconstruction = np.rint(reconstruction.clip(0, 255)).astype(np.uint8)
            completed.append(np.where(visible, image, reconstruction))
            row: dict[str, Any] = {}
            if quadrants:
                row["place"] = output["place"]
            row["loss"] = float(output["loss_reconstruction"])
            losses[view].append(row)
        columns[f"visible {view}"] = masked
        columns[f"from the {view}"] = completed
    mean_losses = {view: fmean(row["loss"] for row in rows) for view, rows in losses.items()}
    note = ""
    if model.loss.normalize_patches:
        note = "Each masked patch has the image's mean and contrast."
    return Reconstructions(columns, losses, mean_losses, note)


def draw_reconstructions(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws one grid per run: input, visible part and reconstruction of each view."""

    def compute(run: Run, files: list[str]) -> Reconstructions:
        run.require_task(PRETRAINING)
        model = run.model
        if not isinstance(model, ReconstructionModel):
            raise NotApplicable(f"{type(model).__name__} has no decoder to pixels")
        entries = crop_squares(run.cfg, files)
        torch.manual_seed(0)  # so that every run has the same random masks
        with torch.no_grad():
            return reconstruct_images(model, entries, pixel_format=run.cfg.INPUT.FORMAT)

    results = run_on_images(runs, compute, options, nothing="no reconstructions")
    views: list[str] = []  # of all runs, each once
    for result in results.by_label.values():
        views += [view for view in result.losses if view not in views]
    images = {}
    data = {}
    rows = []
    for index, (label, result) in enumerate(results.by_label.items(), start=1):
        images[f"grid_{index}"] = _draw_grid(label, result)
        data[label] = {
            "losses": result.losses,
            "mean_losses": result.mean_losses,
            "note": result.note,
        }
        cells = []
        for view in views:
            if view in result.mean_losses:
                cells.append(f"{result.mean_losses[view]:.3f}")
            else:
                cells.append("-")
        rows.append((label, *cells))
    return results.draw(
        "reconstructions",
        "Reconstructions",
        _RECONSTRUCTION_EXPLANATION,
        images,
        Table(("Mean loss of these images", *(f"from the {view}" for view in views)), rows),
        runs=data,
    )


def _draw_grid(label: str, reconstructions: Reconstructions) -> Image:
    """Draws one row per image: the image itself, and its visible part and prediction by view."""
    columns = reconstructions.columns
    side = len(columns["input"][0])
    factor = max(1, math.ceil(_MIN_CELL_SIDE / side))
    rows = []
    for images in zip(*columns.values(), strict=True):
        # Repeating pixels enlarges small images without smoothing.
        rows.append([image.repeat(factor, axis=0).repeat(factor, axis=1) for image in images])
    chart = plotting.plot_grid(rows, column_names=list(columns), note=reconstructions.note)
    caption = f"{label}: images, visible parts, and predictions."
    return plotting.chart_image(chart, caption=caption, format="jpg")


def measure_spatial_correlation(features: Tensor) -> Tensor:
    """Returns the spatial correlation (N,), in [0, 1], of N feature maps (N, C, H, W).

    It is the mean absolute correlation of the feature vectors (C,) over all pairs of different
    positions. A position whose features are equal in all channels has correlation 0. Raises
    ``NotApplicable`` if feature maps have only one position.
    """
    vectors = features.float().flatten(2).transpose(1, 2)  # (N, P, C), P = H * W positions
    num_positions = vectors.shape[1]
    if num_positions < 2:
        raise NotApplicable(
            f"correlation needs two positions of a map, but there is {num_positions}"
        )
    centered = vectors - vectors.mean(dim=-1, keepdim=True)
    # If all channels of a vector are equal, centering leaves only rounding errors. They are set to
    # 0, because ``normalize`` would enlarge them.
    min_norm = _ROUNDING_ERROR * vectors.norm(dim=-1, keepdim=True)
    is_varied = centered.norm(dim=-1, keepdim=True) > min_norm  # (N, P, 1)
    centered = centered * is_varied
    unit_vectors = F.normalize(centered, dim=-1)
    correlations = (unit_vectors @ unit_vectors.transpose(1, 2)).abs()  # (N, P, P)
    # The diagonal has the pairs of a position and itself, which do not count.
    diagonal_sum = correlations.diagonal(dim1=1, dim2=2).sum(dim=1)
    total = correlations.sum(dim=(1, 2)) - diagonal_sum
    num_pairs = num_positions * (num_positions - 1)
    return (total / num_pairs).clamp(0.0, 1.0)


@dataclass(frozen=True)
class _Correlation:
    """The spatial correlations of one run's encoder.

    Attributes:
        map: name of the feature map.
        values: the correlation of each image, in [0, 1].
        is_control: whether the encoder is untrained.
    """

    map: str
    values: list[float]
    is_control: bool


def draw_correlation(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    correlated_images: int = _NUM_CORRELATED_IMAGES,
    map: str | None = None,
) -> Figure:
    """Draws histograms of spatial correlation, one chart per feature map and one line per run.

    ``map`` is the name of the feature map. If it is None, each run uses the map that its model
    reads (``in_feature``), or the coarsest map of the encoder if the model is a detector.
    ``correlated_images`` is the number of images.
    """
    side = find_size(runs, _PAPER_IMAGE_SIDE)

    def compute(run: Run, files: Sequence[str]) -> _Correlation:
        return _correlate(run, map, files, side)

    results = run_on_images(
        runs,
        compute,
        replace(options, num_images=correlated_images),
        nothing="no spatial correlation",
    )
    by_map: dict[str, dict[str, _Correlation]] = {}
    rows = []
    for label, correlation in results.by_label.items():
        by_map.setdefault(correlation.map, {})[label] = correlation
        mean = f"{fmean(correlation.values):.3f}"
        deviation = f"{pstdev(correlation.values):.3f}"
        control = "untrained" if correlation.is_control else ""
        rows.append((label, correlation.map, mean, deviation, control))
    images = {}
    for name, correlations in by_map.items():
        caption = f"Spatial correlation of the map {name}. Triangles are means."
        images[f"histograms_{name}"] = plotting.chart_image(
            plot_histograms(correlations, name), caption=caption
        )
    note = f"{len(results.files):,} images, the center square of each at {side} pixels."
    return results.draw(
        "correlation",
        "Spatial correlation of feature maps",
        (*_CORRELATION_EXPLANATION, note),
        images,
        Table(("Run", "map", "mean", "standard deviation", "control"), rows),
        size=side,
        runs={label: asdict(correlation) for label, correlation in results.by_label.items()},
    )


@plotting.themed
def plot_histograms(correlations: Mapping[str, _Correlation], name: str) -> Chart:
    """Draws one histogram per run with common bins, and marks the means.

    ``correlations`` are those of each run by its label. ``name`` is the name of the feature map.
    """
    figure, axes = plotting.start_chart(height=3.4 + 0.2 * len(correlations))
    all_values = np.concatenate([correlation.values for correlation in correlations.values()])
    edges = np.histogram_bin_edges(all_values, bins=_NUM_BINS)
    styles = plotting.list_styles(len(correlations))
    for style, (label, correlation) in zip(styles, correlations.items(), strict=True):
        values = correlation.values
        shares = 100 * np.histogram(values, bins=edges)[0] / len(values)
        mean = fmean(values)
        line_style = style["linestyle"]
        if correlation.is_control:
            line_style = ":"
        axes.stairs(
            shares,
            edges,
            color=style["color"],
            ls=line_style,
            lw=1.8,
            label=f"{plotting.to_text(label)}: mean {mean:.3f}, {len(values):,} images",
        )
        axes.plot(mean, 0, marker=CARETUPBASE, ms=8, color=style["color"], zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Spatial correlation of the map {name}")
    axes.set_xlabel("mean |correlation| between two positions")
    axes.set_ylabel("images (%)")
    figure.legend(loc="outside lower center")
    return figure


def _correlate(run: Run, map_name: str | None, files: Sequence[str], size: int) -> _Correlation:
    """Measures the spatial correlation of a run's encoder on square images of ``size`` pixels."""
    backbone = get_backbone(run.model)
    if backbone is None:
        raise NotApplicable(f"{type(run.model).__name__} has no backbone")
    encoder = get_encoder(backbone)
    is_detector = run.task is DETECTION
    if map_name is None and not is_detector:
        name = cast(FixedSizeModel, run.model).in_feature
    else:
        name = find_feature(encoder, map_name or "")  # by default the coarsest feature map
    entries = crop_squares(run.cfg, files, size)
    info = info_of(str(run.weights))
    is_untrained = info is not None and info.iteration <= 0 and not is_detector
    has_batch_norm = any(isinstance(module, BN_MODULE_TYPES) for module in encoder.modules())
    if is_untrained and has_batch_norm:
        # An untrained BatchNorm has no statistics, so they are estimated on these images.
        encoder = copy.deepcopy(encoder)
        recalibrate_bn(
            encoder,
            [entry["image"] for entry in entries],
            pixel_mean=run.cfg.MODEL.PIXEL_MEAN,
            pixel_std=run.cfg.MODEL.PIXEL_STD,
        )
    encoder.eval()
    correlations = []
    with torch.no_grad():
        for images in batch_images(run.model, entries, f"correlation, {run.label}"):
            correlations.append(measure_spatial_correlation(encoder(images)[name]))
    return _Correlation(name, torch.cat(correlations).tolist(), is_untrained)
