# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Packs image files into shards (see ``shards``) without re-encoding them."""

import gzip
import hashlib
import io
import json
import os
import random
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import remove_leftovers, write_atomically
from qbheat_det.core.text import one_line

from .checks import DataError
from .datasets.formats import DataSource, Source, with_classes
from .datasets.image_folder import list_source
from .datasets.sources import read_annotations
from .images import find_image_error, open_image
from .shards import FORMAT, INDEX

_BLOCK = 512  # bytes of a tar header
_READABLE = "image of more than 8 bits"  # an error only with boxes; other mappers scale the pixels


def pack_source(
    data: DataSource, folder: str | os.PathLike[str], *, shard_bytes: float = 64e6
) -> list[DataError]:
    """Packs a data set into shards.

    Training images are shuffled, so that any few shards are a random sample. Validation images keep
    their order. The index is written last, so incomplete shards are never used.

    Args:
        data: the sources to pack.
        folder: output folder of the shards and their index.
        shard_bytes: approximate size of a shard.

    Returns:
        The errors of the images that were left out.

    Raises:
        UserError: the data are invalid, or the folder already has shards or is not writable.
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
        write_atomically(root / f"{part}.json.gz", content)
        digest = hashlib.sha256(content).hexdigest()
        parts[part] = {"file": f"{part}.json.gz", "sha256": digest, "images": len(packed)}
    index = json.dumps({"format": FORMAT, "kind": kind, "parts": parts}, indent=1)
    write_atomically(root / INDEX, index.encode())
    return errors


def _list_images(source: Source, kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the images of a source, and the other lists of its part in the index.

    Each image has "path", and "about", which is its metadata in the shard.
    """
    if kind != "boxes":
        names, records, classes = list_source(source)
        images = []
        for name, record in zip(names, records, strict=True):
            path, label = record["file_name"], record.get("label")
            about = {} if label is None else {"label": label, "class": classes[label]}
            image = {"id": record["image_id"], "file_name": name, **about}
            images.append({**image, "path": path, "about": about})
        return images, {"classes": classes} if kind == "classes" else {}
    file = read_annotations(source)
    file.check()
    lists = file.keep()
    classes_by_id = dict(zip(file.category_ids, file.class_names, strict=True))
    images = [
        {**image, "path": os.path.join(file.image_root, image["file_name"]), "about": {"boxes": []}}
        for image in lists.pop("images")
    ]
    by_id = {image["id"]: image["about"]["boxes"] for image in images}
    for one in lists["annotations"]:
        by_id[one["image_id"]].append(
            {"bbox": one["bbox"], "class": classes_by_id[one["category_id"]]}
        )
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
    """Writes the shards of a part, and returns its images with "at". Appends to ``errors``."""
    order = list(range(len(images)))
    if part == "train":
        random.Random("shards").shuffle(order)
    packed: dict[int, dict[str, Any]] = {}
    shard: list[tuple[int, bytes]] = []
    num_shards = num_bytes = 0
    for place, number in enumerate(tqdm(order, desc=f"Packing {part}", unit="image")):
        image = dict(images[number])
        content = _read(image, annotated=annotated)
        if isinstance(content, DataError):
            errors.append(content)
        else:
            packed[number] = image
            shard.append((number, content))
            num_bytes += len(content) + 3 * _BLOCK  # two headers and a block of metadata
        if shard and (num_bytes >= shard_bytes or place == len(order) - 1):
            _write_shard(root / f"{part}-{num_shards:06d}.tar", shard, packed)
            num_shards, num_bytes, shard = num_shards + 1, 0, []
    return [packed[number] for number in sorted(packed)]


def _read(image: dict[str, Any], *, annotated: bool) -> bytes | DataError:
    """Returns the bytes of an image file and sets the image's size, or returns an error."""
    path = image["path"]
    error = find_image_error({**image, "file_name": path, "image_id": image["id"]})
    if error and (annotated or error.kind != _READABLE):
        return error
    try:
        with open_image(path) as opened:
            image.update(width=opened.width, height=opened.height)
        return Path(path).read_bytes()
    except Exception as reason:  # the type depends on the format's decoder
        return DataError("unreadable image", f"image {path!r}", one_line(reason))


def _write_shard(
    path: Path, contents: Sequence[tuple[int, bytes]], images: Mapping[int, dict[str, Any]]
) -> None:
    """Writes images and their metadata in WebDataset's format, and sets "at" of each image."""
    buffer, places = io.BytesIO(), {}
    with tarfile.TarFile(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, content in contents:
            image = images[number]
            places[number] = f"{buffer.tell() + _BLOCK}-{len(content)}-{zlib.crc32(content):08x}"
            known = {name: image[name] for name in ("file_name", "width", "height")}
            suffix = os.path.splitext(image["file_name"])[1].lower() or ".jpg"
            about = json.dumps({**known, **image.pop("about")}).encode()
            for ending, data in ((suffix, content), (".json", about)):
                info = tarfile.TarInfo(f"{number:09d}{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    whole = buffer.getvalue()
    write_atomically(path, whole)
    for number, place in places.items():
        images[number].pop("path")
        images[number]["at"] = f"{path.name}#{len(whole)}-{place}"
