# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images in shards: WebDataset's tar files, and an index that says where in them each image lies.

The index makes every image readable at random, from a folder, over HTTP or from a bucket, so that
the stream of batches stays a function of the seed alone. A record of an image in a shard has a
``file_name`` that any process can open without having seen the index::

    shards://ADDRESS/train-000003.tar#BYTES-OFFSET-SIZE-CRC/NAME

``ADDRESS/index.json`` names the parts, "train" and perhaps "val", and for each a file in COCO's
form, compressed; its images have ``at``, the part of that name between ADDRESS and NAME.
"""

import functools
import gzip
import hashlib
import io
import json
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_bytes

from .shard_cache import cache_folder, cache_limit, download, fetch, is_address

logger = logging.getLogger(__name__)

PREFIX = "shards://"
INDEX = "index.json"
FORMAT = "qbheat_det shards, 1"
_AT = re.compile(r"([\w.-]+\.tar)#(\d+)-(\d+)-(\d+)-([0-9a-f]{8})")
_KINDS = ("boxes", "classes", "images")


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path, or an address without a slash at its end."""
    return str(path).rstrip("/") if is_address(path) else os.path.abspath(path)


def are_shards(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is an address, or a folder that ``qbheat shards`` made."""
    if is_address(path):
        return True
    try:
        with open(Path(path) / INDEX, encoding="utf-8") as file:
            return FORMAT in file.read(200)
    except (OSError, ValueError):
        return False


def read_index(address: str) -> dict[str, Any]:
    """Returns the index of shards: "kind" ("boxes", "classes" or "images"), and "parts" by name.

    Args:
        address: as ``absolute`` returns it.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    path = f"{address}/{INDEX}"
    try:
        index = json.loads(_read(path))
        parts = index["parts"]
        names = [part["file"] for part in parts.values()] + [
            part["sha256"] for part in parts.values()
        ]
        is_index = index["format"] == FORMAT and index["kind"] in _KINDS and "train" in parts
        if is_index and all(re.fullmatch(r"[\w.-]+", name) for name in names):
            return dict(index)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"'{path}' is no index of shards: pack them again with qbheat shards")


@functools.lru_cache(maxsize=2)
def read_part(address: str, part: str) -> dict[str, Any]:
    """Returns a part of the index: lists of "images" and, by its kind, "annotations" and
    "categories" of COCO, or "classes", the names that the images' "label" counts.

    Raises:
        UserError: it cannot be read, does not fit its index, or names shards that are not there.
    """
    entry = read_index(address)["parts"].get(part)
    if entry is None:
        raise UserError(f"the shards at '{address}' have no part '{part}'")
    path = f"{address}/{entry['file']}"
    packed = _read(path)
    if hashlib.sha256(packed).hexdigest() != entry["sha256"]:
        raise UserError(f"'{path}' does not fit '{address}/{INDEX}': one of them was changed")
    content: dict[str, Any] = json.loads(gzip.decompress(packed))
    if is_address(address):
        limit = format_bytes(cache_limit())
        logger.info(f"Copies of '{address}' take at most {limit} in '{cache_folder()}'")
    sizes = {}
    for image in content["images"]:
        found = _AT.fullmatch(str(image.get("at")))
        if not found:
            raise UserError(f"'{path}' is broken: {image.get('at')!r} is no place in a shard")
        sizes[found[1]] = int(found[2])
    for name, size in {} if is_address(address) else sizes.items():
        _check_size(os.path.join(address, name), size)
    return content


def _check_size(path: str, num_bytes: int) -> None:
    """Checks that a local shard is there and whole."""
    found = os.path.getsize(path) if os.path.isfile(path) else None
    if found != num_bytes:
        state = "does not exist" if found is None else f"has {found:,} bytes"
        raise UserError(
            f"the shard '{path}' {state}, but its index says {num_bytes:,} bytes: it is missing, "
            "truncated, or was changed after it was packed"
        )


def _read(path: str) -> bytes:
    if not is_address(path):
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error.strerror or error}") from error
    with tempfile.NamedTemporaryFile(prefix="qbheat_index_") as file:
        download(path, Path(file.name))
        return Path(file.name).read_bytes()


def locate_image(image: dict[str, Any]) -> str:
    """Returns the ``file_name`` of an image of ``read_part``, relative to PREFIX and address."""
    return f"{image['at']}/{image['file_name']}"


def list_shard_images(address: str) -> list[tuple[str, str]]:
    """Returns name and ``file_name`` of all images, in the order in which they lie in the shards.

    Args:
        address: as ``absolute`` returns it.

    Raises:
        UserError: see ``read_part``.
    """
    found = []
    for part in read_index(address)["parts"]:
        for image in read_part(address, part)["images"]:
            place = f"{PREFIX}{address}/{locate_image(image)}"
            shard, _, offset, *_ = parse_name(place)
            found.append((shard, offset, image["file_name"], place))
    return [(name, place) for _, _, name, place in sorted(found)]


def has_boxes(source: Mapping[str, Any]) -> bool:
    """Returns whether a source of shards is to be read with its boxes."""
    return source["labelled"] and "categories" in read_part(source["shards"], source["subset"])


def register_shards(
    name: str, source: Mapping[str, Any], keep: Collection[str] | None = None
) -> None:
    """Registers the images of shards, with the labels of their classes or without any.

    Args:
        name: of the new data set.
        source: "shards", the address, "subset", the part, and whether it is "labelled".
        keep: names of images as they were before they were packed; None keeps all.

    Raises:
        UserError: see ``read_part``.
    """
    address, labelled = source["shards"], source["labelled"]
    part = read_part(address, source["subset"])
    keys = ("width", "height", *(("label",) if labelled else ()))
    records = [
        {
            "file_name": f"{PREFIX}{address}/{locate_image(image)}",
            "image_id": image["id"],
            **{key: image[key] for key in keys},
        }
        for image in sorted(part["images"], key=lambda image: int(image["id"]))
        if keep is None or image["file_name"] in keep
    ]
    DatasetCatalog.register(name, lambda: records)
    metadata = MetadataCatalog.get(name)
    metadata.set(labelled=labelled, unlabelled=True, evaluator_type="reconstruction")
    if labelled:
        metadata.folder_classes = part["classes"]


def is_in_shard(file_name: str) -> bool:
    """Returns whether an image lies in a shard."""
    return file_name.startswith(PREFIX)


def parse_name(file_name: str) -> tuple[str, int, int, int, int]:
    """Returns the shard of an image, its bytes, and the image's offset, size and CRC-32.

    Raises:
        FileNotFoundError: it is no name of an image in a shard.
    """
    address, _, rest = file_name.removeprefix(PREFIX).partition(".tar#")
    place = rest.split("/", 1)[0].split("-")
    if len(place) != 4:
        raise FileNotFoundError(file_name)
    return f"{address}.tar", int(place[0]), int(place[1]), int(place[2]), int(place[3], 16)


def read_image_bytes(file_name: str) -> bytes:
    """Returns an image file out of its shard, downloaded if need be.

    Raises:
        UserError: the shard cannot be had, or does not hold these bytes.
    """
    shard, num_bytes, offset, size, checksum = parse_name(file_name)
    for is_last in (False, True):
        path = fetch(shard, num_bytes) if is_address(shard) else Path(shard)
        try:
            with open(path, "rb") as file:
                content = os.pread(file.fileno(), size, offset)
            os.utime(path) if is_address(shard) else None
        except FileNotFoundError:  # another process needed the room
            continue
        if zlib.crc32(content) == checksum:
            return content
        if is_address(shard) and not is_last:  # of an earlier packing
            path.unlink(missing_ok=True)
    raise UserError(
        f"the shard '{shard}' does not hold what its index says at byte {offset:,}: it is "
        "missing, truncated, or was changed after it was packed"
    )


class ShardImages(PathHandler):
    """Lets Detectron2's path manager open images in shards, so that any mapper reads them."""

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> BinaryIO:
        return io.BytesIO(read_image_bytes(path))

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return True

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return True


PathManager.register_handler(ShardImages(), allow_override=True)
