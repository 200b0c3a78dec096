# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads the boxes of a data set: all its parts at once, and an account of all its files."""

import contextlib
import gc
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from qbheat_det.core.errors import UserError, refuse_unreadable

from .account import Account
from .annotations import Annotations
from .building import build_annotations
from .file_tree import FileTree
from .formats import Labels
from .joining import join_annotations
from .other_files import account_for_other_files
from .parts import remove_overlap, split_by_folders
from .recognition import KINDS, choose_parts, recognize
from .source import Source


@dataclass(frozen=True)
class ReadParts:
    """All parts of a data set with boxes, as they were read, and their account."""

    parts: dict[str, Annotations]
    account: Account


def read_annotations(source: Source) -> Annotations:
    """Reads the boxes of all images of a source, also of those that ``split.json`` does not list.

    Raises:
        UserError: the label files cannot be read, or have no such part any more.
    """
    if source.joined:
        members = [read_annotations(member) for member in source.joined]
        return join_annotations(members, source.classes, dict(source.renamed))[0]
    data_set = read_data_set(source.path, source.image_root, source.format, source.classes)
    if source.part not in data_set.parts:
        raise UserError(f"'{source.path}' has no part '{source.part}' any more")
    return data_set.parts[source.part]


@contextlib.contextmanager
def _paused_collection() -> Iterator[None]:
    """Context without garbage collection, which would visit millions of new objects repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_paused_collection()
def read_data_set(path: str, image_root: str, format: str, classes: tuple[str, ...]) -> ReadParts:
    """Reads all parts of a data set, and accounts for all files below its folder.

    Args:
        path: file or folder of the data set.
        image_root: folder of its images; "" if they are in the folder or near the file.
        format: name of its format; "" to recognize the format.
        classes: names of the classes; () for those in the label files or of the boxes.

    Raises:
        UserError: there is no such data set, or it cannot be read.
    """
    with refuse_unreadable(path):
        return _read_parts(path, image_root, format, classes)


def _read_parts(path: str, image_root: str, format: str, classes: tuple[str, ...]) -> ReadParts:
    """Does the work of ``read_data_set``, whose arguments it takes. Raises errors of any type."""
    tree = walk_files(path, image_root)
    recognized = recognize(tree)
    if format and (recognized.format is None or recognized.format.name != format):
        recognized = recognize(tree, format)
    if recognized.format is None or recognized.labels is None:
        raise UserError(f"'{path}' has no boxes")
    tree = recognized.tree
    account = Account(notes=list(recognized.notes))
    # The role, "all", "train" or "val", is how a part is used: the part "test" may validate.
    roles = choose_parts(recognized.labels.parts)
    labels_of = {
        role: recognized.format.read(tree, recognized.labels, part) for role, part in roles.items()
    }
    has_parts = set(roles.values()) != {"all"} or bool(recognized.labels.manifests)
    if not has_parts and os.path.isdir(path):
        roles, labels_of = split_by_folders(tree, labels_of["all"], account)
    if len(labels_of) == 2:
        remove_overlap(tree, labels_of, roles, account)
    if not recognized.format.lists_classes:
        _set_categories(labels_of.values(), classes)
    parts: dict[str, Annotations] = {}
    label_files: set[str] = set()
    mentioned: set[str] = set()  # images, and their label files
    for role, labels in labels_of.items():
        if len(labels.files) == 1:
            origin = labels.files[0]
        elif len(labels_of) == 1:
            origin = path
        else:
            origin = f"{path} ({roles[role]})"
        parts[role] = build_annotations(tree, labels, labels.categories or [], origin, account)
        label_files.update(labels.files)
        for image in labels.images:
            mentioned.update((image.file, image.label_file))
    account.used["label file"] += len(label_files)
    used_parts = {roles[role] for role in labels_of}
    account_for_other_files(recognized, path, mentioned | label_files, used_parts, account)
    for part in parts.values():
        account.notes += [note for note in part.note_classes() if note not in account.notes]
    return ReadParts(parts, account)


def _set_categories(labels_of_parts: Collection[Labels], class_names: Sequence[str]) -> None:
    """Sets the same categories for all parts: ``class_names``, or else the classes of all boxes.

    Classes of boxes are sorted by name.
    """
    if not class_names:
        names = {
            box.class_name
            for labels in labels_of_parts
            for image in labels.images
            for box in image.boxes
        }
        class_names = sorted(names)
    for labels in labels_of_parts:
        labels.categories = [{"id": id_, "name": name} for id_, name in enumerate(class_names)]


def walk_files(path: str, image_root: str) -> FileTree:
    """Returns the files of a data set's folder or label file, and of the folder of its images."""
    if not os.path.isdir(path):
        return FileTree(image_root or os.path.dirname(path), label_file=path, kinds=KINDS)
    tree = FileTree(path, kinds=KINDS)
    if image_root:
        tree.prefer(image_root)
    return tree
