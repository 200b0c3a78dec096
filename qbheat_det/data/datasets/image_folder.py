# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Folders of images as data sets: nested or flat, with class folders or without any labels.

A folder is listed when its set is first loaded, in the order of the names. Sets that lack a class
number the others differently: labels of several sets are brought to one numbering by name.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
"""Endings of the files that count as images, in small letters."""
_ENDINGS = tuple(sorted(IMAGE_SUFFIXES))

PathLike = str | os.PathLike[str]
Records = list[dict[str, Any]]
Labelled = tuple[Records, Sequence[str]]
"""Records with "label", and the names of the classes."""

_SHOWN = 5  # classes that a message names


def register_image_folders(
    name: str, folders: Sequence[PathLike], *, labelled: bool = False
) -> None:
    """Registers the images of folders as one data set; they are listed when it is first loaded.

    A record holds ``file_name``, ``image_id`` (its number) and, with ``labelled``, ``label``: the
    contiguous index of its class folder; ``folder_classes`` of the metadata then lists these once
    the set is loaded. Registering a name again with the same folders does nothing.

    Raises:
        UserError: the name is taken by other data.
    """
    paths = tuple(os.path.abspath(folder) for folder in folders)
    if name in DatasetCatalog:
        known = MetadataCatalog.get(name).get("image_folders")
        if known != paths:
            raise UserError(
                f"the data set name '{name}' is already registered with {list(known or ())}; "
                f"choose another name for {list(paths)}"
            )
        return

    def load() -> list[dict[str, Any]]:
        records, class_names = load_image_folders(paths, labelled=labelled)
        if labelled:
            MetadataCatalog.get(name).set(folder_classes=class_names)
        shown = ", ".join(os.fsencode(path).decode(errors="backslashreplace") for path in paths)
        logger.info(f"{len(records):,} images in {shown}")
        return records

    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(
        image_folders=paths,
        labelled=labelled,
        unlabelled=True,
        evaluator_type="reconstruction",
    )


def load_image_folders(
    folders: Sequence[PathLike], *, labelled: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the records of folders, one folder after another, and the names of their classes.

    Args:
        folders: to be searched with all that is below them.
        labelled: whether the folders right below these are classes. Folders of one name in
            several of them are one class; classes are in the order of their names.

    Raises:
        UserError: a folder does not exist or holds no image, or an image lies in no class folder.
    """
    pairs = [
        (path, _class_of(path, root) if labelled else "")
        for root in (os.fspath(folder) for folder in folders)
        for path in list_images(root)
    ]
    if not labelled:
        return [{"file_name": path, "image_id": i} for i, (path, _) in enumerate(pairs)], []
    class_names = sorted({class_name for _, class_name in pairs})
    labels = {class_name: index for index, class_name in enumerate(class_names)}
    records: list[dict[str, Any]] = [
        {"file_name": path, "image_id": i, "label": labels[class_name]}
        for i, (path, class_name) in enumerate(pairs)
    ]
    return records, class_names


def list_images(folder: PathLike) -> list[str]:
    """Returns the paths of all images in a folder and below it: the files of a folder before those
    of the folders in it, both by name.

    An image is a file whose name ends as in ``IMAGE_SUFFIXES``, in large or small letters. Hidden
    names, which begin with a dot, are left out. Links are followed, but not in circles.

    Raises:
        UserError: the folder does not exist, cannot be read, or holds no image.
    """
    images = [path for images, _ in _walk(_existing(folder)) for path in images]
    if not images:
        check_image_folder(folder)
    return images


def check_image_folder(folder: PathLike) -> None:
    """Searches for one image in a folder, which takes no time if there are any.

    Raises:
        UserError: as ``list_images``.
    """
    others: Counter[str] = Counter()
    for images, names in _walk(_existing(folder)):
        if images:
            return
        others.update(os.path.splitext(name)[1].lower() or "no ending" for name in names)
    kinds = [f"{count:,} with {kind}" for kind, count in others.most_common()]
    found = join_first(kinds) if kinds else "no visible file"
    raise UserError(
        f"the folder '{os.fspath(folder)}' holds no image ({' '.join(_ENDINGS)}), but {found}"
    )


def _existing(folder: PathLike) -> str:
    path = os.fspath(folder)
    if not os.path.isdir(path):
        state = "is a file" if os.path.exists(path) else "does not exist"
        raise UserError(f"the image folder '{path}' {state}")
    return path


def _walk(root: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yields, for each folder, the paths of its images and the names of its other files."""
    waiting: list[tuple[str, tuple[str, ...]]] = [(root, (os.path.realpath(root),))]
    while waiting:
        folder, chain = waiting.pop()  # and, of the links followed on the way, where they lead
        images, others, below = [], [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name
                    if name.startswith("."):
                        continue
                    # The listing itself has the type, but not that of a link's target.
                    linked = entry.is_symlink()
                    if name.lower().endswith(_ENDINGS) and (linked or entry.is_file()):
                        images.append(name)
                    elif entry.is_dir():
                        below.append((name, linked))
                    else:
                        others.append(name)
        except OSError as error:
            raise UserError(f"the folder '{folder}' cannot be read: {error.strerror}") from error
        images.sort()
        yield [os.path.join(folder, name) for name in images], others
        for name, linked in sorted(below, reverse=True):
            path = os.path.join(folder, name)
            target = os.path.realpath(path) if linked else ""
            if not linked:
                waiting.append((path, chain))
            elif not any(_is_below(seen, target) for seen in (*chain, os.path.realpath(folder))):
                waiting.append((path, (*chain, target)))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _class_of(path: str, root: str) -> str:
    class_name, separator, _ = path[len(root) :].lstrip(os.sep).partition(os.sep)
    if not separator:
        raise UserError(f"image '{path}' lies in no class folder of '{root}'")
    return class_name


def list_classes(sets: Sequence[str]) -> list[str]:
    """Returns the sorted names of all classes that registered sets have images of.

    Raises:
        UserError: a set has no labels, or cannot be listed.
    """
    return sorted({class_name for _, class_name in _pair(map(_load, sets))})


def load_classes(sets: Sequence[str], class_names: Sequence[str]) -> Records:
    """Returns the records of registered sets, one after another, with "label" as in a list.

    Args:
        sets: names of sets; "image_id" is the number of an image among all of them.
        class_names: of label 0, 1, 2, …

    Raises:
        UserError: a set has no labels, or images of a class that is not in the list.
    """
    return _label(_pair(map(_load, sets)), class_names, " and ".join(sets))


def load_labelled_sets(train: Sequence[str], val: Sequence[str]) -> tuple[Records, Records]:
    """Loads sets by name, those of each side one after another, and unites their labels.

    Raises:
        UserError: a set has no labels, or ``unite_labels`` raises.
    """
    names = " and ".join(train), " and ".join(val)
    return unite_labels([*map(_load, train)], [*map(_load, val)], names=names)


def unite_labels(
    train: Sequence[Labelled], val: Sequence[Labelled], *, names: tuple[str, str]
) -> tuple[Records, Records]:
    """Returns records with "file_name", "image_id" and "label", by the names of the classes.

    Args:
        train: sets to learn from.
        val: sets to classify.
        names: of both, for the message.

    Raises:
        UserError: ``val`` has a class that ``train`` does not have, or there is one class.
    """
    known = _pair(train)
    class_names = sorted({class_name for _, class_name in known})
    if len(class_names) < 2:
        raise UserError(
            f"'{names[0]}' holds images of one class alone, '{class_names[0]}': the folders right "
            "below it are the classes"
        )
    return _label(known, class_names, names[0]), _label(_pair(val), class_names, names[1])


def _label(pairs: Sequence[tuple[str, str]], class_names: Sequence[str], name: str) -> Records:
    labels = {class_name: label for label, class_name in enumerate(class_names)}
    if unknown := sorted({class_name for _, class_name in pairs} - labels.keys()):
        raise UserError(
            f"'{name}' has images of {join_first(unknown, _SHOWN)}, which are none of the "
            f"{len(labels)} classes {join_first(class_names, _SHOWN)}"
        )
    return [
        {"file_name": path, "image_id": i, "label": labels[class_name]}
        for i, (path, class_name) in enumerate(pairs)
    ]


def _load(name: str) -> Labelled:
    records = DatasetCatalog.get(name)
    class_names = MetadataCatalog.get(name).get("folder_classes")
    if not class_names or any("label" not in record for record in records):
        raise UserError(
            f"the images of dataset '{name}' have no labels: name a set of class folders, such as "
            "imagenet_train, or give class folders by --train-folder and --val-folder, for nearest "
            "neighbours --knn-train-folder and --knn-val-folder"
        )
    return records, class_names


def _pair(sets: Iterable[Labelled]) -> list[tuple[str, str]]:
    return [
        (record["file_name"], class_names[record["label"]])
        for records, class_names in sets
        for record in records
    ]
