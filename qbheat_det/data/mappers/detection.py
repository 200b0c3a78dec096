# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mappers for detection: Detectron2's mapper with faster reading, and DETR's augmentation.

In training, the random crops, resizes and flips are drawn before the image is decoded, as they
depend only on its size, which is in the file's header. The random numbers are the same as in
Detectron2. Therefore, a JPEG that is resized to less than 1/2, 1/4 or 1/8 of its size can be
decoded at this reduced size. Images are resized with PyTorch's uint8 kernel. Boxes are equal to
Detectron2's. Pixels are equal up to rounding, except for JPEGs that are decoded at a reduced size.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.detection_utils import check_image_size, filter_empty_instances
from detectron2.structures import Boxes, BoxMode, Instances
from fvcore.transforms.transform import Transform
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from qbheat_det.config import reads_our_keys
from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import DataError, check_input_keys
from qbheat_det.data.images import REDUCTIONS, open_image, resize
from qbheat_det.modeling.contracts import TILE

from .sizes import find_size
from .upright import UprightMapper


class DetectionMapper(UprightMapper):
    """Detectron2's mapper, which reads files faster in training.

    Masks, keypoints and boxes are equal to Detectron2's. Inference, semantic segmentation, and
    augmentations other than resize, crop and flip use Detectron2's code.
    """

    @reads_our_keys
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Whether the augmentations cannot be drawn before the image is decoded.
        self._needs_pixels = (
            not self.is_train
            or self.proposal_topk is not None
            or self.image_format not in ("RGB", "BGR")
            or not _depends_on_size(self.augmentations)
        )

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        if self._needs_pixels or "sem_seg_file_name" in dataset_dict:
            return super().__call__(dataset_dict)
        try:
            with open_image(dataset_dict["file_name"]) as file:
                outline = _Outline(file.height, file.width)
                check_image_size(dataset_dict, outline.image)
                transforms = list(_flatten(self.augmentations(outline)))
                pixels = file.decode(_find_reduction(transforms))  # (h, w, 3)
        except UnidentifiedImageError:  # Detectron2 reads more formats
            return super().__call__(dataset_dict)
        image = pixels.permute(2, 0, 1)  # (3, h, w)
        for transform in transforms:
            image = _transform(image, transform)
        if self.image_format == "BGR":
            image = image.flip(0)
        record = {**dataset_dict, "image": image}
        if "annotations" in record:
            record["annotations"] = [dict(annotation) for annotation in record["annotations"]]
            image_shape = outline.image.shape[:2]
            self._transform_annotations(record, T.TransformList(transforms), image_shape)
        return record

    def find_size(self, dataset_dict: dict[str, Any]) -> tuple[int, int]:
        """Returns the height and width of the augmented image, see ``sizes.find_size``.

        Subclasses that change the size otherwise than by ``augmentations`` override it.
        """
        if not _depends_on_size(self.augmentations):
            raise UserError(
                "DATALOADER.SIZE_GROUPING needs augmentations that only resize, crop and flip, as "
                "it finds the sizes of images before they are read: set it to 0"
            )
        outline = _Outline(int(dataset_dict["height"]), int(dataset_dict["width"]))
        self.augmentations(outline)
        height, width, _ = outline.image.shape
        return height, width

    def _transform_annotations(
        self, dataset_dict: dict[str, Any], transforms: T.TransformList, image_shape: Any
    ) -> None:
        """Replaces "annotations" of a record by "instances".

        Transforms all boxes at once, which is faster than Detectron2's loop. Masks, keypoints and
        boxes of several modes are left to Detectron2.

        Args:
            dataset_dict: the record, which is changed.
            transforms: the transforms of the image.
            image_shape: (height, width) of the transformed image.
        """
        annotations = [
            annotation
            for annotation in dataset_dict["annotations"]
            if not annotation.get("iscrowd", 0)
        ]
        modes = {annotation["bbox_mode"] for annotation in annotations}
        if self.use_instance_mask or self.use_keypoint or len(modes) != 1:
            super()._transform_annotations(dataset_dict, transforms, image_shape)
            return
        del dataset_dict["annotations"]
        # (N, 4). As in Detectron2, in float32 before the transforms, and in float64 in them.
        boxes = np.array([annotation["bbox"] for annotation in annotations], dtype=np.float32)
        boxes = BoxMode.convert(boxes, modes.pop(), BoxMode.XYXY_ABS).astype(np.float64)
        height, width = image_shape
        boxes = transforms.apply_box(boxes).clip(0, [width, height, width, height])
        classes = torch.tensor([int(annotation["category_id"]) for annotation in annotations])
        instances = Instances((height, width), gt_boxes=Boxes(boxes), gt_classes=classes)
        dataset_dict["instances"] = filter_empty_instances(instances)


class DetrDatasetMapper(DetectionMapper):
    """Detectron2's mapper, with DETR's random crop before the resize and flip.

    "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. A.4. The flip comes
    last, as in Detectron2. This is statistically equivalent to the paper's order.

    In training, with probability 1/2, the shorter side is resized to one of
    ``INPUT.DETR_CROP_RESIZE``, and a region of random size is cropped. Boxes are clipped to the
    crop. Images without remaining boxes are kept. Masks (``MODEL.MASK_ON``) are cropped too, which
    requires ``shapely`` for polygons.
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
    """Returns an augmentation that resizes and crops an image with probability 1/2.

    The shorter side is resized to one of ``resize_to``, in pixels. ``crop_range`` is [min, max] of
    the height and width of the crop. Raises a ``UserError`` if a value is invalid.
    """
    is_range = len(crop_range) == 2 and 0 < crop_range[0] <= crop_range[1]
    check_input_keys(
        ("DETR_CROP_RESIZE", resize_to, min(resize_to, default=0) > 0, "positive"),
        ("DETR_CROP_RANGE", crop_range, is_range, "[min, max] with 0 < min <= max"),
    )
    resize = T.ResizeShortestEdge(list(resize_to), sample_style="choice")
    crop = T.RandomCrop("absolute_range", tuple(crop_range))
    return T.RandomApply(T.AugmentationList([resize, crop]), prob=0.5)


@dataclass(frozen=True)
class TileMapper:
    """Wraps a mapper to crop a tile out of the decoded image before all augmentations.

    Records without the key ``TILE`` are whole images, which are not cropped. For a tile, "height"
    and "width" of the result are those of the tile. Returns an error or None if the wrapped mapper
    does.
    """

    mapper: DatasetMapper

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        if TILE not in dataset_dict:
            return self.mapper(dataset_dict)
        x, y, width, height = dataset_dict[TILE]
        cropping = copy.copy(self.mapper)
        crop = T.CropTransform(x, y, width, height)
        cropping.augmentations = T.AugmentationList([crop, self.mapper.augmentations])
        mapped = cropping(dataset_dict)
        if not isinstance(mapped, dict):
            return mapped
        return {**mapped, "height": height, "width": width}

    def find_size(self, dataset_dict: dict[str, Any]) -> tuple[int, int]:
        """Returns the height and width of the augmented tile, see ``sizes.find_size``."""
        record = dict(dataset_dict)
        if TILE in record:
            _, _, record["width"], record["height"] = record[TILE]
        return find_size(self.mapper, record)


class _Outline(T.AugInput):
    """A placeholder for an image, for augmentations that use only its size.

    ``image`` has the shape (h, w, 3), but no memory, as all its elements are the same zero.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__(np.broadcast_to(np.uint8(0), (height, width, 3)))

    def transform(self, tfm: Transform) -> None:
        if isinstance(tfm, T.ResizeTransform):
            self.image = np.broadcast_to(np.uint8(0), (tfm.new_h, tfm.new_w, 3))
        elif isinstance(tfm, T.CropTransform):
            self.image = np.broadcast_to(np.uint8(0), (tfm.h, tfm.w, 3))


def _depends_on_size(augmentation: T.Augmentation) -> bool:
    """Returns whether an augmentation is a resize, crop or flip, or a list of these."""
    if type(augmentation) is T.AugmentationList:
        return all(map(_depends_on_size, augmentation.augs))
    if type(augmentation) is T.RandomApply:
        return _depends_on_size(augmentation.aug)
    if type(augmentation) is T.ResizeShortestEdge:
        return bool(augmentation.interp == Image.Resampling.BILINEAR)
    return type(augmentation) in (T.RandomFlip, T.RandomCrop)


def _flatten(transform: Transform) -> Iterator[Transform]:
    """Yields the transforms in nested lists of transforms, without those that do nothing."""
    if isinstance(transform, T.TransformList):
        for part in transform.transforms:
            yield from _flatten(part)
    elif not isinstance(transform, T.NoOpTransform):
        yield transform


def _find_reduction(transforms: Sequence[Transform]) -> int:
    """Returns the factor by which an image may be scaled down when it is decoded: 8, 4, 2 or 1.

    It is above 1 only if the first transform is a resize to an image that is smaller still. The
    image's width and height must be multiples of the factor. Otherwise, the decoded size would be
    rounded, and boxes would be shifted relative to the pixels.
    """
    if not transforms or not isinstance(transforms[0], T.ResizeTransform):
        return 1
    resizing = transforms[0]
    for reduction in REDUCTIONS:
        is_exact = resizing.h % reduction == 0 and resizing.w % reduction == 0
        is_larger = (
            resizing.h >= reduction * resizing.new_h and resizing.w >= reduction * resizing.new_w
        )
        if is_exact and is_larger:
            return reduction
    return 1


def _transform(image: Tensor, transform: Transform) -> Tensor:
    """Applies a resize, crop or flip to an image (3, H, W), uint8."""
    if isinstance(transform, T.ResizeTransform):
        return resize(image.permute(1, 2, 0), transform.new_h, transform.new_w)
    if isinstance(transform, T.CropTransform):
        rows = slice(transform.y0, transform.y0 + transform.h)
        columns = slice(transform.x0, transform.x0 + transform.w)
        return image[:, rows, columns]
    if isinstance(transform, T.HFlipTransform):
        return image.flip(2)
    return image.flip(1)  # a vertical flip
