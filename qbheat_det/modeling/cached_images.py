# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches whose images are cached outputs of a frozen encoder instead of pixels.

With ``MODEL.CACHE_FEATURES``, a dataset mapper returns "features" instead of an image. A model
whose ``preprocess_image`` first calls ``find_cached_images`` can train on them: it passes the
``CachedImages`` to its backbone, and a ``CachedBackbone`` (``feature_cache/encoder.py``) returns
the cached outputs.
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
    """Cached outputs for a batch, which a model passes to a ``CachedBackbone`` as its images."""

    features: Sequence[Mapping[str, Tensor]]  # per image, outputs (C, h, w) or (M, D) by name
    shape: torch.Size  # shape of the padded pixels
    device: torch.device

    def batch(self, name: str, stride: int | None, layout: torch.memory_format) -> Tensor:
        """Returns the output ``name`` of all images, in float32 on ``device``.

        Tokens (stride None) are (N, M, D). Feature maps are (N, C, ceil(H / stride), ceil(W /
        stride)), zero-padded on the right and bottom. Raises a ``UserError`` if a cached map is
        larger than this.
        """
        outputs = [features[name] for features in self.features]
        if stride is None:
            return torch.stack(outputs).to(self.device, non_blocking=True).float()
        batch = self._allocate(outputs[0], stride, layout)
        for padded, cached in zip(batch, outputs, strict=True):
            height, width = cached.shape[1:]
            if height > padded.shape[1] or width > padded.shape[2]:
                raise UserError(
                    f"cached features '{name}' are {height} x {width}, but the image is "
                    f"{padded.shape[1]} x {padded.shape[2]} at stride {stride}: they belong to "
                    "another image"
                )
            if cached.shape == padded.shape:  # the usual case, which skips the slow slicing below
                padded.copy_(cached)
                continue
            padded[:, :height, :width] = cached
            padded[:, height:] = 0
            padded[:, :height, width:] = 0
        return batch.to(self.device, non_blocking=True).float()

    def _allocate(self, cached: Tensor, stride: int, layout: torch.memory_format) -> Tensor:
        """Returns an uninitialized batch (N, C, H / stride, W / stride) beside a cached map."""
        height = math.ceil(self.shape[2] / stride)
        width = math.ceil(self.shape[3] / stride)
        # A batch that is copied to another device keeps the dtype of the cache: fewer bytes.
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
    """Returns an ``ImageList`` with the cached "features" of a batch in place of pixels.

    Returns None if an input has no "features". The "image_size" (height, width) of each input is
    padded to multiples of ``size_divisibility``.
    """
    if not batched_inputs or not all("features" in entry for entry in batched_inputs):
        return None
    sizes = [torch.empty(3, *entry["image_size"], device="meta") for entry in batched_inputs]
    padded = ImageList.from_tensors(sizes, size_divisibility)
    features = [entry["features"] for entry in batched_inputs]
    images: Any = CachedImages(features, padded.tensor.shape, device)
    return ImageList(images, padded.image_sizes)
