# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images reconstructed from every view that a model has: of QB-Heat, from a corner and the centre.

Paper: QB-Heat, arXiv:2211.13228, Fig. 2 and 4, which show how a quarter of an image is seen and
the rest predicted. The paper prints no reconstructions; what a sheet holds is a choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .detection_pictures import RGBImage
from .reconstruction_pictures import complete, show_visible

BatchedInputs = list[dict[str, Any]]
RESTORED = "Mean and contrast of each masked patch are those of the image."
"""What must be known of pictures by a model whose loss compares normalised patches."""


class ComparesPatches(Protocol):
    """The loss of patches."""

    normalize_patches: bool
    """Whether true patches are brought to mean 0 and variance 1 before."""


class ReconstructingModel(Protocol):
    """A model that sees a part of an image and reconstructs the rest."""

    views: Mapping[str, Sequence[str]]
    """Ways to see an image, each with the places that images take in turn, if it has any."""
    loss: ComparesPatches

    def __call__(
        self, batched_inputs: BatchedInputs, places: Sequence[str] = ..., /
    ) -> list[dict[str, Any]]:
        """Returns "reconstruction", "visible" and "loss_reconstruction" of each image.

        Where it was at a place, also "place"; a model without places never gets any.
        """


@dataclass(frozen=True)
class ReconstructedViews:
    """What a model makes of N images.

    Attributes:
        columns: N pictures (S, S, 3) by title: "input", and for each view "visible <view>" and
            "from the <view>".
        losses: by view, for each image "loss", and where the view has places, "place".
        note: what must be known of the pictures; empty if nothing.
    """

    columns: Mapping[str, Sequence[RGBImage]]
    losses: Mapping[str, Sequence[Mapping[str, Any]]]
    note: str

    @property
    def mean_losses(self) -> dict[str, float]:
        """By view, the mean over the images."""
        return {view: fmean(row["loss"] for row in rows) for view, rows in self.losses.items()}


def reconstruct_views(
    model: ReconstructingModel, entries: BatchedInputs, *, pixel_format: str
) -> ReconstructedViews:
    """Reconstructs images from every view; where a view has places, images take them in turn.

    Args:
        model: in evaluation mode.
        entries: of a dataset mapper in inference, "image" (3, S, S).
        pixel_format: "RGB" or "BGR", of the entries' channels.
    """
    inputs = [to_rgb(entry["image"], pixel_format).astype(np.uint8) for entry in entries]
    columns: dict[str, list[RGBImage]] = {"input": inputs}
    losses: dict[str, list[dict[str, Any]]] = {}
    for view, known in model.views.items():
        places = [known[i % len(known)] for i in range(len(inputs)) if known]
        outputs = model(entries, places) if known else model(entries)
        masks = [output["visible"].cpu().numpy() for output in outputs]
        made = [to_rgb(output["reconstruction"], pixel_format) for output in outputs]
        columns[f"visible {view}"] = [
            show_visible(*pair) for pair in zip(inputs, masks, strict=True)
        ]
        columns[f"from the {view}"] = [
            complete(*three) for three in zip(inputs, masks, made, strict=True)
        ]
        losses[view] = [
            {
                **({"place": output["place"]} if known else {}),
                "loss": float(output["loss_reconstruction"]),
            }
            for output in outputs
        ]
    return ReconstructedViews(columns, losses, RESTORED if model.loss.normalize_patches else "")


def to_rgb(image: Tensor, pixel_format: str) -> npt.NDArray[np.float32]:
    """From (3, H, W) in a mapper's channels to (H, W, 3), RGB, float32."""
    pixels: npt.NDArray[np.float32] = image.detach().cpu().float().permute(1, 2, 0).numpy()
    return pixels[..., ::-1] if pixel_format == "BGR" else pixels
