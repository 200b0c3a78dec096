# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks the image files of a data set before hours of training: present, complete, of their size.

A file is trusted by its header and its last bytes. Only a file that looks wrong is decoded, by the
function that training calls, and that result counts. Damage in the middle of a file is not found.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from detectron2.data.detection_utils import read_image
from detectron2.utils.file_io import PathManager
from PIL import Image
from tqdm import tqdm

from qbheat_det.core.errors import UserError

from .errors import DataError, raise_first
from .images import find_orientation

_ENDS = {
    "JPEG": b"\xff\xd9",
    "MPO": b"\xff\xd9",  # several JPEGs in one file, as phones write them
    "PNG": b"\x00\x00\x00\x00IEND\xaeB`\x82",
}
_TRIED = 32  # files


def check_image_files(
    dataset_dicts: Sequence[dict[str, Any]], *, num_threads: int = 8, progress: bool = False
) -> None:
    """Checks every image file of a data set; see ``find_image_errors``.

    Raises:
        UserError: a file is missing, no image, cut short, or of another size than annotated; the
            message names file and image id and counts the others.
    """
    raise_first(find_image_errors(dataset_dicts, num_threads=num_threads, progress=progress))


def check_some_readable(name: str, file_names: Sequence[str]) -> None:
    """Checks that not all headers of a few files, spread over a set of images, are broken.

    Sets without annotations may hold broken images, which are skipped; this finds a set of nothing
    else at once instead of after hours.

    Raises:
        UserError: not one of them is an image.
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
            f"(such as {reason}); are they copied to the end, or links to what is not there?"
        )


def find_image_errors(
    dataset_dicts: Sequence[dict[str, Any]], *, num_threads: int = 8, progress: bool = False
) -> list[DataError]:
    """Returns all that is wrong with the image files of a data set, in its order.

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
            mode, size = image.mode, image.size
    except Exception as error:
        return "unreadable image", f"the file is no image that Pillow can read: {_one_line(error)}"
    if mode[0] in "IF":
        reason = f"the pixels have mode {mode}, which is clipped to 8 bits: convert the file"
        return "image of more than 8 bits", reason
    try:
        height, width = read_image(path, "RGB").shape[:2]
    except Exception as error:
        reason = f"the header says width {size[0]} and height {size[1]}, but the pixels cannot be"
        reason += f" read: {_one_line(error)}; is the file whole?"
        return "truncated or damaged image", reason
    annotated = record.get("width", width), record.get("height", height)
    if annotated == (width, height):
        return None
    hint = "correct the annotations"
    if annotated == (height, width):
        hint = "width and height are swapped, or the EXIF rotation is not counted in"
    return (
        "image of another size than annotated",
        f"the annotations say width {annotated[0]} and height {annotated[1]}, but the image has "
        f"width {width} and height {height}: {hint}",
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
