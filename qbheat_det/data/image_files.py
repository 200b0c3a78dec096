# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The image files of a data set, looked at before hours of training: there, whole, of their size.

A file is believed by its header and its last bytes: an image format, width and height as the
annotations say (after EXIF rotation, as Detectron2 counts), and the marker that ends it. Only a
file that looks wrong is decoded, by the function that training calls, and what that says counts:
a JPEG with bytes behind its end passes. Damage in the middle of a file is not seen.

Files in the page cache go by at 3,000 to 10,000 a second, so COCO's 118,000 take half a minute
at most; on a disk or a network, threads wait for several files at once.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from detectron2.data.detection_utils import read_image
from detectron2.utils.file_io import PathManager
from PIL import Image
from tqdm import tqdm

from qbheat_det.core.errors import UserError

from .faults import Fault, raise_first

_ORIENTATION = 0x0112  # EXIF tag; from 5 on, width and height change places
_ENDS = {
    "JPEG": b"\xff\xd9",
    "MPO": b"\xff\xd9",  # several JPEGs in one file, as phones write them
    "PNG": b"\x00\x00\x00\x00IEND\xaeB`\x82",
}
_BLOCK = 64  # files a thread takes at a time
_SECONDS_WITHOUT_BAR = 2.0
_TRIED = 32  # files


def check_image_files(
    dataset_dicts: Sequence[dict[str, Any]], *, num_threads: int = 8, progress: bool = False
) -> None:
    """Checks every image file of a data set; see ``find_image_faults``.

    Raises:
        UserError: a file is missing, no image, cut short, or of another size than annotated; the
            sentence names file and image id and counts the others.
    """
    raise_first(find_image_faults(dataset_dicts, num_threads=num_threads, progress=progress))


def check_some_readable(name: str, file_names: Sequence[str]) -> None:
    """Checks that the headers of a few files, spread over a set of images, are not all broken.

    Sets without annotations may hold broken images, which are left out; this is for a set of
    nothing else, seen at once instead of after hours.

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


def find_image_faults(
    dataset_dicts: Sequence[dict[str, Any]], *, num_threads: int = 8, progress: bool = False
) -> list[Fault]:
    """Returns what is wrong with the image files of a data set, in its order; no fault is left out.

    Args:
        dataset_dicts: records of Detectron2; ``file_name`` is read, and ``width``, ``height`` and
            ``image_id`` where they are there.
        num_threads: how many files are looked at side by side.
        progress: show a bar with the time left on stderr if it takes more than two seconds.
    """
    starts = range(0, len(dataset_dicts), _BLOCK)
    faults: list[Fault] = []
    with (
        ThreadPoolExecutor(num_threads) as pool,
        tqdm(
            total=len(dataset_dicts),
            desc="Checking image files",
            unit=" files",
            delay=_SECONDS_WITHOUT_BAR,
            disable=not progress,
        ) as bar,
    ):
        blocks = (dataset_dicts[start : start + _BLOCK] for start in starts)
        for start, found in zip(starts, pool.map(_look_at_block, blocks), strict=True):
            faults += found
            bar.update(min(_BLOCK, len(dataset_dicts) - start))
    return faults


def _look_at_block(records: Iterable[dict[str, Any]]) -> list[Fault]:
    return [fault for record in records if (fault := find_image_fault(record)) is not None]


def find_image_fault(record: dict[str, Any]) -> Fault | None:
    """Returns what is wrong with one record's image file, or None."""
    path = record["file_name"]
    try:
        with PathManager.open(path, "rb") as file:
            if _looks_right(file, record):
                return None
        found = _read_like_training(path, record)
    except FileNotFoundError:
        found = "missing image file", "the file does not exist"
    except (OSError, ValueError) as error:  # a ValueError for names that no file can have
        found = "unreadable image", f"the file cannot be opened: {_sentence(error)}"
    if found is None:
        return None
    named = f" (image id {record['image_id']})" if "image_id" in record else ""
    return Fault(found[0], f"image {path!r}{named}", found[1])


def _looks_right(file: BinaryIO, record: dict[str, Any]) -> bool:
    try:
        with Image.open(file) as image:
            end = _ENDS.get(image.format or "")
            if end is None or image.mode[0] in "IF":
                return False
            width, height = image.size
            if _is_turned(image):
                width, height = height, width
            file.seek(-len(end), os.SEEK_END)
            whole = file.read() == end
    except Exception:  # decoders raise nearly everything on what they do not know
        return False
    return whole and (record.get("width", width), record.get("height", height)) == (width, height)


def _is_turned(image: Image.Image) -> bool:
    # A PNG without these is decoded to its end by getexif, which looks for EXIF behind the pixels.
    known = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
    if image.format == "PNG" and not known & image.info.keys():
        return False
    try:
        return image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception:  # Detectron2 takes a broken EXIF block for none
        return False


def _read_like_training(path: str, record: dict[str, Any]) -> tuple[str, str] | None:
    """Returns kind and reason of what hinders training on a file, or None."""
    if PathManager.isfile(path) and os.path.getsize(PathManager.get_local_path(path)) == 0:
        return "empty image file", "the file is empty (0 bytes)"
    try:
        with PathManager.open(path, "rb") as file, Image.open(file) as image:
            mode, size = image.mode, image.size
    except Exception as error:
        return "unreadable image", f"the file is no image that Pillow can read: {_sentence(error)}"
    if mode[0] in "IF":
        return (
            "image of more than 8 bits",
            f"the pixels have mode {mode}, which is clipped to 8 bits: convert the file",
        )
    try:
        height, width = read_image(path, "RGB").shape[:2]
    except Exception as error:
        reason = (
            f"the header says width {size[0]} and height {size[1]}, but the pixels cannot be read"
        )
        return "truncated or damaged image", f"{reason}: {_sentence(error)}; is the file whole?"
    return _compare_sizes((width, height), record)


def _compare_sizes(found: tuple[int, int], record: dict[str, Any]) -> tuple[str, str] | None:
    said = record.get("width", found[0]), record.get("height", found[1])
    if said == found:
        return None
    hint = "correct the annotations"
    if said == found[::-1]:
        hint = "width and height are swapped, or the EXIF rotation is not counted in"
    return (
        "image of another size than annotated",
        f"the annotations say width {said[0]} and height {said[1]}, but the image has width "
        f"{found[0]} and height {found[1]}: {hint}",
    )


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
