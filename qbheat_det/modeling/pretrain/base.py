# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The base class of pre-training objectives.

An objective is a ``PretrainingModel`` with its own layers and a ``forward`` that returns losses in
training. The dataset mapper decodes and crops images. The model draws the objective's random
choices, such as masks. ``forward`` also takes these choices as an optional argument, for tests and
figures.
"""

import logging
from collections.abc import Mapping
from typing import Any

from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone

from qbheat_det.modeling.image_model import ImageModel

logger = logging.getLogger(__name__)


class PretrainingModel(ImageModel):
    """Base class of pre-training objectives, which learn from one feature map of a backbone."""

    pretrain_only_modules: tuple[str, ...] = ()
    mapper_name = "pretrain"
    held_out_loss = True

    def __init__(
        self, *, backbone: Backbone, in_feature: str, image_size: int, **others: Any
    ) -> None:
        """Takes the arguments of ``ImageModel``.

        Raises a ``ValueError`` if the backbone has no feature map ``in_feature``.
        """
        shapes = backbone.output_shape()
        stride = find_feature_map(shapes, in_feature, image_size).stride
        for name, shape in shapes.items():
            if (shape.stride or 0) > stride:
                logger.warning(
                    f"The objective learns from '{in_feature}': the layers after it, up to "
                    f"'{name}', keep their random weights"
                )
        super().__init__(backbone=backbone, in_feature=in_feature, image_size=image_size, **others)


def find_feature_map(
    shapes: Mapping[str, ShapeSpec],
    name: str,
    image_size: int,
    *,
    multiple: int | None = None,
    key: str = "IN_FEATURE",
) -> ShapeSpec:
    """Returns channels and stride of a backbone's feature map.

    Args:
        shapes: the backbone's ``output_shape()``.
        name: name of the feature map.
        image_size: height and width of the images.
        multiple: if given, height and width of the feature map must be a multiple of this number.
        key: config key of ``name``, for the error message.

    Raises:
        ValueError: the backbone has no such feature map, or the image size does not fit.
    """
    strides = {key: shape.stride for key, shape in shapes.items() if shape.stride}  # no tokens
    if name not in strides:
        coarsest = max(strides, key=lambda key: strides[key] or 0, default="")
        raise ValueError(
            f"{key} '{name}' is no map of the backbone, whose maps have the strides {strides}: set "
            f"one of them, such as {key} {coarsest}, or add a map to "
            "MODEL.MOBILE_FORMER.OUT_FEATURES or MODEL.TIMM.OUT_FEATURES"
        )
    side = (multiple or 1) * strides[name]
    if image_size < 1 or (multiple and image_size % side):
        nearest = max(1, round(image_size / side)) * side
        raise ValueError(
            f"'{name}' has stride {strides[name]}, so the image's side must be a multiple of "
            f"{side}, not {image_size}: set INPUT.PRETRAIN.SIZE to {nearest}"
        )
    return shapes[name]
