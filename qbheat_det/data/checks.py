# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks of loaded records and of their image files, before hours of training.

A file is trusted by its header and its last bytes. Only a file that looks wrong is decoded, by the
function that training calls, and that result counts. Damage in the middle of a file is not found.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Literal

from detectron2.data.detection_utils import read_image
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager
from PIL import Image
from tqdm import tqdm

from qbheat_det.core.errors import UserError

from .datasets.coco_shapes import find_box_error
from .errors import DataError, raise_first
from .images import find_orientation

Record = dict[str, Any]
MaskFormat = Literal["polygon", "bitmask"]

_ENDS = {
    "JPEG": b"\xff\xd9",
    "MPO": b"\xff\xd9",  # several JPEGs in one file, as phones write them
    "PNG": b"\x00\x00\x00\x00IEND\xaeB`\x82",
}
_TRIED = 32  # files


def check_image_files(
    dataset_dicts: Sequence[dict[str, Any]], *, num_threads: int = 8, progress: bool = False
) -> None:
    """Raises a ``UserError`` for the first of ``find_image_errors``, and counts the others."""
    raise_first(find_image_errors(dataset_dicts, num_threads=num_threads, progress=progress))


def check_some_readable(name: str, file_names: Sequence[str]) -> None:
    """Checks that a set, whose broken images are skipped in training, does not hold these alone.

    Raises:
        UserError: of a few files spread over the set, none has the header of an image.
    """
    some = file_names[:: max(1, len(file_names) // _TRIED)][: 2 * _TRIED]
    reason = ""
    for file_name in some:
        try:
            with PathManager.open(file_name, "rb") as file, Image.open(file):
                return
        except Exception as error:  # what a broken file raises depends on its format's decoder
            reason = reason or f"{file_name!r}: {type(error).__name__}"
    if some:
        raise UserError(
            f"{name}: none of {len(some)} images, spread over {len(file_names)}, can be read "
            f"(such as {reason})"
        )


def find_image_errors(
    dataset_dicts: Sequence[dict[str, Any]], *, num_threads: int = 8, progress: bool = False
) -> list[DataError]:
    """Returns what is missing, no image, cut short or of another size than annotated, in order.

    Args:
        dataset_dicts: records of Detectron2; ``file_name`` is read, and ``width``, ``height`` and
            ``image_id`` if they are there.
        num_threads: how many files are checked side by side.
        progress: show a bar with the time left on stderr if it takes more than two seconds.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        found = tqdm(
            pool.map(_find_image_error, dataset_dicts),
            desc="Checking image files",
            total=len(dataset_dicts),
            delay=2,
            disable=not progress,
        )
        return [error for error in found if error is not None]


def _find_image_error(record: dict[str, Any]) -> DataError | None:
    path = record["file_name"]
    try:
        with PathManager.open(path, "rb") as file:
            if _looks_right(file, record):
                return None
        found = _read_as_training(path, record)
    except FileNotFoundError:
        found = "missing image file", "the file does not exist"
    except (OSError, ValueError) as error:  # a ValueError for names that no file can have
        found = "unreadable image", f"the file cannot be opened: {_one_line(error)}"
    if found is None:
        return None
    named = f" (image id {record['image_id']})" if "image_id" in record else ""
    return DataError(found[0], f"image {path!r}{named}", found[1])


def _looks_right(file: BinaryIO, record: dict[str, Any]) -> bool:
    try:
        with Image.open(file) as image:
            end = _ENDS.get(image.format or "")
            if end is None or image.mode[0] in "IF":
                return False
            width, height = image.size
            # getexif decodes a PNG to its end, where EXIF may be, unless it came before.
            known = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
            if (image.format != "PNG" or known & image.info.keys()) and (
                find_orientation(image) in (5, 6, 7, 8)
            ):
                width, height = height, width
            file.seek(-len(end), os.SEEK_END)
            whole = file.read() == end
    except Exception:  # decoders raise nearly everything on what they do not know
        return False
    return whole and (record.get("width", width), record.get("height", height)) == (width, height)


def _read_as_training(path: str, record: dict[str, Any]) -> tuple[str, str] | None:
    """Returns kind and reason of what keeps a file from being trained on, or None."""
    if PathManager.isfile(path) and os.path.getsize(PathManager.get_local_path(path)) == 0:
        return "empty image file", "the file is empty (0 bytes)"
    try:
        with PathManager.open(path, "rb") as file, Image.open(file) as image:
            mode = image.mode
    except Exception as error:
        return "unreadable image", f"the file is no image that Pillow can read: {_one_line(error)}"
    if mode[0] in "IF":
        reason = f"pixels of mode {mode} would be clipped to 8 bits: convert the file"
        return "image of more than 8 bits", reason
    try:
        height, width = read_image(path, "RGB").shape[:2]
    except Exception as error:
        reason = f"the pixels cannot be read: {_one_line(error)}"
        return "truncated or damaged image", reason
    annotated = record.get("width", width), record.get("height", height)
    if annotated == (width, height):
        return None
    reason = f"annotated with {annotated[0]} x {annotated[1]} pixels, but has {width} x {height}"
    if annotated == (height, width):
        reason += ": swapped, or the EXIF rotation is not counted in"
    return "image of another size than annotated", reason


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
        filter_empty: ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` in training.
        mask_format: ``INPUT.MASK_FORMAT`` with ``MODEL.MASK_ON``, else None.
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
        reason = "DATALOADER.FILTER_EMPTY_ANNOTATIONS leaves out all images: none has a box"
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
            "it has no 'segmentation', but MODEL.MASK_ON asks for a mask of every object",
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
