# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Packs image files into shards, see ``shards``, without encoding them again."""

import gzip
import hashlib
import io
import json
import operator
import os
import random
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import remove_leftovers, write_atomically

from .checks import DataError
from .datasets.formats import DataSource, Source, with_classes
from .datasets.image_folder import load_image_folders
from .datasets.sources import read_annotations
from .images import find_image_error, open_image
from .shards import FORMAT, INDEX

_HEADER = 512  # bytes of tar before a file with a short name
_READABLE = "image of more than 8 bits"  # an error with boxes; other mappers scale such pixels


def pack_source(
    data: DataSource, folder: str | os.PathLike[str], *, shard_bytes: float = 64e6
) -> list[DataError]:
    """Packs a data set. The index is written last, so an interrupted packing is never used.

    Training images are shuffled, so that a few shards are a fair sample. Evaluation images keep
    their order.

    Args:
        data: the sources to pack.
        folder: for the shards and their index.
        shard_bytes: approximate size of a shard.

    Returns:
        The errors of the images that were left out.

    Raises:
        UserError: the data are invalid, or the folder has shards already or is not writable.
    """
    root = Path(folder)
    if (root / INDEX).exists():
        raise UserError(f"'{root}' already has an {INDEX}: remove it, or choose another folder")
    remove_leftovers(root)
    kind = "boxes" if data.kind in ("coco", "yolo", "voc", "labels") else data.kind
    errors: list[DataError] = []
    parts: dict[str, Any] = {}
    classes: list[str] = []
    for part, source in (("train", data.train), ("val", data.val)):
        if source is None:
            continue
        source = with_classes(source, classes)
        images, lists = _list_images(source, kind)
        classes = [one["name"] for one in lists.get("categories", ())]
        packed = _pack(images, root, part, shard_bytes, errors, annotated=kind == "boxes")
        if not packed:
            raise UserError(f"no image can be packed: {errors[0].message}")
        if kind == "boxes":
            ids = {image["id"] for image in packed}
            lists["annotations"] = [one for one in lists["annotations"] if one["image_id"] in ids]
        content = gzip.compress(json.dumps({**lists, "images": packed}).encode(), mtime=0)
        write_atomically(root / f"{part}.json.gz", operator.methodcaller("write", content))
        digest = hashlib.sha256(content).hexdigest()
        parts[part] = {"file": f"{part}.json.gz", "sha256": digest, "images": len(packed)}
    index = json.dumps({"format": FORMAT, "kind": kind, "parts": parts}, indent=1)
    write_atomically(root / INDEX, lambda file: file.write(index.encode()))
    return errors


def _list_images(source: Source, kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the images with "path" and "about", their metadata in a shard; and other lists."""
    if kind != "boxes":
        folders = source["image_folders"]
        records, classes = load_image_folders(folders, labelled=kind == "classes")
        base = folders[0] if len(folders) == 1 else os.path.commonpath(folders)
        images = []
        for record in records:
            path = record["file_name"]
            about: dict[str, Any] = {}
            if kind == "classes":
                about = {"label": record["label"], "class": classes[record["label"]]}
            name = os.path.relpath(path, base)
            image = {"id": record["image_id"], "file_name": name, **about}
            images.append({**image, "path": path, "about": about})
        return images, {"classes": classes} if kind == "classes" else {}
    file = read_annotations(source)
    file.check()
    lists = file.keep()
    names = dict(zip(file.category_ids, file.class_names, strict=True))
    boxes: dict[int, list[dict[str, Any]]] = {}
    for one in lists["annotations"]:
        box = {"bbox": one["bbox"], "class": names[one["category_id"]]}
        boxes.setdefault(one["image_id"], []).append(box)
    images = [
        {
            **image,
            "path": os.path.join(file.image_root, image["file_name"]),
            "about": {"boxes": boxes.get(image["id"], [])},
        }
        for image in lists.pop("images")
    ]
    return images, lists


def _pack(
    images: Sequence[dict[str, Any]],
    root: Path,
    part: str,
    shard_bytes: float,
    errors: list[DataError],
    *,
    annotated: bool,
) -> list[dict[str, Any]]:
    """Writes the shards of a part; returns its images with "at", and adds to the errors."""
    order = list(range(len(images)))
    if part == "train":
        random.Random("shards").shuffle(order)
    packed: dict[int, dict[str, Any]] = {}
    shard = _Shard(root)
    for number in tqdm(order, desc=f"Packing {part}", unit="image"):
        image = dict(images[number])
        path, about = image.pop("path"), image.pop("about")
        content = _read(path, image, errors, annotated=annotated)
        if content is not None:
            shard.add(number, image, content, about)
            packed[number] = image
        if shard.size >= shard_bytes:
            shard.close(part)
    shard.close(part)
    return [packed[number] for number in sorted(packed)]


def _read(
    path: str, image: dict[str, Any], errors: list[DataError], *, annotated: bool
) -> bytes | None:
    """Returns an image file's bytes and sets the image's size; adds an error if it is broken."""
    sizes: dict[str, Any] = {key: image[key] for key in ("width", "height") if key in image}
    error = find_image_error({"file_name": path, "image_id": image["id"], **sizes})
    if error is None or (error.kind == _READABLE and not annotated):
        try:
            with open_image(path) as opened:
                image.update(width=opened.width, height=opened.height)
            return Path(path).read_bytes()
        except Exception as reason:  # what a broken file raises depends on its format's decoder
            error = DataError("unreadable image", f"image {path!r}", str(reason))
    errors.append(error)
    return None


class _Shard:
    """Fills one shard after another in memory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._counts: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._buffer, mode="w", format=tarfile.USTAR_FORMAT)
        self._images: list[tuple[dict[str, Any], str]] = []

    @property
    def size(self) -> int:
        return self._buffer.tell()

    def add(self, number: int, image: dict[str, Any], content: bytes, about: Any) -> None:
        """Appends an image and its metadata, as in WebDataset."""
        key, suffix = f"{number:09d}", os.path.splitext(image["file_name"])[1].lower()
        place = f"{self._buffer.tell() + _HEADER}-{len(content)}-{zlib.crc32(content):08x}"
        self._images.append((image, place))
        known = {name: image[name] for name in ("file_name", "width", "height")}
        for name, data in (
            (f"{key}{suffix or '.jpg'}", content),
            (f"{key}.json", json.dumps({**known, **about}).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))

    def close(self, part: str) -> None:
        """Writes the shard, if it has images, and sets their "at"."""
        if not self._images:
            return
        self._tar.close()
        content, number = self._buffer.getvalue(), self._counts.get(part, 0)
        self._counts[part] = number + 1
        name = f"{part}-{number:06d}.tar"
        write_atomically(self._root / name, lambda file: file.write(content))
        for image, place in self._images:
            image["at"] = f"{name}#{len(content)}-{place}"
        self._clear()
