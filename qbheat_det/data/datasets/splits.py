# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Holds out validation images, and remembers which images a run has trained on.

``split.json`` lists the names of the images that a run trains on, and of those that it holds out.
``seen_images.json`` has a fingerprint of each image. A later run that starts from the weights uses
it to keep every image on its side, also if the file has been moved or renamed.
"""

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data.images import run_threads

from .annotations import Annotations
from .image_folder import load_image_folders
from .sources import Source

SPLIT_FILE = "split.json"
SEEN_FILE = "seen_images.json"
# A large file is read in evenly spaced blocks.
_NUM_BLOCKS = 16
_BLOCK_SIZE = 4096  # bytes


@dataclass(frozen=True)
class SeenImages:
    """Fingerprints of the images that weights were trained on, and of their validation images."""

    train: frozenset[str] = frozenset()
    val: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: str | Path) -> "SeenImages":
        """Reads the file in the folder of a run. Returns an empty object if there is none.

        Raises a ``UserError`` if the file is damaged.
        """
        path = Path(folder) / SEEN_FILE
        if not path.is_file():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(frozenset(content["train"]), frozenset(content["val"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f'\'{path}\' does not list images by "train" and "val"') from error

    def write(self, folder: str | Path) -> None:
        """Writes the file in the folder of a run."""
        content = {"train": sorted(self.train), "val": sorted(self.val)}
        write_atomically(Path(folder) / SEEN_FILE, (json.dumps(content) + "\n").encode())

    def extend(self, train: Iterable[str], val: Iterable[str]) -> "SeenImages":
        """Returns the images after another training. Trained images stay on this side."""
        seen = self.train | frozenset(train)
        return SeenImages(seen, (self.val | frozenset(val)) - seen)


def fingerprint_images(paths: Sequence[str]) -> dict[str, str]:
    """Maps paths to fingerprints of the files, without those that cannot be read.

    A fingerprint is a hash of the size and the content. Of large files, only 64 KiB are hashed.
    """
    fingerprints = run_threads(_fingerprint, paths, "Reading fingerprints")
    return {
        path: fingerprint
        for path, fingerprint in zip(paths, fingerprints, strict=True)
        if fingerprint is not None
    }


def _fingerprint(path: str) -> str | None:
    """Returns the fingerprint of a file, or None if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest = hashlib.blake2b(str(size).encode(), digest_size=12)
            if size <= _NUM_BLOCKS * _BLOCK_SIZE:
                digest.update(stream.read())
            else:
                for number in range(_NUM_BLOCKS):
                    stream.seek(number * (size - _BLOCK_SIZE) // (_NUM_BLOCKS - 1))
                    digest.update(stream.read(_BLOCK_SIZE))
    except OSError:
        return None
    return digest.hexdigest()


def split_source(
    source: Source,
    annotations: Annotations | None = None,
    *,
    fraction: float,
    seed: int,
    seen: SeenImages = SeenImages(),
) -> dict[str, Any]:
    """Divides the images of a source, and returns the content of ``split.json``.

    Images that weights have seen stay on their side. All others are divided, see ``choose_val``.

    Args:
        source: the source.
        annotations: its images and boxes; None for class folders.
        fraction: share of the images to hold out, in (0, 1).
        seed: seed of the choice.
        seen: images that the initial weights were trained on or evaluated with.

    Returns:
        The keys "seed", "fraction", "train" and "val". The last two list names of images.

    Raises:
        UserError: there are too few images.
    """
    names, paths, groups = _list_images(source, annotations)
    sides: dict[int, str] = {}
    if seen.train or seen.val:
        fingerprints = fingerprint_images(paths)
        for index, path in enumerate(paths):
            fingerprint = fingerprints.get(path)
            if fingerprint in seen.train:
                sides[index] = "train"
            elif fingerprint in seen.val:
                sides[index] = "val"
    new = [index for index in range(len(names)) if index not in sides]
    held_out = choose_val([groups[index] for index in new], fraction=fraction, seed=seed)
    for place, index in enumerate(new):
        sides[index] = "val" if place in held_out else "train"
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for index, name in enumerate(names):
        parts[sides[index]].append(name)
    if not parts["train"] or not parts["val"]:
        images = f"{len(names)} images"
        if len(new) < len(names):
            images += f", of which the weights know {len(names) - len(new):,},"
        raise UserError(
            f"a share of {fraction:g} of {images} cannot be held out: pass a validation set with "
            "--val, or disable evaluation with DATASETS.VAL_FRACTION 0"
        )
    return {"seed": seed, "fraction": fraction, **parts}


def _list_images(
    source: Source, annotations: Annotations | None
) -> tuple[list[str], list[str], list[Hashable]]:
    """Returns the names, the paths and the groups of the images of a source."""
    if annotations is None:
        records, _ = load_image_folders(source.folders, labelled=source.labelled)
        base = os.path.commonpath(source.folders)
        paths = [record["file_name"] for record in records]
        names = [os.path.relpath(path, base) for path in paths]
        return names, paths, [record.get("label") for record in records]
    names = [image["file_name"] for image in annotations.images]
    paths = [os.path.join(annotations.image_root, name) for name in names]
    return names, paths, group_by_rarest_class(annotations)


def choose_val(groups: Sequence[Hashable], *, fraction: float, seed: int) -> set[int]:
    """Returns the indices of the images to hold out, which depend only on the arguments.

    ``groups`` (N,) has the group of each image. ``fraction``, in (0, 1), of each group is held out,
    up to a difference of one image. An image that is alone in its group is never held out.
    """
    generator = random.Random(f"{seed} hold out")
    sizes = Counter(groups)
    order = sorted(
        (repr(group), generator.random(), index)
        for index, group in enumerate(groups)
        if sizes[group] > 1
    )
    # At least one image is held out, if there are two.
    start = max(generator.random(), 1 - len(order) * fraction)
    # For a fraction of 1/5, this is every fifth image in the order of groups, from a random start.
    held_out = set()
    for place, (_, _, index) in enumerate(order):
        if int((place + 1) * fraction + start) > int(place * fraction + start):
            held_out.add(index)
    return held_out


def group_by_rarest_class(annotations: Annotations) -> list[Hashable]:
    """Returns, for each image, which of its classes occurs in the fewest images.

    An image without boxes gets None. Crowd boxes do not count. Of equally rare classes, the one
    with the lower id is returned.
    """
    classes_of_image: dict[int, set[int]] = {image["id"]: set() for image in annotations.images}
    for entry in annotations.annotations:
        if not entry.get("iscrowd", 0):
            classes_of_image[entry["image_id"]].add(entry["category_id"])
    num_images = Counter(id_ for class_ids in classes_of_image.values() for id_ in class_ids)
    groups: list[Hashable] = []
    for class_ids in classes_of_image.values():
        groups.append(min(class_ids, key=lambda id_: (num_images[id_], id_), default=None))
    return groups


def read_split(path: str | Path) -> dict[str, Any]:
    """Returns the content of a ``split.json``, or raises a ``UserError``."""
    try:
        content: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        parts = [content["train"], content["val"]]
        if all(isinstance(name, str) for part in parts for name in part):
            return dict(content)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f'\'{path}\' does not list the images of a split by "train" and "val"')
