# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Registers folders of images with Detectron2, with class labels or without labels.

The files are listed when a data set is first loaded. Each data set numbers its own classes, so the
labels of several data sets are matched by class name.
"""

import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.core.image_files import IMAGE_SUFFIXES
from qbheat_det.core.text import join_first

from .account import Account, LeftOut
from .file_tree import FileTree, walk
from .image_suffixes import describe_format, is_image

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]
Records = list[dict[str, Any]]
Pairs = list[tuple[str, str]]  # (path, class name) of each image

_MAX_SHOWN = 5  # classes in a message


def register_image_folders(
    name: str,
    folders: Sequence[PathLike],
    *,
    labelled: bool = False,
    keep: Collection[str] | None = None,
) -> None:
    """Registers the images in folders as one data set. They are listed at the first load.

    A record has ``file_name`` and ``image_id`` (its index). With ``labelled``, it also has
    ``label``, which indexes ``folder_classes`` of the metadata. Registering the same folders again
    does nothing.

    Args:
        name: name of the data set.
        folders: folders of images.
        labelled: whether the direct subfolders are classes.
        keep: paths of the images to use, relative to the common folder of ``folders``; None for
            all.

    Raises:
        UserError: the name is registered with different folders.
    """
    paths = tuple(os.path.abspath(folder) for folder in folders)
    if not is_new(name, image_folders=paths):
        return

    def load() -> list[dict[str, Any]]:
        """Lists the images, and returns their records."""
        trees = [FileTree(path) for path in paths]
        records, class_names = _list_records(trees, labelled=labelled)
        if labelled:
            MetadataCatalog.get(name).set(folder_classes=class_names)
        if keep is not None:
            base = os.path.commonpath(paths)
            kept = {os.path.join(base, path) for path in keep}
            records = [record for record in records if record["file_name"] in kept]
        account = _account_for(trees, labelled=labelled)
        logger.info(f"{account.summarize()}, in {', '.join(map(ascii, paths))}")
        return records

    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(
        image_folders=paths,
        labelled=labelled,
        unlabelled=True,
        evaluator_type="reconstruction",
    )


def is_new(name: str, **files: object) -> bool:
    """Returns whether a data set name is not registered yet.

    Raises a ``UserError`` if it is registered and its metadata differ from ``files``.
    """
    if name not in DatasetCatalog:
        return True
    metadata = MetadataCatalog.get(name)
    differences = [
        f"{key} {metadata.get(key)}" for key, value in files.items() if metadata.get(key) != value
    ]
    if differences:
        raise UserError(
            f"the data set name '{name}' is already registered, with {', '.join(differences)}: "
            "choose another name"
        )
    return False


def load_image_folders(
    folders: Sequence[PathLike], *, labelled: bool = False
) -> tuple[Records, list[str]]:
    """Returns the records of all images in the folders, and the sorted class names.

    With ``labelled``, direct subfolders are classes. Raises a ``UserError`` if a folder has no
    images, or no image is in a class folder.
    """
    return _list_records([FileTree(folder) for folder in folders], labelled=labelled)


def _list_records(trees: Sequence[FileTree], *, labelled: bool) -> tuple[Records, list[str]]:
    """Returns the records of all images in the trees, and the sorted class names."""
    if labelled:
        pairs = [pair for tree in trees for pair in _list_labelled(tree)]
        class_names = sorted({class_name for _, class_name in pairs})
        return _label(pairs, class_names, "the folders"), class_names
    paths = [path for tree in trees for path in _require_images(tree)]
    records = [{"file_name": path, "image_id": index} for index, path in enumerate(paths)]
    return records, []


def load_class_folders(train_folder: PathLike, val_folder: PathLike) -> tuple[Records, Records]:
    """Returns the labelled records of a training and a validation folder with class folders.

    The classes are those of ``train_folder``. Raises a ``UserError`` if there is only one class, or
    ``val_folder`` has a class that ``train_folder`` lacks.
    """
    train_path = os.fspath(train_folder)
    val_path = os.fspath(val_folder)
    train_pairs = _list_labelled(FileTree(train_path))
    class_names = sorted({class_name for _, class_name in train_pairs})
    if len(class_names) < 2:
        raise UserError(
            f"'{train_path}' has images of only one class, '{class_names[0]}': its direct "
            "subfolders are the classes"
        )
    train_records = _label(train_pairs, class_names, train_path)
    val_records = _label(_list_labelled(FileTree(val_path)), class_names, val_path)
    return train_records, val_records


def list_images(folder: PathLike) -> list[str]:
    """Returns the paths of all images in a folder and its subfolders, without hidden files.

    Raises a ``UserError`` if there are no images.
    """
    return _require_images(FileTree(folder))


def _require_images(tree: FileTree) -> list[str]:
    """Returns the images of a tree. Raises a ``UserError`` if there are none."""
    if not tree.images:
        suffixes = " ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"the folder '{tree.root}' has no image ({suffixes})")
    return tree.images


def check_image_folder(folder: PathLike) -> None:
    """Raises a ``UserError`` if a folder has no images. Stops at the first image."""
    path = os.path.abspath(folder)
    if not any(is_image(file) for file in walk(path)):
        list_images(path)


def account_for_folders(folders: Sequence[PathLike]) -> Account:
    """Returns the account of folders of images without labels."""
    return _account_for([FileTree(folder) for folder in folders], labelled=False)


def _account_for(trees: Sequence[FileTree], *, labelled: bool) -> Account:
    """Returns the account of image folders. With ``labelled``, subfolders are classes."""
    account = Account()
    for tree in trees:
        account.left_out += tree.skipped
        for path in tree.unread_images:
            kind, reason = describe_format(path)
            account.left_out.append(LeftOut(kind=kind, where=path, reason=reason))
        for path in tree.images:
            if labelled and os.path.dirname(path) == tree.root:
                reason = f"it is in no class folder of '{tree.root}'"
                account.left_out.append(
                    LeftOut(kind="in no class folder", where=path, reason=reason)
                )
            else:
                account.used["image"] += 1
        for path in tree.other_files:
            account.left_out.append(
                LeftOut(
                    kind="without pixels",
                    where=path,
                    reason="only images are used",
                    item="other file",
                    is_fault=False,
                )
            )
    return account


def list_classes(sets: Sequence[str]) -> list[str]:
    """Returns the sorted class names of registered sets."""
    return sorted({class_name for name in sets for _, class_name in _load_labelled(name)})


def load_classes(sets: Sequence[str], class_names: Sequence[str]) -> Records:
    """Returns the records of registered sets, with labels that index ``class_names``.

    ``image_id`` is numbered consecutively across all sets. Raises a ``UserError`` if a set has no
    labels, or has a class that is not in ``class_names``.
    """
    pairs = [pair for name in sets for pair in _load_labelled(name)]
    return _label(pairs, class_names, " and ".join(sets))


def _list_labelled(tree: FileTree) -> Pairs:
    """Returns (path, class name) of the images in a folder with class folders.

    Images outside of class folders are left out. Raises a ``UserError`` if no image is in a class
    folder.
    """
    pairs = []
    for path in _require_images(tree):
        class_name, separator, _ = os.path.relpath(path, tree.root).partition(os.sep)
        if separator:
            pairs.append((path, class_name))
    if not pairs:
        raise UserError(f"no image of '{tree.root}' is in a class folder")
    return pairs


def _load_labelled(name: str) -> Pairs:
    """Returns (path, class name) of the images of a registered set.

    Raises a ``UserError`` if the set has no labels.
    """
    records = DatasetCatalog.get(name)
    class_names = MetadataCatalog.get(name).get("folder_classes")
    if not class_names or any("label" not in record for record in records):
        raise UserError(
            f"the images of dataset '{name}' have no labels: use a set of class folders, such as "
            "imagenet_train, or pass class folders with --data and --val"
        )
    return [(record["file_name"], class_names[record["label"]]) for record in records]


def _label(pairs: Pairs, class_names: Sequence[str], name: str) -> Records:
    """Returns a record for each image. Its ``label`` is the index of its class in ``class_names``.

    Raises a ``UserError``, which names the data set ``name``, if a class is not in ``class_names``.
    """
    labels = {class_name: label for label, class_name in enumerate(class_names)}
    unknown = sorted({class_name for _, class_name in pairs} - labels.keys())
    if unknown:
        raise UserError(
            f"'{name}' has images of {join_first(unknown, _MAX_SHOWN)}, which are not among the "
            f"{len(labels)} classes {join_first(class_names, _MAX_SHOWN)}"
        )
    return [
        {"file_name": path, "image_id": index, "label": labels[class_name]}
        for index, (path, class_name) in enumerate(pairs)
    ]
