# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pictures of what lies outside the frame of images, made of features carried there.

Images here are (H, W, 3) uint8 RGB.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qbheat_det.modeling.pretrain import patchify, unpatchify

from .beyond_the_frame import continue_map, decode_map, frame_image
from .detection_pictures import BACKGROUND, RGBImage
from .reconstruction_views import to_rgb


class PatchDecoder(Protocol):
    """From features to patches."""

    grid_size: int
    patch_size: int

    def __call__(self, z: Tensor) -> Tensor:
        """From (N, G, G, C) to (N, G * G, P)."""


class RestoresPatches(Protocol):
    """The loss of patches."""

    @property
    def restore(self) -> Callable[[Tensor, Tensor], Tensor]:
        """From predictions and true patches, (N, K, P) both, to the scale of the latter."""


class DecodingModel(Protocol):
    """A model that decodes features to pixels."""

    decoder: PatchDecoder
    loss: RestoresPatches
    pixel_mean: Tensor
    pixel_std: Tensor


def draw_beyond(
    model: DecodingModel,
    images: Tensor,
    z: Tensor,
    generators: Mapping[str, Tensor],
    *,
    margin: int,
    canvas: int,
    stride: int,
    pixel_format: str,
) -> list[RGBImage]:
    """Returns each image in its frame, and around it what its features become.

    Args:
        model: decodes.
        images: (N, 3, S, S), normalised.
        z: (N, G, G, C), their features.
        generators: as of ``continue_map``.
        margin: positions around the frame that are drawn.
        canvas: positions around the frame that the picture has, at least ``margin``.
        stride: as of ``continue_map``.
        pixel_format: of the model's channels.

    Returns:
        N pictures, of G + 2 canvas patches a side.
    """
    size, patch = model.decoder.grid_size, model.decoder.patch_size
    large = continue_map(z.cpu(), generators, margin, stride=stride).to(z.device)
    true = patchify(images, patch).unflatten(1, (size, size))
    patches = frame_image(true, decode_map(large, model.decoder, size), model.loss.restore)
    pixels = unpatchify(patches.flatten(1, 2), patch) * model.pixel_std + model.pixel_mean
    side, border = (size + 2 * canvas) * patch, (canvas - margin) * patch
    pictures = []
    for image in torch.unbind(pixels):
        picture = np.full((side, side, 3), BACKGROUND, dtype=np.uint8)
        inside = slice(border, side - border)
        picture[inside, inside] = np.rint(np.clip(to_rgb(image, pixel_format), 0, 255))
        pictures.append(picture)
    return pictures
