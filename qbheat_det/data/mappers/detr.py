# Copyright (c) qbheat_det contributors. Apache-2.0.
"""DETR's augmentation, composed of Detectron2's own pieces.

"End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. A.4. Differs only in
the order: the flip comes last, as in Detectron2, which changes no probability.
"""

from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T

from qbheat_det.data.checks import check_input_keys


class DetrDatasetMapper(DatasetMapper):
    """Detectron2's mapper with DETR's random crop before its resize and flip.

    In training, with probability 1/2 the shorter side is resized to one of
    ``INPUT.DETR_CROP_RESIZE`` and a part of random height and width is cut out. Boxes are clipped
    to the crop; an image that loses all of them stays. Masks (``MODEL.MASK_ON``) are cropped along;
    polygons need ``shapely``.
    """

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        arguments: dict[str, Any] = super().from_config(cfg, is_train)
        if is_train and len(cfg.INPUT.DETR_CROP_RESIZE):
            crop = build_detr_crop(
                resize_to=cfg.INPUT.DETR_CROP_RESIZE, crop_range=cfg.INPUT.DETR_CROP_RANGE
            )
            arguments["augmentations"].insert(0, crop)
        return arguments


def build_detr_crop(*, resize_to: Sequence[int], crop_range: Sequence[int]) -> T.Augmentation:
    """Returns the augmentation that, half of the time, resizes and cuts out a part.

    Args:
        resize_to: lengths in pixels, one of which the shorter side gets.
        crop_range: smallest and largest height and width of the part, in pixels.

    Raises:
        UserError: a length is not positive, or ``crop_range`` is not [min, max].
    """
    is_range = len(crop_range) == 2 and 0 < crop_range[0] <= crop_range[1]
    check_input_keys(
        ("DETR_CROP_RESIZE", resize_to, min(resize_to, default=0) > 0, "positive"),
        ("DETR_CROP_RANGE", crop_range, is_range, "[min, max] with 0 < min <= max"),
    )
    resize = T.ResizeShortestEdge(list(resize_to), sample_style="choice")
    crop = T.RandomCrop("absolute_range", tuple(crop_range))
    return T.RandomApply(T.AugmentationList([resize, crop]), prob=0.5)
