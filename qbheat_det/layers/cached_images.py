# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A batch of images of which only a frozen encoder's outputs are loaded, not the pixels."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.structures import ImageList
from torch import Tensor

from qbheat_det.core.errors import UserError


class CachedImages:
    """Takes the place of the pixels (N, 3, H, W) on the way through a model to its encoder.

    Attributes:
        features: for each image, the encoder's outputs by name, (C, h, w) or (M, D).
        shape: (N, 3, H, W), as the pixels would have after padding.
        device: of the model.
    """

    def __init__(
        self, features: Sequence[Mapping[str, Tensor]], shape: torch.Size, device: torch.device
    ) -> None:
        self.features = features
        self.shape = shape
        self.device = device

    def batch(self, name: str, stride: int | None, layout: torch.memory_format) -> Tensor:
        """Returns one output of all images, in float32 on the device.

        Args:
            name: of the output.
            stride: of a map; None for tokens.
            layout: of a map in memory.

        Returns:
            (N, C, ceil(H / stride), ceil(W / stride)), zero at the right and the bottom of smaller
            images, or (N, M, D).

        Raises:
            UserError: a map is larger than its image allows.
        """
        maps = [outputs[name] for outputs in self.features]
        if stride is None:
            return torch.stack(maps).to(self.device, non_blocking=True).float()
        size = [-(-side // stride) for side in self.shape[2:]]
        stays = maps[0].device == self.device
        batch = torch.empty(
            (len(maps), maps[0].shape[0], *size),
            dtype=torch.float32 if stays else maps[0].dtype,  # half as much to transfer
            memory_format=layout,
            device=maps[0].device,
            pin_memory=self.device.type == "cuda" and not stays,
        )
        for out, stored in zip(batch, maps, strict=True):
            height, width = stored.shape[1:]
            if height > size[0] or width > size[1]:
                raise UserError(
                    f"cached features '{name}' are {height} x {width}, but the image is "
                    f"{size[0]} x {size[1]} at stride {stride}: they are of another image"
                )
            if stored.shape == out.shape:  # most often; cutting takes as long as copying
                out.copy_(stored)
                continue
            out[:, :height, :width] = stored
            out[:, height:] = 0
            out[:, :height, width:] = 0
        return batch.to(self.device, non_blocking=True).float()


def find_cached_images(
    batched_inputs: Sequence[Mapping[str, Any]], size_divisibility: int, device: torch.device
) -> ImageList | None:
    """Returns the images of a batch whose entries hold "features"; None where they hold pixels.

    Args:
        batched_inputs: of a mapper; "image" (3, H, W) then only gives the size.
        size_divisibility: that the batch is padded to.
        device: of the model.
    """
    if not batched_inputs or not all("features" in entry for entry in batched_inputs):
        return None
    sizes = [torch.empty(entry["image"].shape, device="meta") for entry in batched_inputs]
    padded = ImageList.from_tensors(sizes, size_divisibility)
    features = [entry["features"] for entry in batched_inputs]
    images: Any = CachedImages(features, padded.tensor.shape, device)
    return ImageList(images, padded.image_sizes)
