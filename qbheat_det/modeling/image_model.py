# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Common parts of models around their backbones: input, cached features, pooled features.

The pooled vector of an image is its map averaged over positions, joined with the first token
(QB-Heat, arXiv:2211.13228, Table 8); without tokens, the map alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from detectron2.structures import ImageList
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.core.errors import UserError


def check_value(is_allowed: bool, key: str, value: object, allowed: str) -> None:
    """Raises a ``ValueError`` that names a key below ``MODEL`` and its value, unless allowed."""
    if not is_allowed:
        raise ValueError(f"MODEL.{key} is {value}, but must be {allowed}")


@dataclass(frozen=True)
class CachedImages:
    """Replaces the pixels (N, 3, H, W) on their way through a model to its encoder."""

    features: Sequence[Mapping[str, Tensor]]  # outputs by name of each image, (C, h, w) or (M, D)
    shape: torch.Size  # of the padded pixels
    device: torch.device

    def batch(self, name: str, stride: int | None, layout: torch.memory_format) -> Tensor:
        """Returns one output of all images, float32, on the device: a map, or tokens (N, M, D).

        Maps are (N, C, ceil(H / stride), ceil(W / stride)), zero at the right and the bottom of
        smaller images. Raises a ``UserError`` if a map is larger.
        """
        maps = [outputs[name] for outputs in self.features]
        if stride is None:
            return torch.stack(maps).to(self.device, non_blocking=True).float()
        size = [-(-side // stride) for side in self.shape[2:]]
        stays = maps[0].device == self.device
        batch = torch.empty(
            (len(maps), maps[0].shape[0], *size),
            dtype=torch.float32 if stays else maps[0].dtype,  # fewer bytes to transfer
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
            if stored.shape == out.shape:  # the usual case; slicing takes as long as copying
                out.copy_(stored)
                continue
            out[:, :height, :width] = stored
            out[:, height:] = 0
            out[:, :height, width:] = 0
        return batch.to(self.device, non_blocking=True).float()


def find_cached_images(
    batched_inputs: Sequence[Mapping[str, Any]], size_divisibility: int, device: torch.device
) -> ImageList | None:
    """Returns the images of a batch with cached "features"; None if its entries have only pixels.

    The pixels (3, H, W) only give the size; the batch is padded to ``size_divisibility``.
    """
    if not batched_inputs or not all("features" in entry for entry in batched_inputs):
        return None
    sizes = [torch.empty(entry["image"].shape, device="meta") for entry in batched_inputs]
    padded = ImageList.from_tensors(sizes, size_divisibility)
    features = [entry["features"] for entry in batched_inputs]
    images: Any = CachedImages(features, padded.tensor.shape, device)
    return ImageList(images, padded.image_sizes)


class ImageModel(nn.Module):
    """A backbone for images of one size: the base of classifiers and pre-training objectives.

    A subclass adds a head and a ``forward`` that returns losses in training. The attributes are
    those of ``FixedSizeModel`` in ``modeling/contracts.py``.
    """

    mapper_name: str
    """``INPUT.DATASET_MAPPER_NAME`` of the model's images."""

    def __init__(
        self,
        *,
        backbone: Backbone,
        in_feature: str,
        head_in_features: Sequence[str],
        image_size: int,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        """
        Args:
            backbone: has the outputs ``head_in_features``.
            in_feature: name of the map that k-NN and figures use.
            head_in_features: names of all outputs of the backbone that the model reads.
            image_size: S, rows and columns of the images.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.
        """
        super().__init__()
        self.backbone = backbone
        self.in_feature = in_feature
        self.head_in_features = list(head_in_features)
        self.image_size = image_size
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        self.pixel_mean: Tensor
        self.pixel_std: Tensor

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.pixel_mean.device

    def preprocess_image(
        self, batched_inputs: Sequence[Mapping[str, Any]], key: str = "image"
    ) -> Tensor:
        """Returns the images (3, S, S) of all entries under ``key``, normalised: (N, 3, S, S).

        Raises a ``UserError`` if an image has another size, or is missing.
        """
        expected = (len(self.pixel_mean), self.image_size, self.image_size)
        for entry in batched_inputs:
            shape = tuple(entry[key].shape) if key in entry else None
            if shape != expected:
                raise UserError(
                    f"'{key}' of '{entry.get('file_name', '')}' is {shape}, but "
                    f"{type(self).__name__} reads {expected}: INPUT.DATASET_MAPPER_NAME "
                    f"'{self.mapper_name}' crops to INPUT.PRETRAIN.SIZE"
                )
        if (cached := find_cached_images(batched_inputs, 0, self.device)) is not None:
            return cached.tensor
        # Stacked before the transfer, which takes one copy of bytes.
        images = torch.stack([entry[key] for entry in batched_inputs])
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std


class PooledFeatures(nn.Module):
    """From a backbone's outputs to one vector for each image, without parameters.

    The map ``in_feature`` has ``channels`` C, the tokens ``token_dim`` D (0 without tokens), and
    the vector ``width`` C + D.
    """

    def __init__(self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str) -> None:
        """Takes the backbone's ``output_shape()`` and the map's name."""
        super().__init__()
        tokens = input_shape.get("tokens")
        maps = [name for name in input_shape if name != "tokens"]
        check_value(in_feature in maps, "CLASSIFIER.IN_FEATURE", in_feature, f"one of {maps}")
        self.in_feature = in_feature
        self.in_features = [in_feature] if tokens is None else [in_feature, "tokens"]
        self.channels = int(input_shape[in_feature].channels or 0)
        self.token_dim = 0 if tokens is None else int(tokens.channels or 0)
        self.width = self.channels + self.token_dim

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """From the map (N, C, H, W) and "tokens" (N, M, D), if any, to (N, C + D)."""
        pooled = F.adaptive_avg_pool2d(features[self.in_feature], 1).flatten(1)
        return self.join_token(pooled, features)

    def join_token(self, pooled: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Joins any pooled map (N, E) with the first token, if there are tokens."""
        if "tokens" not in self.in_features:
            return pooled
        return torch.cat([pooled, features["tokens"][:, 0]], dim=1)
