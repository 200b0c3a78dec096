# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches whose images are cached outputs of a frozen encoder instead of pixels.

With ``MODEL.CACHE_FEATURES``, a dataset mapper returns "features" instead of an image. The model's
``preprocess_image`` calls ``find_cached_images``, which wraps the features as ``CachedImages``. The
model passes them to its backbone as if they were images. The backbone is a ``CachedBackbone``
(``feature_cache/encoder.py``), which returns the cached outputs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.structures import ImageList
from torch import Tensor

from qbheat_det.core.errors import UserError


@dataclass(frozen=True)
class CachedImages:
    """Cached outputs of the encoder for the images of a batch.

    Attributes:
        features: the outputs of each image by name: feature maps (C, h, w) and tokens (M, D).
        shape: (N, 3, H, W), the shape that the padded images would have.
        device: device of the model.
    """

    features: Sequence[Mapping[str, Tensor]]
    shape: torch.Size
    device: torch.device

    def batch(self, name: str, stride: int | None, layout: torch.memory_format) -> Tensor:
        """Returns the output ``name`` of all images, in float32 on ``device``.

        Args:
            name: name of the output.
            stride: stride of the feature map, or None for tokens.
            layout: memory format of a feature map, such as channels-last.

        Returns:
            Tokens (N, M, D), or a feature map (N, C, ceil(H / stride), ceil(W / stride)). Feature
            maps of smaller images are zero-padded on the right and bottom.

        Raises:
            UserError: a cached feature map is larger than that of the padded images.
        """
        outputs = [features[name] for features in self.features]
        if stride is None:
            return torch.stack(outputs).to(self.device, non_blocking=True).float()
        batch = self._allocate(outputs[0], stride, layout)
        max_height, max_width = batch.shape[2:]
        for padded, cached in zip(batch, outputs, strict=True):
            height, width = cached.shape[1:]
            if height > max_height or width > max_width:
                raise UserError(
                    f"cached features '{name}' are {height} x {width}, but the image is "
                    f"{max_height} x {max_width} at stride {stride}: they belong to another image"
                )
            if cached.shape == padded.shape:  # the usual case, which skips the slow slicing below
                padded.copy_(cached)
                continue
            padded[:, :height, :width] = cached
            padded[:, height:] = 0
            padded[:, :height, width:] = 0
        return batch.to(self.device, non_blocking=True).float()

    def _allocate(self, cached: Tensor, stride: int, layout: torch.memory_format) -> Tensor:
        """Returns an uninitialized batch (N, C, ceil(H / stride), ceil(W / stride)).

        It has the channels C and the device of the feature map ``cached`` (C, h, w).
        """
        height = math.ceil(self.shape[2] / stride)
        width = math.ceil(self.shape[3] / stride)
        # A batch that is later copied to another device keeps the dtype of the cache, which has
        # fewer bytes than float32.
        is_copied = cached.device != self.device
        return torch.empty(
            (len(self.features), cached.shape[0], height, width),
            dtype=cached.dtype if is_copied else torch.float32,
            memory_format=layout,
            device=cached.device,
            pin_memory=is_copied and self.device.type == "cuda",
        )


def find_cached_images(
    batched_inputs: Sequence[Mapping[str, Any]], size_divisibility: int, device: torch.device
) -> ImageList | None:
    """Returns an ``ImageList`` whose tensor is the ``CachedImages`` of a batch.

    Returns None if an input has no "features". The list's ``image_sizes`` are the "image_size"
    (height, width) of the inputs. The shape of the padded batch is that of ``ImageList``, with
    heights and widths that are multiples of ``size_divisibility``.
    """
    if not batched_inputs or not all("features" in entry for entry in batched_inputs):
        return None
    # Images without memory, from which ImageList computes the padded shape.
    empty_images = [torch.empty(3, *entry["image_size"], device="meta") for entry in batched_inputs]
    padded = ImageList.from_tensors(empty_images, size_divisibility)
    features = [entry["features"] for entry in batched_inputs]
    images: Any = CachedImages(features, padded.tensor.shape, device)
    return ImageList(images, padded.image_sizes)
