# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "reconstructions": images reconstructed from every view that a model has.

Paper: QB-Heat, arXiv:2211.13228, Fig. 2 and 4, which show how a quarter of an image is visible and
the rest predicted. The paper prints no reconstructions; the layout here is a choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import nn

from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.inference.drawing import RGBImage
from qbheat_det.modeling.pretrain import ReconstructionModel

from .figure import Entries, FigureOptions, crop_squares, run_on_images
from .plotting import chart_image, enlarge, plot_grid, to_rgb
from .run import Run

_GREY = 128
_NORMALIZED = "Mean and contrast of each masked patch are those of the image."
_EXPLANATION = (
    "Grey is masked. Losses are squared errors of the patches that the run's loss counts. For "
    "normalised patches, predicting zero costs about 1.",
)


@dataclass(frozen=True)
class Reconstructions:
    """N images (S, S, 3) by the title of their column, losses of each by view, and their means."""

    columns: Mapping[str, Sequence[RGBImage]]
    losses: Mapping[str, Sequence[Mapping[str, Any]]]
    mean_losses: Mapping[str, float]
    note: str


def reconstruct_images(
    model: ReconstructionModel, entries: Entries, *, pixel_format: str
) -> Reconstructions:
    """Reconstructs mapped images from every view; images take the quadrants of a view in turn."""
    inputs = [to_rgb(entry["image"], pixel_format).astype(np.uint8) for entry in entries]
    columns: dict[str, list[RGBImage]] = {"input": inputs}
    losses: dict[str, list[dict[str, Any]]] = {}
    for view, quadrants in model.views.items():
        places = [quadrants[i % len(quadrants)] for i in range(len(inputs)) if quadrants]
        outputs = model(entries, places) if quadrants else model(entries)
        shown, completed, losses[view] = [], [], []
        for image, output in zip(inputs, outputs, strict=True):
            visible = output["visible"].cpu().numpy()[..., None]
            shown.append(np.where(visible, image, np.uint8(_GREY)))
            made = np.rint(to_rgb(output["reconstruction"], pixel_format).clip(0, 255))
            completed.append(np.where(visible, image, made.astype(np.uint8)))
            place = {"place": output["place"]} if quadrants else {}
            losses[view].append({**place, "loss": float(output["loss_reconstruction"])})
        columns[f"visible {view}"] = shown
        columns[f"from the {view}"] = completed
    means = {view: fmean(row["loss"] for row in rows) for view, rows in losses.items()}
    note = _NORMALIZED if model.loss.normalize_patches else ""
    return Reconstructions(columns, losses, means, note)


@register_figure("reconstructions")
def draw_reconstructions(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws a grid for each run: input, visible part and reconstruction of each view."""

    def compute(run: Run, files: list[str]) -> Reconstructions:
        run.require_kind("pretraining")
        model = _require_reconstruction(run.model)
        entries = crop_squares(run.cfg, files)
        torch.manual_seed(options.seed)  # the same random masks for every run
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
        "reconstructions", "Reconstructions", _EXPLANATION, images, table, runs=data
    )


@register_figure("reconstructions", training=True)
def draw_training_reconstructions(
    model: nn.Module, load_images: Callable[[int], Entries], cfg: CfgNode
) -> Figure:
    """Draws ``VIS.NUM_IMAGES`` images from every view."""
    checked = _require_reconstruction(model)
    entries = load_images(cfg.VIS.NUM_IMAGES)
    made = reconstruct_images(checked, entries, pixel_format=cfg.INPUT.FORMAT)
    return Figure(
        "reconstructions",
        "Reconstructions",
        images={"grid": _draw_grid("", made)},
        data={"losses": made.losses, "note": made.note},
        scalars={f"reconstructions/{view}": mean for view, mean in made.mean_losses.items()},
    )


def _require_reconstruction(model: nn.Module) -> ReconstructionModel:
    if not isinstance(model, ReconstructionModel):
        raise NotApplicable(f"{type(model).__name__} has no decoder to pixels")
    return model


def _draw_grid(label: str, made: Reconstructions) -> Image:
    """Draws a row for each image and a column for each of ``columns``."""
    rows = [list(map(enlarge, images)) for images in zip(*made.columns.values(), strict=True)]
    chart = plot_grid(rows, column_names=list(made.columns), note=made.note)
    caption = f"{label}: images, what is visible, and what is predicted.".removeprefix(": ")
    return chart_image(chart, caption=caption, format="jpg")
