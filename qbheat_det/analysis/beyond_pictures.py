# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pictures of what lies outside the frame of images, made of features carried there.

Images here are (H, W, 3) uint8 RGB.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import cv2
import numpy as np
import torch
from torch import Tensor

from qbheat_det.analysis.plotting import to_rgb
from qbheat_det.modeling.pretrain import patchify, unpatchify

from .beyond_the_frame import continue_map, decode_map, frame_image
from .detection_pictures import HEADING, RGBImage


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
    stride: int,
    pixel_format: str,
    side: int = 240,
) -> list[RGBImage]:
    """Returns each image in its frame, and around it what its features become.

    Args:
        model: decodes.
        images: (N, 3, S, S), normalised.
        z: (N, G, G, C), their features.
        generators: as of ``continue_map``.
        margin: positions around the frame that are drawn.
        stride: as of ``continue_map``.
        pixel_format: of the model's channels.
        side: of the pictures, in pixels: the wider the margin, the smaller the image in it.

    Returns:
        N pictures; where there is a margin, a line is drawn around the image.
    """
    size, patch = model.decoder.grid_size, model.decoder.patch_size
    large = continue_map(z.cpu(), generators, margin, stride=stride).to(z.device)
    true = patchify(images, patch).unflatten(1, (size, size))
    patches = frame_image(true, decode_map(large, model.decoder, size), model.loss.restore)
    pixels = unpatchify(patches.flatten(1, 2), patch) * model.pixel_std + model.pixel_mean
    before = pixels.shape[-1]
    start, end = (round(side * at / before) for at in (margin * patch, before - margin * patch))
    pictures = []
    for image in torch.unbind(pixels):
        whole = np.rint(np.clip(to_rgb(image, pixel_format), 0, 255)).astype(np.uint8)
        way = cv2.INTER_AREA if before > side else cv2.INTER_CUBIC
        picture = cv2.resize(whole, (side, side), interpolation=way)
        if margin:
            picture = cv2.rectangle(picture, (start - 1, start - 1), (end, end), HEADING, 1)
        pictures.append(np.asarray(picture, dtype=np.uint8))
    return pictures
