# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A backbone for square images: the base of classifiers and pre-training objectives."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.layers.cached_images import find_cached_images


class ImageModel(nn.Module):
    """A backbone that reads images of one size.

    A subclass adds a head and a ``forward`` that returns losses in training. Attributes are those
    of ``FixedSizeModel`` in ``modeling/contracts.py``.
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
        """Brings images to the device as one batch.

        Args:
            batched_inputs: dicts of a dataset mapper.
            key: of the image (3, S, S), in the mapper's pixel format.

        Returns:
            (N, 3, S, S), normalised.

        Raises:
            UserError: an image has another size, or is missing.
        """
        expected = (len(self.pixel_mean), self.image_size, self.image_size)
        for entry in batched_inputs:
            named = f"image '{entry.get('file_name', '')}'"
            if key not in entry:
                raise UserError(
                    f"{named} has no '{key}': {type(self).__name__} needs "
                    f"INPUT.DATASET_MAPPER_NAME '{self.mapper_name}'"
                )
            if entry[key].shape != expected:
                raise UserError(
                    f"{named} has shape {tuple(entry[key].shape)}, but the model wants {expected}: "
                    f"INPUT.DATASET_MAPPER_NAME '{self.mapper_name}' crops images to "
                    "INPUT.PRETRAIN.SIZE"
                )
        if (cached := find_cached_images(batched_inputs, 0, self.device)) is not None:
            return cached.tensor
        # Stacked first, so that a batch is transferred at once, as bytes.
        images = torch.stack([entry[key] for entry in batched_inputs])
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std
