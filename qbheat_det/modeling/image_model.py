# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A backbone and the way of square images into it: what classifiers and pre-training share."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.layers.cached_images import find_cached_images


class ImageModel(nn.Module):
    """A backbone that reads images of one size.

    A subclass adds what reads the backbone, and a ``forward`` that gives losses in training.

    Attributes:
        backbone: gives the map.
        in_feature: name of the map that stands for the backbone, which k-NN and figures read.
        head_in_features: names of all outputs of the backbone that the model reads, tokens too, as
            Detectron2's RetinaNet has it. Where it reads all, no parameter is without gradient.
        image_size: S, rows and columns of the images.
    """

    mapper_name: str
    """``INPUT.DATASET_MAPPER_NAME`` of the images that the model takes."""

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
            backbone: gives ``head_in_features``.
            in_feature: name of the backbone's map.
            head_in_features: names of all outputs of the backbone that are read.
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
        """Where the model lives."""
        return self.pixel_mean.device

    def preprocess_image(
        self, batched_inputs: Sequence[Mapping[str, Any]], key: str = "image"
    ) -> Tensor:
        """Brings images to the device as one batch.

        Args:
            batched_inputs: dicts of a dataset mapper.
            key: where they hold the image (3, S, S), in the mapper's pixels.

        Returns:
            (N, 3, S, S), normalised.

        Raises:
            UserError: an image has another size, or there is none.
        """
        expected = (len(self.pixel_mean), self.image_size, self.image_size)
        for entry in batched_inputs:
            named = f"image '{entry.get('file_name', '')}'"
            if key not in entry:
                raise UserError(
                    f"{named} comes without '{key}': {type(self).__name__} wants what "
                    f"INPUT.DATASET_MAPPER_NAME '{self.mapper_name}' makes of it"
                )
            if entry[key].shape != expected:
                raise UserError(
                    f"{named} has shape {tuple(entry[key].shape)}, but the model wants {expected}: "
                    f"INPUT.DATASET_MAPPER_NAME '{self.mapper_name}' crops images to "
                    "INPUT.PRETRAIN.SIZE"
                )
        if (cached := find_cached_images(batched_inputs, 0, self.device)) is not None:
            return cached.tensor
        # Stacked first, so that a batch goes to the device at once, a byte a value.
        images = torch.stack([entry[key] for entry in batched_inputs])
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std
