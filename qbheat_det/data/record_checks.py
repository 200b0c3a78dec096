# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What training needs of loaded records, wherever they come from: images, boxes, classes, masks.

Detectron2 finds these out late, by an assertion or an attribute that is missing.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from detectron2.structures import BoxMode

from .datasets.coco_shapes import find_box_error
from .errors import DataError

Record = dict[str, Any]
MaskFormat = Literal["polygon", "bitmask"]


def find_record_errors(
    name: str,
    dataset_dicts: Sequence[Record],
    *,
    num_classes: int,
    filter_empty: bool = False,
    mask_format: MaskFormat | None = None,
) -> list[DataError]:
    """Returns all that is wrong with the loaded records of a dataset.

    Args:
        name: of the dataset, for the messages.
        dataset_dicts: records of Detectron2.
        num_classes: contiguous class indices are below this.
        filter_empty: whether images without boxes are left out, as
            ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` does in training.
        mask_format: ``INPUT.MASK_FORMAT`` if masks are trained or evaluated (``MODEL.MASK_ON``),
            else None.
    """
    if not dataset_dicts:
        return [DataError("empty dataset", f"dataset '{name}'", "it has no images")]
    errors = []
    num_objects = 0
    for record in dataset_dicts:
        objects = [a for a in record.get("annotations", ()) if not a.get("iscrowd", 0)]
        num_objects += len(objects)
        where = f"dataset '{name}': image id {record.get('image_id')!r} ({record['file_name']!r})"
        for position, annotation in enumerate(objects):
            for kind, reason in find_object_errors(annotation, record, num_classes, mask_format):
                errors.append(DataError(kind, f"{where}, object {position + 1}", reason))
    if filter_empty and not num_objects:
        reason = (
            f"none of its {len(dataset_dicts)} images has a box that is no crowd, and "
            "DATALOADER.FILTER_EMPTY_ANNOTATIONS leaves out images without"
        )
        errors.append(DataError("no boxes", f"dataset '{name}'", reason))
    return errors


def find_object_errors(
    annotation: dict[str, Any], record: Record, num_classes: int, mask_format: MaskFormat | None
) -> Iterator[tuple[str, str]]:
    """Yields kind and reason of all that is wrong with one object of a record."""
    class_index = annotation.get("category_id")
    if type(class_index) is not int or not 0 <= class_index < num_classes:
        unknown = f"category_id {class_index!r} is none of the {num_classes} classes, 0 and up"
        yield "unknown category", unknown
    if reason := _find_box_error(annotation, record):
        yield "box that cannot be trained on", f"bbox {annotation.get('bbox')!r}: {reason}"
    segmentation = annotation.get("segmentation")
    if mask_format is not None and not segmentation:
        yield (
            "object without a mask",
            "it has no 'segmentation', but MODEL.MASK_ON asks for a mask of every object: add "
            "masks, or train a detector of boxes",
        )
    elif mask_format == "polygon" and isinstance(segmentation, dict):
        yield (
            "mask of another format",
            "its segmentation is RLE, but INPUT.MASK_FORMAT is polygon: set it to bitmask",
        )


def _find_box_error(annotation: Record, record: Record) -> str | None:
    mode = annotation.get("bbox_mode")
    if mode not in (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS):
        return None if mode in tuple(BoxMode) else f"has no bbox_mode of Detectron2, but {mode!r}"
    try:
        x, y, width, height = map(float, annotation["bbox"])
    except (KeyError, OverflowError, TypeError, ValueError):
        return "must be four numbers"
    if mode == BoxMode.XYXY_ABS:
        width, height = width - x, height - y
    size = record.get("width", math.inf), record.get("height", math.inf)
    found = find_box_error({"bbox": [x, y, width, height]}, size)
    return found and found[1]
