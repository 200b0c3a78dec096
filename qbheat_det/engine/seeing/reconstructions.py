# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "reconstructions": the same images, from every view, by one checkpoint or several."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.reconstruction_pictures import draw_sheet
from qbheat_det.analysis.reconstruction_views import (
    ReconstructedViews,
    ReconstructingModel,
    reconstruct_views,
)
from qbheat_det.engine.hooks.visualize import undisturbed
from qbheat_det.modeling.contracts import ReconstructionObjective

from .options import SightOptions
from .refusal import NothingToSee
from .same_pictures import SamePictures, crop_squares
from .side_by_side import look_at_each, require_kind
from .subject import Subject

_HOW_TO_READ = (
    "Grey is what the encoder never sees. From a corner, QB-Heat predicts the features of the "
    "three other quarters by linear maps of those of the visible one (Fig. 2 and 4 of the "
    "paper, Eq. 5), and a decoder makes pixels of them; from the centre, those of the twelve "
    "blocks around it. What was visible is shown as it is; the rest is made.",
    "Losses are squared errors of the patches that the run's loss counts. Where patches are "
    "normalised (the default), predicting zero costs about 1 and ridge regression from the visible "
    "pixels is the mark to beat: tools/reconstruction_baselines.py measures it on your data.",
)


def see_reconstructions(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws a row for each image and checkpoint: input, what is visible, what is made of it.

    Checkpoints with the same views and image size share a sheet, the rows of an image together.

    Raises:
        NothingToSee: no subject reconstructs pixels, or there are no pictures.
    """
    chosen = SamePictures(subjects, options.num_images, options.images)

    def look(subject: Subject) -> ReconstructedViews:
        model = _find_model(subject)
        return _reconstruct(model, subject, chosen.pick(subject), options.seed)

    looked = look_at_each(subjects, look, nothing="no reconstructions")
    made = looked.found
    sheets: dict[tuple[Any, ...], list[str]] = {}
    for label, views in made.items():
        shape = (*views.columns, *views.columns["input"][0].shape)
        sheets.setdefault(shape, []).append(label)
    pictures = {
        f"sheet_{i + 1}": _draw([(label, made[label]) for label in labels], len(made) > 1)
        for i, labels in enumerate(sheets.values())
    }
    names = list(dict.fromkeys(view for views in made.values() for view in views.losses))
    rows = []
    for label, views in made.items():
        means = views.mean_losses
        rows.append((label, *(f"{means[view]:.3f}" if view in means else "-" for view in names)))
    figures = {
        label: {"note": views.note, "losses": views.losses, "mean_losses": views.mean_losses}
        for label, views in made.items()
    }
    return Exhibit(
        "reconstructions",
        "Reconstructions",
        [*_HOW_TO_READ, *chosen.explain(), *looked.explain()],
        pictures,
        {"images": chosen.files, "subjects": figures, "left_out": looked.left_out},
        Table(("Mean loss of these images", *(f"from the {view}" for view in names)), rows),
    )


def _find_model(subject: Subject) -> nn.Module:
    require_kind(subject, "pretraining", "reconstructs no pixels")
    model = subject.model
    if not isinstance(model, ReconstructionObjective):
        raise NothingToSee(
            f"the objective of '{subject.label}', {type(model).__name__}, has no decoder to pixels"
        )
    return model


def _reconstruct(
    model: nn.Module, subject: Subject, files: Sequence[str], seed: int
) -> ReconstructedViews:
    entries = crop_squares(subject.cfg, files)
    with undisturbed(model):
        torch.manual_seed(seed)  # scattered masks are drawn: the same ones for every checkpoint
        return reconstruct_views(
            cast(ReconstructingModel, model), entries, pixel_format=subject.cfg.INPUT.FORMAT
        )


def _draw(made: Sequence[tuple[str, ReconstructedViews]], named: bool) -> Picture:
    """Returns one sheet, the rows of an image together."""
    number = min(len(views.columns["input"]) for _, views in made)
    columns = {
        title: [views.columns[title][i] for i in range(number) for _, views in made]
        for title in made[0][1].columns
    }
    labels = [label for label, _ in made]
    notes = " ".join(dict.fromkeys(views.note for _, views in made if views.note))
    sheet = draw_sheet(columns, names=labels * number if named else (), note=notes)
    losses = "; ".join(
        f"{label}: " + ", ".join(f"{loss:.3f} from the {view}"
                                 for view, loss in views.mean_losses.items())
        for label, views in made
    )  # fmt: skip
    alt = f"{number} images, what was visible of them and what was made of the rest. Losses: "
    return Picture.from_rgb(sheet, alt=alt + losses, caption=f"Mean loss: {losses}.")
