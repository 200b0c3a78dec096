# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The base class of models for square images of one size.

Image classifiers, pre-training objectives (``pretrain/base.py``) and the teacher of distillation
(``distillation_teacher.py``) are such models.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn

from qbheat_det.core.errors import UserError

from .cached_images import find_cached_images


class ImageModel(nn.Module):
    """A backbone for square images of one size. A subclass adds its layers and ``forward``.

    The arguments of the constructor are attributes of the model.
    """

    mapper_name: str
    """The value of ``INPUT.DATASET_MAPPER_NAME`` that the model needs."""

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
            in_feature: name of the feature map that k-NN and figures use.
            head_in_features: names of all outputs of the backbone that the model reads.
            image_size: S, the height and width of the images.
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
        return self.pixel_mean.device

    def preprocess_image(
        self, batched_inputs: Sequence[Mapping[str, Any]], key: str = "image"
    ) -> Tensor:
        """Normalizes and stacks the images (3, S, S) under ``key``. Returns (N, 3, S, S).

        Raises a ``UserError`` if an image is missing or is not S x S.
        """
        cached = find_cached_images(batched_inputs, 0, self.device)
        if cached is not None:
            return cached.tensor
        expected = (len(self.pixel_mean), self.image_size, self.image_size)
        for entry in batched_inputs:
            shape = tuple(entry[key].shape) if key in entry else None
            if shape != expected:
                raise UserError(
                    f"'{key}' of '{entry.get('file_name', '')}' is {shape}, but "
                    f"{type(self).__name__} reads {expected}: INPUT.DATASET_MAPPER_NAME "
                    f"'{self.mapper_name}' crops to INPUT.PRETRAIN.SIZE"
                )
        # Stacked on the CPU, so that one transfer of 8-bit pixels is enough.
        images = torch.stack([entry[key] for entry in batched_inputs])
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std
