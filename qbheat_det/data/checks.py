# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The class of data set errors, and checks of loaded records."""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from detectron2.structures import BoxMode

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first

Record = dict[str, Any]
MaskFormat = Literal["polygon", "bitmask"]

_MAX_COORDINATE = 1e9


@dataclass(frozen=True)
class DataError:
    """A problem in a data set that stops training or silently makes its result worse.

    Mappers return a ``DataError`` for an unreadable image, which is then skipped.

    Attributes:
        kind: category of the error, such as ``"unreadable image"``.
        where: file and id, such as ``"train.json: annotation id 7"``.
        reason: explanation of the problem, and its solution if it is not obvious.
    """

    kind: str
    where: str
    reason: str

    @property
    def message(self) -> str:
        """``where`` and ``reason`` in one line, with undecodable bytes of file names escaped."""
        return f"{self.where}: {self.reason}".encode(errors="backslashreplace").decode()


def raise_first(errors: Sequence[DataError]) -> None:
    """Raises a ``UserError`` with the first error and the number of further errors, if any."""
    if errors:
        others = f" (and {len(errors) - 1} more: qbheat inspect lists them all)"
        raise UserError(errors[0].message + (others if len(errors) > 1 else ""))


def join_messages(errors: Iterable[DataError]) -> str:
    """Returns one line with the first ten messages and the number of the remaining ones."""
    return join_first((error.message for error in errors), 10, separator="; ")


def count_files(records: Sequence[Record]) -> int:
    """Returns the number of images: a record without a file, and all records of a file, are one."""
    return len({record.get("file_name", index) for index, record in enumerate(records)})


def refuse_broken_half(errors: Mapping[str, DataError], num_files: int, use: str) -> None:
    """Raises a ``UserError`` if more than half of ``num_files`` images have an error.

    ``errors`` maps each broken image to its error, and ``use`` names what the images are for.
    """
    if 2 * len(errors) > num_files:
        raise UserError(
            f"{len(errors):,} of {num_files:,} images for {use} cannot be read, such as "
            f"{next(iter(errors.values())).message}: repair them and start again "
            "(--resume continues a training run)"
        )


def check_input_keys(*rows: tuple[str, object, bool, str]) -> None:
    """Raises a ``UserError`` for the first row whose value is invalid.

    A row has a key of ``INPUT``, its value, whether it is valid, and a text with the valid values.
    """
    for key, value, is_valid, must in rows:
        if not is_valid:
            raise UserError(f"INPUT.{key} must be {must}, but is {value!r}")


def find_record_errors(
    name: str,
    dataset_dicts: Sequence[Record],
    *,
    num_classes: int,
    filter_empty: bool = False,
    mask_format: MaskFormat | None = None,
    longest: float = math.inf,
) -> list[DataError]:
    """Returns all errors in the loaded records of a data set.

    ``filter_empty`` is ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` in training. ``mask_format`` is
    ``INPUT.MASK_FORMAT`` if ``MODEL.MASK_ON``. ``longest`` is the longest side of resized images.
    """
    if not dataset_dicts:
        return [DataError("empty dataset", f"dataset '{name}'", "it has no images")]
    errors = []
    num_objects = 0
    for record in dataset_dicts:
        objects = [a for a in record.get("annotations", ()) if not a.get("iscrowd", 0)]
        num_objects += len(objects)
        where = f"dataset '{name}': image id {record.get('image_id')!r} ({record['file_name']!r})"
        if reason := find_elongation([record.get(k, 1) for k in ("width", "height")], longest):
            errors.append(DataError("elongated image", where, reason))
        for number, annotation in enumerate(objects, start=1):
            for kind, reason in _find_object_errors(annotation, record, num_classes, mask_format):
                errors.append(DataError(kind, f"{where}, object {number}", reason))
    if filter_empty and not num_objects:
        reason = "DATALOADER.FILTER_EMPTY_ANNOTATIONS leaves out all images, because none has a box"
        errors.append(DataError("no boxes", f"dataset '{name}'", reason))
    return errors


def find_elongation(sides: Sequence[int], longest: float) -> str | None:
    """Returns the error of an image whose shorter side would be resized to zero pixels, or None.

    ``sides`` are its height and width, in any order. ``longest`` is the longest side of resized
    images. All are in pixels.
    """
    short, long = sorted(sides)
    too_long = short * longest < long
    return f"{long} x {short} pixels is too elongated to be resized" if too_long else None


def _find_object_errors(
    annotation: dict[str, Any], record: Record, num_classes: int, mask_format: MaskFormat | None
) -> Iterator[tuple[str, str]]:
    """Yields (kind, reason) of each error in one object of a record."""
    class_index = annotation.get("category_id")
    if type(class_index) is not int or not 0 <= class_index < num_classes:
        unknown = f"category_id {class_index!r} is not one of the {num_classes} classes, from 0"
        yield "unknown category", unknown
    mode = annotation.get("bbox_mode")
    if mode not in tuple(BoxMode):
        yield "wrong bbox_mode", f"bbox_mode must be one of Detectron2's, but is {mode!r}"
    elif mode in (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS):
        size = record.get("width", math.inf), record.get("height", math.inf)
        if reason := find_box_error(_to_xywh(annotation.get("bbox"), mode), size):
            yield "wrong bbox", reason
    segmentation = annotation.get("segmentation")
    if mask_format is not None and not segmentation:
        yield (
            "object without a mask",
            "it has no 'segmentation', but MODEL.MASK_ON requires a mask for every object",
        )
    elif mask_format == "polygon" and isinstance(segmentation, dict):
        yield (
            "mask of another format",
            "its segmentation is RLE, but INPUT.MASK_FORMAT is polygon: set it to bitmask",
        )


def find_box_error(box: object, size: tuple[float, float]) -> str | None:
    """Returns the error in a box [x, y, width, height], or None if it is valid.

    ``size`` is (width, height) of the image.
    """
    if not (isinstance(box, list) and len(box) == 4 and are_numbers(box, _MAX_COORDINATE)):
        must = "four finite numbers [x, y, width, height] in pixels"
        return f"bbox must be {must}, but is {short(box)}"
    x, y, width, height = box
    if width < 0 or height < 0:
        return f"bbox {short(box)} has a negative width or height"
    if width and height and not (-width < x < size[0] and -height < y < size[1]):
        return (
            f"bbox {short(box)} lies outside its image of {size[0]} x {size[1]} pixels; it must be "
            "[x, y, width, height] in pixels"
        )
    return None


def are_numbers(values: object, largest: float) -> bool:
    """Returns whether a value is a list of numbers up to ``largest`` in magnitude, without nan."""
    if not isinstance(values, list):
        return False
    try:
        numbers = array("d", values)
    except (TypeError, OverflowError):
        return False
    if not numbers:
        return True
    # The sum is nan if one of the numbers is.
    return math.isfinite(sum(numbers)) and max(numbers) <= largest and min(numbers) >= -largest


def short(value: object) -> str:
    """Returns the ``repr`` of a value, truncated to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _to_xywh(box: Any, mode: BoxMode) -> object:
    try:
        x, y, width, height = map(float, box)
    except (OverflowError, TypeError, ValueError):
        return box
    return [x, y, width, height] if mode == BoxMode.XYWH_ABS else [x, y, width - x, height - y]
