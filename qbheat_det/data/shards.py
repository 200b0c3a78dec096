# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads images from shards, which are WebDataset tar files with an index of image locations.

With the index, images can be read in any order from a folder, a web server or a bucket. Therefore,
the order of training images depends only on the seed. The ``file_name`` of a record contains the
location of the image, so that workers do not need the index::

    shards://ADDRESS/train-000003.tar#BYTES-OFFSET-SIZE-CRC/NAME

``ADDRESS/index.json`` lists the parts ("train" and optionally "val"). Each part has a compressed
file in COCO's format. The key ``at`` of its images is the text between ADDRESS/ and /NAME.
"""

import functools
import gzip
import hashlib
import io
import itertools
import json
import logging
import os
import queue
import re
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_bytes

from .shard_cache import cache_folder, cache_limit, download, fetch, is_address

logger = logging.getLogger(__name__)

PREFIX = "shards://"
INDEX = "index.json"
FORMAT = "qbheat_det shards, 1"
_AT = r"([\w.-]+\.tar)#(\d+)-(\d+)-(\d+)-([0-9a-f]{8})"
_NAME = re.compile(f"{PREFIX}(.+?)/{_AT}/", re.DOTALL)
_AHEAD = 2  # number of shards that are downloaded ahead
_KINDS = ("boxes", "classes", "images")


class Place(NamedTuple):
    """The location of an image: shard, size of the shard, and the image's offset, size and CRC."""

    shard: str
    num_bytes: int
    offset: int
    size: int
    checksum: int


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path, or a URL without a trailing slash."""
    return str(path).rstrip("/") if is_address(path) else os.path.abspath(path)


def are_shards(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, or a folder written by ``qbheat shards``."""
    if is_address(path):
        return True
    try:
        with open(Path(path) / INDEX, encoding="utf-8") as file:
            return FORMAT in file.read(200)
    except (OSError, ValueError):
        return False


def read_index(address: str) -> dict[str, Any]:
    """Returns the index of shards, with "kind" ("boxes", "classes" or "images") and "parts".

    ``address`` is a result of ``absolute``. Raises a ``UserError`` if the index cannot be read.
    """
    path = f"{address}/{INDEX}"
    try:
        index = json.loads(_read(path))
        parts = index["parts"]
        names = [part[key] for part in parts.values() for key in ("file", "sha256")]
        is_index = index["format"] == FORMAT and index["kind"] in _KINDS and "train" in parts
        if is_index and all(re.fullmatch(r"[\w.-]+", name) for name in names):
            return dict(index)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"'{path}' is not an index of shards: pack them again with qbheat shards")


@functools.lru_cache(maxsize=2)
def read_part(address: str, part: str) -> dict[str, Any]:
    """Returns the lists of a part of the shards.

    The lists are COCO's "images", "annotations" and "categories"; or "images" with "label", and
    "classes" with the class names. Raises a ``UserError`` if the part cannot be read or does not
    match its index, or shards are missing.
    """
    entry = read_index(address)["parts"].get(part)
    if entry is None:
        raise UserError(f"the shards at '{address}' have no part '{part}'")
    path = f"{address}/{entry['file']}"
    packed = _read(path)
    if hashlib.sha256(packed).hexdigest() != entry["sha256"]:
        raise UserError(f"'{path}' does not match '{address}/{INDEX}': one of them was changed")
    content: dict[str, Any] = json.loads(gzip.decompress(packed))
    sizes = {}
    for image in content["images"]:
        place = re.fullmatch(_AT, str(image.get("at")))
        if not place:
            raise UserError(f"'{path}' is broken: {image.get('at')!r} is not a location in a shard")
        sizes[place[1]] = int(place[2])
    if is_address(address):
        limit = format_bytes(cache_limit())
        logger.info(f"Copies of '{address}' take at most {limit} in '{cache_folder()}'")
        return content
    for name, num_bytes in sizes.items():
        shard = Path(address, name)
        found = shard.stat().st_size if shard.is_file() else 0
        if found != num_bytes:
            raise UserError(
                f"the shard '{shard}' has {found:,} bytes, but its index says {num_bytes:,} bytes: "
                "it is missing, truncated, or was changed after it was packed"
            )
    return content


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
    """Returns the ``file_name`` of an image of ``read_part``, without the prefix and address."""
    return f"{image['at']}/{image['file_name']}"


def has_boxes(source: Mapping[str, Any]) -> bool:
    """Returns whether a source of shards has boxes to train on."""
    return source["labelled"] and "categories" in read_part(source["shards"], source["subset"])


def is_in_shard(file_name: str) -> bool:
    """Returns whether an image is in a shard."""
    return file_name.startswith(PREFIX)


def parse_name(file_name: str) -> Place:
    """Parses the location of an image in a shard. Raises ``FileNotFoundError`` for other names."""
    found = _NAME.match(file_name)
    if not found:
        raise FileNotFoundError(file_name)
    address, name, num_bytes, offset, size, checksum = found.groups()
    return Place(f"{address}/{name}", int(num_bytes), int(offset), int(size), int(checksum, 16))


def read_image_bytes(file_name: str) -> bytes:
    """Returns the bytes of an image file, and downloads its shard if needed.

    Raises a ``UserError`` if the shard is not available or the checksum does not match.
    """
    place = parse_name(file_name)
    is_remote = is_address(place.shard)
    for is_last in (False, True):
        path = fetch(place.shard, place.num_bytes) if is_remote else Path(place.shard)
        try:
            with open(path, "rb") as file:
                content = os.pread(file.fileno(), place.size, place.offset)
            os.utime(path) if is_remote else None
        except FileNotFoundError:  # another process removed the copy
            continue
        if zlib.crc32(content) == place.checksum:
            return content
        if is_remote and not is_last:  # the copy may be outdated
            path.unlink(missing_ok=True)
    raise UserError(
        f"the shard '{place.shard}' does not match its index at byte {place.offset:,}: it is "
        "missing, truncated, or was changed after it was packed"
    )


def shuffle_shards(shards: Sequence[int], *, window: int, seed: int) -> Iterator[int]:
    """Yields image indices of infinite shuffled epochs, in which few shards are in use at a time.

    Each epoch shuffles the shards, and then delays each image by a random number of shards between
    0 and ``window``. The order depends only on the seed. ``shards`` (N,) has the shard number of
    each image.
    """
    numbers = np.asarray(shards)
    for epoch in itertools.count():
        generator = np.random.default_rng((seed, epoch))
        place = generator.permutation(int(numbers.max()) + 1)[numbers]
        delay = window * generator.random(len(numbers))
        yield from np.argsort(place + delay, kind="stable").tolist()


def plan_shards(file_names: Sequence[str], window: int) -> tuple[list[int], int]:
    """Returns the shard number of each image (N,), and ``images_ahead`` for ``fetch_ahead``.

    ``window`` is the number of shards whose images are mixed, where 0 means all. If the images of
    all shards are mixed, the list of shard numbers is empty. If not all images are in remote
    shards, ``images_ahead`` is 0.

    Raises:
        UserError: the cache is smaller than the remote shards in use at a time, so shards would be
            downloaded repeatedly.
    """
    places = [parse_name(name) for name in file_names if is_in_shard(name)]
    sizes = {place.shard: place.num_bytes for place in places}
    remote = sorted(size for shard, size in sizes.items() if is_address(shard))
    if len(places) < len(file_names) or window >= len(sizes):
        window = 0
    needed = sum(remote[-(window + _AHEAD) :] if window else remote)
    if needed > cache_limit():
        raise UserError(
            f"the shards in use at once take {format_bytes(needed)}, but DATALOADER.CACHE_GB "
            f"allows {format_bytes(cache_limit())}: raise it, or lower DATALOADER.SHUFFLE_SHARDS "
            f"({window or 'all'})"
        )
    numbers = {shard: number for number, shard in enumerate(sizes)}
    shards = [numbers[place.shard] for place in places] if window else []
    all_remote = remote and len(remote) == len(sizes) and len(places) == len(file_names)
    return shards, _AHEAD * len(places) // len(sizes) if all_remote else 0


def fetch_ahead(
    shares: Iterable[list[tuple[int, int]]],
    records: Sequence[dict[str, Any]],
    *,
    images_ahead: int,
) -> Iterator[list[tuple[int, int]]]:
    """Yields batches of (position, index) while a thread downloads the shards of later batches.

    ``records`` are the images, which must all be in remote shards. ``images_ahead`` is the number
    of images between the download of a shard and its use.
    """
    wanted: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
    threading.Thread(target=_fetch_all, args=(wanted,), daemon=True).start()
    waiting: list[list[tuple[int, int]]] = []
    try:
        for share in shares:
            for _, index in share:
                place = parse_name(records[index]["file_name"])
                wanted.put((place.shard, place.num_bytes))
            waiting.append(share)
            while sum(map(len, waiting)) > images_ahead:
                yield waiting.pop(0)
    finally:
        wanted.put(None)


def _fetch_all(wanted: "queue.SimpleQueue[tuple[str, int] | None]") -> None:
    while (one := wanted.get()) is not None:
        try:
            fetch(*one)
        except UserError:  # reading the image will raise it again
            return


class ShardImages(PathHandler):
    """Makes Detectron2's path manager open images in shards, so that any mapper can read them."""

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> BinaryIO:
        return io.BytesIO(read_image_bytes(path))

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return True

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return True


PathManager.register_handler(ShardImages(), allow_override=True)
