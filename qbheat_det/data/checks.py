# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``DataError``, a problem in a data set, and checks of the records of a data set."""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from detectron2.structures import BoxMode

from qbheat_det.core.errors import UserError
from qbheat_det.core.image_files import find_elongation
from qbheat_det.core.text import join_first
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

Record = dict[str, Any]
MaskFormat = Literal["polygon", "bitmask"]

_MAX_COORDINATE = 1e9


@dataclass(frozen=True)
class DataError:
    """A problem in a data set that stops training or silently makes its result worse.

    Mappers return a ``DataError`` for an unreadable image, which is then skipped.

    Attributes:
        kind: type of the problem, such as ``"unreadable image"``.
        where: file, and line or id in it, such as ``"train.json: annotation id 7"``.
        reason: explanation for the user, and its solution if it is not obvious.
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
    if not errors:
        return
    message = errors[0].message
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more: qbheat inspect lists them all)"
    raise UserError(message)


def join_messages(errors: Iterable[DataError]) -> str:
    """Returns one line with the first ten messages and the number of the remaining ones."""
    return join_first((error.message for error in errors), 10, separator="; ")


def count_files(records: Sequence[Record]) -> int:
    """Returns the number of different image files. A record without a file counts as a file."""
    return len({record.get("file_name", index) for index, record in enumerate(records)})


def refuse_broken_half(errors: Mapping[str, DataError], num_files: int, use: str) -> None:
    """Raises a ``UserError`` if more than half of the images cannot be read.

    Args:
        errors: maps each image that cannot be read to its error.
        num_files: number of all images.
        use: what the images are for, for the message.
    """
    if 2 * len(errors) > num_files:
        raise UserError(
            f"{len(errors):,} of {num_files:,} images for {use} cannot be read, such as "
            f"{next(iter(errors.values())).message}: repair them and start again "
            "(--resume continues a training run)"
        )


def check_input_keys(*rows: tuple[str, object, bool, str]) -> None:
    """Raises a ``UserError`` for the first config value that is invalid.

    Each row is (key in ``INPUT``, value, whether the value is valid, description of valid values).
    """
    for key, value, is_valid, valid_values in rows:
        if not is_valid:
            raise UserError(f"INPUT.{key} must be {valid_values}, but is {value!r}")


def find_record_errors(
    name: str,
    dataset_dicts: Sequence[Record],
    *,
    num_classes: int,
    filter_empty: bool = False,
    mask_format: MaskFormat | None = None,
    longest: float = math.inf,
) -> list[DataError]:
    """Returns all errors in the records of a data set. Does not read the image files.

    Args:
        name: name of the data set, for messages.
        dataset_dicts: the records, in Detectron2's format.
        num_classes: number of classes.
        filter_empty: whether images without boxes are left out.
        mask_format: format that all masks must have; None if masks are not used.
        longest: longest side of resized images, in pixels.
    """
    if not dataset_dicts:
        return [DataError("empty dataset", f"dataset '{name}'", "it has no images")]
    errors = []
    num_objects = 0
    for record in dataset_dicts:
        objects = [a for a in record.get("annotations", ()) if not a.get("iscrowd", 0)]
        num_objects += len(objects)
        where = f"dataset '{name}': image id {record.get('image_id')!r} ({record['file_name']!r})"
        elongation = find_elongation([record.get("width", 1), record.get("height", 1)], longest)
        if elongation:
            errors.append(DataError("elongated image", where, elongation))
        annotated = record.get(ANNOTATED_CLASSES, ())
        unknown = [class_id for class_id in annotated if class_id not in range(num_classes)]
        if unknown:
            reason = (
                f"'{ANNOTATED_CLASSES}' has {short(unknown)}, but there are {num_classes} classes"
            )
            errors.append(DataError("unknown category", where, reason))
        for number, annotation in enumerate(objects, start=1):
            for kind, reason in _find_object_errors(annotation, record, num_classes, mask_format):
                errors.append(DataError(kind, f"{where}, object {number}", reason))
    if filter_empty and not num_objects:
        reason = "DATALOADER.FILTER_EMPTY_ANNOTATIONS leaves out all images, because none has a box"
        errors.append(DataError("no boxes", f"dataset '{name}'", reason))
    return errors


def _find_object_errors(
    annotation: dict[str, Any], record: Record, num_classes: int, mask_format: MaskFormat | None
) -> Iterator[tuple[str, str]]:
    """Yields (``DataError.kind``, ``DataError.reason``) of each error in an annotation."""
    class_index = annotation.get("category_id")
    if type(class_index) is not int or not 0 <= class_index < num_classes:
        yield (
            "unknown category",
            f"category_id {class_index!r} is not one of the {num_classes} classes, from 0",
        )
    mode = annotation.get("bbox_mode")
    if mode not in tuple(BoxMode):
        yield "wrong bbox_mode", f"bbox_mode must be one of Detectron2's, but is {mode!r}"
    elif mode in (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS):
        image_size = (record.get("width", math.inf), record.get("height", math.inf))
        box_error = find_box_error(_to_xywh(annotation.get("bbox"), mode), image_size)
        if box_error:
            yield "wrong bbox", box_error
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


def find_box_error(box: object, image_size: tuple[float, float]) -> str | None:
    """Returns the error in a box [x, y, width, height], or None if it is valid.

    ``image_size`` is (width, height).
    """
    if not (isinstance(box, list) and len(box) == 4 and are_numbers(box, _MAX_COORDINATE)):
        return (
            f"bbox must be four finite numbers [x, y, width, height] in pixels, but is {short(box)}"
        )
    x, y, width, height = box
    image_width, image_height = image_size
    if width < 0 or height < 0:
        return f"bbox {short(box)} has a negative width or height"
    overlaps_image = -width < x < image_width and -height < y < image_height
    if width and height and not overlaps_image:
        return (
            f"bbox {short(box)} lies outside its image of {image_width} x {image_height} pixels; "
            "it must be [x, y, width, height] in pixels"
        )
    return None


def are_numbers(values: object, largest: float) -> bool:
    """Returns whether a value is a list of numbers from -``largest`` to ``largest``, and no nan."""
    if not isinstance(values, list):
        return False
    try:
        numbers = array("d", values)  # long polygons are converted faster than in a loop
    except (TypeError, OverflowError):
        return False
    if not numbers:
        return True
    # The sum is nan if one of the numbers is.
    return math.isfinite(sum(numbers)) and max(numbers) <= largest and min(numbers) >= -largest


def short(value: object) -> str:
    """Returns the ``repr`` of a value, truncated to 60 characters."""
    text = repr(value)
    if len(text) > 60:
        return text[:60] + "…"
    return text


def _to_xywh(box: Any, mode: BoxMode) -> object:
    """Converts a box, XYXY or XYWH, to [x, y, width, height]. Returns an invalid box unchanged."""
    try:
        x, y, third, fourth = map(float, box)
    except (OverflowError, TypeError, ValueError):
        return box
    if mode == BoxMode.XYWH_ABS:
        return [x, y, third, fourth]
    return [x, y, third - x, fourth - y]
