# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pictures of training images as the model sees them: through the config's own mapper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_image_to_rgb
from detectron2.structures import BitMasks, Instances, PolygonMasks

from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper, preserved_randomness, seed_place

from .detection_pictures import DrawnBoxes, RGBImage, draw_boxes
from .html_report import Picture

_MAX_SIDE = 800  # of a picture in the report, in pixels


def draw_samples(
    dataset_dicts: Sequence[dict[str, Any]],
    cfg: CfgNode,
    class_names: Sequence[str],
    *,
    num_samples: int,
    seed: int = 0,
) -> list[Picture]:
    """Draws images with boxes after the augmentation of ``build_mapper(cfg, is_train=True)``.

    Args:
        dataset_dicts: records, of which some with boxes are picked at random; those whose file
            cannot be read are passed over.
        cfg: says mapper, augmentation and pixel format.
        class_names: in contiguous order.
        num_samples: how many pictures, if there are so many images.
        seed: decides which images, and how each is augmented.
    """
    mapper = build_mapper(cfg, True)
    with_boxes = [record for record in dataset_dicts if _count_objects(record)]
    order = np.random.default_rng(seed).permutation(len(with_boxes))
    pictures: list[Picture] = []
    for position, index in enumerate(order.tolist()):
        if len(pictures) >= num_samples:
            break
        record = with_boxes[index]
        try:
            with preserved_randomness():
                seed_place(seed, position)
                mapped = mapper(record)
        except UserError:
            continue
        if isinstance(mapped, dict):
            pictures.append(_draw(record, mapped, cfg, class_names))
    return pictures


def _draw(
    record: dict[str, Any], mapped: dict[str, Any], cfg: CfgNode, class_names: Sequence[str]
) -> Picture:
    image = mapped["image"].permute(1, 2, 0).numpy()
    rgb = np.ascontiguousarray(convert_image_to_rgb(image, cfg.INPUT.FORMAT))
    height, width = rgb.shape[:2]
    drawn = _read_truth(mapped["instances"])
    picture = _shrink(draw_boxes(rgb, drawn, class_names))
    name, before, after = Path(record["file_name"]).name, _count_objects(record), len(drawn.boxes)
    boxes = f"{after} boxes" if after == before else f"{after} of {before} boxes left"
    caption = f"{name} (image id {record.get('image_id')}): {width} × {height}, {boxes}"  # noqa: RUF001
    return Picture.from_rgb(picture, alt=caption, caption=caption, quality=85)


def _read_truth(instances: Instances) -> DrawnBoxes:
    masks = None
    if instances.has("gt_masks"):
        masks = instances.gt_masks
        if isinstance(masks, PolygonMasks):
            masks = BitMasks.from_polygon_masks(masks, *instances.image_size)
        masks = masks.tensor.numpy().astype(bool)
    return DrawnBoxes(
        boxes=instances.gt_boxes.tensor.double().numpy(),
        classes=instances.gt_classes.numpy(),
        masks=masks,
    )


def _count_objects(record: dict[str, Any]) -> int:
    return sum(not a.get("iscrowd", 0) for a in record.get("annotations", ()))


def _shrink(picture: RGBImage) -> RGBImage:
    height, width = picture.shape[:2]
    scale = _MAX_SIDE / max(height, width)
    if scale >= 1:
        return picture
    size = (round(width * scale), round(height * scale))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA))
