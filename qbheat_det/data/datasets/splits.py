# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Holds out images for validation, and remembers which images a run has trained on.

``split.json`` lists the names of the training images and of the validation images of a run.
``seen_images.json`` lists the fingerprints of both. If a later run starts from the weights of this
run, it uses the fingerprints to never validate on an image that the weights were trained on. They
identify images that were moved or renamed.
"""

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

from .annotations import Annotations
from .fingerprints import fingerprint_images
from .image_folder import load_image_folders
from .source import Source

SPLIT_FILE = "split.json"
_SEED = 0  # of held-out images
SEEN_FILE = "seen_images.json"


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
        """Adds the fingerprints of another run. An image in both is a training image."""
        seen = self.train | frozenset(train)
        return SeenImages(seen, (self.val | frozenset(val)) - seen)


def split_source(
    source: Source,
    annotations: Annotations | None = None,
    *,
    fraction: float,
    seen: SeenImages = SeenImages(),
    has_val: bool = False,
) -> dict[str, Any]:
    """Divides the images of a source into training and validation images.

    Images in ``seen`` stay training or validation images. ``choose_val`` divides all others. It
    does not depend on ``SEED``, so that runs with different seeds are comparable.

    Args:
        source: the source.
        annotations: its images and boxes; None for class folders.
        fraction: share of the images to use for validation, in (0, 1).
        seen: images that the initial weights were trained on or evaluated with.
        has_val: whether there are other validation images, so that no image must be held out.

    Returns:
        The content of ``split.json``: "fraction", and the lists "train" and "val" of the names of
        images.

    Raises:
        UserError: there are too few images.
    """
    names, paths, groups = _list_images(source, annotations)
    part_of_image: dict[int, str] = {}  # index of the image -> "train" or "val"
    if seen.train or seen.val:
        fingerprints = fingerprint_images(paths)
        for index, path in enumerate(paths):
            fingerprint = fingerprints.get(path)
            if fingerprint in seen.train:
                part_of_image[index] = "train"
            elif fingerprint in seen.val:
                part_of_image[index] = "val"
    new = [index for index in range(len(names)) if index not in part_of_image]
    held_out = choose_val([groups[index] for index in new], fraction=fraction, seed=_SEED)
    for position, index in enumerate(new):
        part_of_image[index] = "val" if position in held_out else "train"
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for index, name in enumerate(names):
        parts[part_of_image[index]].append(name)
    if not parts["train"] or not (parts["val"] or has_val):
        images = f"{len(names)} images"
        if len(new) < len(names):
            images += f", of which the weights know {len(names) - len(new):,},"
        raise UserError(
            f"a share of {fraction:g} of {images} cannot be held out: pass a validation set with "
            "--val, or disable evaluation with DATASETS.VAL_FRACTION 0"
        )
    return {"fraction": fraction, **parts}


def _list_images(
    source: Source, annotations: Annotations | None
) -> tuple[list[str], list[str], list[Hashable]]:
    """Returns the names, the paths and the groups of the images of a source.

    The images of each group are divided separately. A group is a class: the class of the folder, or
    the rarest class of the boxes.
    """
    if annotations is None:
        records, _ = load_image_folders(source.folders, labelled=source.labelled)
        base = os.path.commonpath(source.folders)
        paths = [record["file_name"] for record in records]
        names = [os.path.relpath(path, base) for path in paths]
        return names, paths, [record.get("label") for record in records]
    names = [image["file_name"] for image in annotations.images]
    paths = [os.path.join(annotations.image_root, name) for name in names]
    groups = group_by_rarest_class(annotations)
    if annotations.sets:  # a share of each data set
        groups = [
            (annotations.sets[name], group) for name, group in zip(names, groups, strict=True)
        ]
    return names, paths, groups


def choose_val(groups: Sequence[Hashable], *, fraction: float, seed: int) -> set[int]:
    """Chooses images for validation at random. Returns their indices in ``groups``.

    The share of each group is ``fraction``, up to a difference of one image. An image that is alone
    in its group is not chosen. Equal arguments give equal images.

    Args:
        groups: the group of each image, such as its class.
        fraction: share of the images to choose, in (0, 1).
        seed: seed of the random choice.
    """
    generator = random.Random(f"{seed} hold out")
    sizes = Counter(groups)
    # Sorted by group, and in random order within each group.
    shuffled = sorted(
        (repr(group), generator.random(), index)
        for index, group in enumerate(groups)
        if sizes[group] > 1
    )
    # Systematic sampling: each image adds ``fraction`` to a sum that starts below 1. An image is
    # chosen if the sum reaches the next integer there. For 1/5, this is every fifth image. The
    # random start is large enough for the last sum to reach 1, so at least one image is chosen.
    start = max(generator.random(), 1 - len(shuffled) * fraction)
    chosen = set()
    for position, (_, _, index) in enumerate(shuffled):
        sum_before = int(position * fraction + start)
        sum_after = int((position + 1) * fraction + start)
        if sum_after > sum_before:
            chosen.add(index)
    return chosen


def group_by_rarest_class(annotations: Annotations) -> list[Hashable]:
    """Returns, for each image, the id of that of its classes which the fewest images have.

    An image without boxes gets None. Crowd boxes do not count. If two classes are equally rare, the
    lower id is returned.
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
