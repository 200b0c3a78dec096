# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Registers image folders, with class labels or without labels.

The files are listed by name when a set is first loaded. Class indices are specific to a set, so
labels of several sets are matched by class name.
"""

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
"""Suffixes of image files, in lower case."""
PART_NAMES = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
"""Usual folder names of the training and the validation part."""
_ENDINGS = tuple(sorted(IMAGE_SUFFIXES))

PathLike = str | os.PathLike[str]
Records = list[dict[str, Any]]
Pairs = list[tuple[str, str]]  # (path, class name) of each image

_SHOWN = 5  # largest number of classes in a message


def register_image_folders(
    name: str,
    folders: Sequence[PathLike],
    *,
    labelled: bool = False,
    keep: Collection[str] | None = None,
) -> None:
    """Registers the images in folders as one data set. They are listed at the first load.

    A record has ``file_name`` and ``image_id`` (its index). With ``labelled``, it also has
    ``label``, which indexes ``folder_classes`` of the metadata. ``keep`` selects images by their
    path relative to their folder; None keeps all. Registering the same folders again does nothing.
    Raises a ``UserError`` if the name is registered with different folders.
    """
    paths = tuple(os.path.abspath(folder) for folder in folders)
    if not is_new(name, image_folders=paths):
        return

    def load() -> list[dict[str, Any]]:
        records, class_names = load_image_folders(paths, labelled=labelled)
        if labelled:
            MetadataCatalog.get(name).set(folder_classes=class_names)
        if keep is not None:
            kept = {os.path.join(folder, path) for folder in paths for path in keep}
            records = [record for record in records if record["file_name"] in kept]
        logger.info(f"{len(records):,} images in {', '.join(map(ascii, paths))}")
        return records

    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(
        image_folders=paths, labelled=labelled, unlabelled=True, evaluator_type="reconstruction"
    )


def is_new(name: str, **files: object) -> bool:
    """Returns whether a data set name is not registered yet.

    Raises a ``UserError`` if it is registered and its metadata differ from ``files``.
    """
    if name not in DatasetCatalog:
        return True
    known = MetadataCatalog.get(name)
    other = {key: known.get(key) for key, value in files.items() if known.get(key) != value}
    if other:
        raise UserError(
            f"the data set name '{name}' is already registered, with "
            f"{', '.join(f'{key} {value}' for key, value in other.items())}: choose another name"
        )
    return False


def load_image_folders(
    folders: Sequence[PathLike], *, labelled: bool = False
) -> tuple[Records, list[str]]:
    """Returns the records of all images in the folders, and the sorted class names.

    With ``labelled``, direct subfolders are classes. Raises a ``UserError`` if a folder has no
    images, or an image is not in a class folder.
    """
    if labelled:
        pairs = [pair for folder in folders for pair in _list_labelled(os.fspath(folder))]
        class_names = sorted({class_name for _, class_name in pairs})
        return _label(pairs, class_names, "the folders"), class_names
    paths = [path for folder in folders for path in list_images(folder)]
    return [{"file_name": path, "image_id": i} for i, path in enumerate(paths)], []


def load_class_folders(train_folder: PathLike, val_folder: PathLike) -> tuple[Records, Records]:
    """Returns the labelled records of a training and a validation folder with class folders.

    The classes are those of ``train_folder``. Raises a ``UserError`` if there is only one class, or
    ``val_folder`` has a class that ``train_folder`` lacks.
    """
    train, val = os.fspath(train_folder), os.fspath(val_folder)
    pairs = _list_labelled(train)
    class_names = sorted({class_name for _, class_name in pairs})
    if len(class_names) < 2:
        raise UserError(
            f"'{train}' has images of only one class, '{class_names[0]}': its direct subfolders "
            "are the classes"
        )
    return _label(pairs, class_names, train), _label(_list_labelled(val), class_names, val)


def list_images(folder: PathLike) -> list[str]:
    """Returns the paths of all images in a folder and its subfolders.

    Paths are sorted by name, with files before subfolders. Hidden names are skipped, and links are
    followed once. Raises a ``UserError`` if there are no images.
    """
    images = [path for images in _walk(os.fspath(folder)) for path in images]
    if not images:
        raise UserError(f"the folder '{os.fspath(folder)}' has no image ({' '.join(_ENDINGS)})")
    return images


def check_image_folder(folder: PathLike) -> None:
    """Raises a ``UserError`` if a folder has no images. Stops at the first image."""
    if not any(_walk(os.fspath(folder))):
        list_images(folder)


def list_classes(sets: Sequence[str]) -> list[str]:
    """Returns the sorted class names of registered sets."""
    return sorted({class_name for name in sets for _, class_name in _load(name)})


def load_classes(sets: Sequence[str], class_names: Sequence[str]) -> Records:
    """Returns the records of registered sets, with labels that index ``class_names``.

    ``image_id`` is numbered consecutively across all sets. Raises a ``UserError`` if a set has no
    labels, or has a class that is not in ``class_names``.
    """
    return _label([pair for name in sets for pair in _load(name)], class_names, " and ".join(sets))


def _walk(root: str) -> Iterator[list[str]]:
    """Yields the list of image paths of each folder and subfolder."""
    if not os.path.isdir(root):
        state = "is a file" if os.path.exists(root) else "does not exist"
        raise UserError(f"the image folder '{root}' {state}")

    def refuse(error: OSError) -> None:
        raise UserError(f"the folder '{error.filename}' cannot be read: {error.strerror}")

    followed = {os.path.realpath(root)}

    def is_new(folder: str) -> bool:
        target = os.path.realpath(folder)
        if not os.path.islink(folder):
            return True
        # Following a link to a parent of a visited folder would visit that folder again.
        if any(os.path.commonpath((target, other)) == target for other in followed):
            return False
        followed.add(target)
        return True

    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        visible = sorted(name for name in below if not name.startswith("."))
        below[:] = [name for name in visible if is_new(os.path.join(folder, name))]
        yield [
            os.path.join(folder, name)
            for name in sorted(names)
            if name.lower().endswith(_ENDINGS) and not name.startswith(".")
        ]


def _list_labelled(root: str) -> Pairs:
    """Returns (path, class name) of the images in a folder with class folders."""
    pairs = []
    for path in list_images(root):
        class_name, separator, _ = path[len(root) :].lstrip(os.sep).partition(os.sep)
        if not separator:
            raise UserError(f"image '{path}' is in no class folder of '{root}'")
        pairs.append((path, class_name))
    return pairs


def _load(name: str) -> Pairs:
    """Returns (path, class name) of the images of a registered set."""
    records = DatasetCatalog.get(name)
    class_names = MetadataCatalog.get(name).get("folder_classes")
    if not class_names or any("label" not in record for record in records):
        raise UserError(
            f"the images of dataset '{name}' have no labels: use a set of class folders, such as "
            "imagenet_train, or pass class folders with --data and --val"
        )
    return [(record["file_name"], class_names[record["label"]]) for record in records]


def _label(pairs: Pairs, class_names: Sequence[str], name: str) -> Records:
    labels = {class_name: label for label, class_name in enumerate(class_names)}
    if unknown := sorted({class_name for _, class_name in pairs} - labels.keys()):
        raise UserError(
            f"'{name}' has images of {join_first(unknown, _SHOWN)}, which are not among the "
            f"{len(labels)} classes {join_first(class_names, _SHOWN)}"
        )
    return [
        {"file_name": path, "image_id": i, "label": labels[class_name]}
        for i, (path, class_name) in enumerate(pairs)
    ]
