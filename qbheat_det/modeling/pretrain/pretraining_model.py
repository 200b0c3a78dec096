# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What all pre-training objectives have in common: a backbone, one of its maps, images of one size.

A subclass adds the parts that its objective needs and a ``forward`` that gives losses in training.
The mapper decodes and crops; what an objective draws at random it draws in the model, and tests and
pictures can pass it in.
"""

import logging
from collections.abc import Mapping, Sequence

from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.image_model import ImageModel

logger = logging.getLogger(__name__)


class PretrainingModel(ImageModel):
    """The backbone that is to be trained, and the map of it that is learned from."""

    pretrain_only_modules: tuple[str, ...] = ()
    """The children that nothing but this pre-training needs."""
    mapper_name = "pretrain"
    held_out_loss = True
    """Whether an image has a loss by itself, in evaluation, and not only in a batch."""

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
            backbone: what is to be trained; gives ``in_feature``.
            in_feature: name of the backbone's map that is learned from.
            head_in_features: names of all outputs of the backbone that the objective reads.
            image_size: S, rows and columns of the images.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.

        Raises:
            ValueError: the backbone has no such map.
        """
        shape = find_map(backbone.output_shape(), in_feature, image_size)
        for name, other in backbone.output_shape().items():
            if (other.stride or 0) > shape.stride:
                logger.warning(
                    f"'{name}' lies behind '{in_feature}', which is what is learned from: its own "
                    "layers stay as they began"
                )
        super().__init__(
            backbone=backbone,
            in_feature=in_feature,
            head_in_features=head_in_features,
            image_size=image_size,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
        )

    def check_num_images(self, num_images: int) -> None:
        """Warns where a training set is too small for the objective; most take any.

        Args:
            num_images: of the training set.
        """


def check_equal_shares(batch_size: int, processes: int) -> None:
    """Refuses what an objective that gathers embeddings of all processes cannot take.

    Args:
        batch_size: images of a step, over all processes.
        processes: that share them.

    Raises:
        UserError: the shares are not equal.
    """
    if batch_size % processes:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {batch_size} is no multiple of the {processes} processes, but "
            "this objective compares images of all of them, and wants as many from each"
        )


def find_map(
    shapes: Mapping[str, ShapeSpec], name: str, image_size: int, *, multiple: int | None = None
) -> ShapeSpec:
    """Returns the shape of a backbone's map.

    Args:
        shapes: of the backbone's outputs.
        name: of the map.
        image_size: rows and columns of the images, in pixels.
        multiple: what the positions along a side of the map must be a multiple of, each of them
            stride x stride pixels of the image; None where any image does.

    Raises:
        ValueError: there is none of that name, or the image does not fall into such positions; the
            sentence says what would work.
    """
    strides = {key: shape.stride for key, shape in shapes.items() if shape.stride}
    fitting = [
        key
        for key, stride in strides.items()
        if multiple is None or image_size % (multiple * stride) == 0
    ]
    if name not in strides:
        raise ValueError(
            f"IN_FEATURE '{name}' is no map of the backbone, whose maps have the strides "
            f"{strides}; for images of {image_size} pixels, use one of {fitting}, or ask the "
            "backbone for more maps (MODEL.TIMM.OUT_FEATURES, MODEL.MOBILE_FORMER.OUT_FEATURES)"
        )
    if name not in fitting or image_size < 1:
        side = (multiple or 1) * strides[name]
        nearest = max(1, round(image_size / side)) * side
        others = f", or IN_FEATURE to one of {fitting}" if fitting else ""
        raise ValueError(
            f"'{name}' has stride {strides[name]}, so the image's side must be a multiple of "
            f"{side}, not {image_size}: set INPUT.PRETRAIN.SIZE to {nearest}{others}"
        )
    return shapes[name]
