# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recognizes the data set in a folder: by its label files, or else by class folders."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first

from .file_tree import FileTree, is_below, stem_of
from .formats import FORMATS, Format, LabelSet
from .formats.table import describe_columns, has_unknown_boxes, names_images
from .image_suffixes import suffix_of
from .label_kinds import Ends, LabelKind, json_list, json_object, lines_like, starts_with
from .layout import PLAIN_WORDS, folders_of, part_of_name, split_words

_LINE_OF_WIDER = re.compile(r"^\s*(-?\d+\s+){9}-?\d+\s*$")


def _is_wider_face(ends: Ends) -> bool:
    """Returns whether a file is of WIDER FACE: after an image's name come the number and boxes."""
    lines = ends.lines
    if len(lines) < 3:
        return False
    return lines[1].isdecimal() and bool(_LINE_OF_WIDER.match(lines[2]))


def _is_labelme_xml(ends: Ends) -> bool:
    text = ends.start
    return "<annotation>" in text and "<polygon>" in text and "<bndbox>" not in text


# Maps kinds of label files that are not read to an explanation for the user.
_REFUSED = {
    LabelKind(
        name="coco results", suffixes=(".json",), matches=json_list(("image_id", "bbox", "score"))
    ): "the results of a detector, and no data set: name the annotation file that the results "
    "belong to",
    LabelKind(
        name="datumaro", suffixes=(".json",), matches=json_object(("items", "categories"))
    ): "a data set of Datumaro: export COCO instead",
    LabelKind(
        name="ground truth", suffixes=(".manifest", ".jsonl"), matches=starts_with('"source-ref"')
    ): "a manifest of SageMaker Ground Truth: convert it to COCO",
    LabelKind(
        name="labelbox", suffixes=(".ndjson", ".jsonl"), matches=starts_with('"data_row"')
    ): "an export of Labelbox: export COCO instead",
    LabelKind(
        name="labelme xml", suffixes=(".xml",), matches=_is_labelme_xml
    ): "XML files of the LabelMe website: export COCO, Pascal VOC or 'CVAT for images' instead",
    LabelKind(
        name="via3", suffixes=(".json",), matches=json_object(("project", "metadata", "vid"))
    ): "a project of VIA 3: export COCO instead",
    LabelKind(
        name="visdrone", suffixes=(".txt",), matches=lines_like(r"^\s*(-?\d+,){7}-?\d+,?\s*$")
    ): "labels of VisDrone: convert them to COCO or YOLO",
    LabelKind(
        name="wider face", suffixes=(".txt",), matches=_is_wider_face
    ): "lists of WIDER FACE: convert them to COCO",
}
KINDS = (*_REFUSED, *(kind for format in FORMATS.values() for kind in format.kinds))
"""All kinds of label files. The first that matches a file is its kind."""
_REFUSED_SUFFIXES = {
    ".h5": "HDF5",
    ".mat": "MATLAB",
    ".parquet": "Parquet",
    ".pickle": "pickle",
    ".pkl": "pickle",
    ".record": "TFRecord",
    ".tfrec": "TFRecord",
    ".tfrecord": "TFRecord",
    ".tfrecords": "TFRecord",
}
_LABEL_SUFFIXES = (".csv", ".json", ".txt", ".tsv", ".xlsx", ".xml", ".yaml")
_ACCEPTED = (
    f"--data needs {', '.join(format.title for format in FORMATS.values())}, class folders, or a "
    "zip of one of these (docs/train.md#data-formats)"
)


# Another data set is left out if it adds at most this share of the chosen one's images.
_MAX_ADDED = 0.1
_MASK_WORDS = frozenset({"mask", "masks", "segmentation", "segmentations", "seg", "semantic"})


@dataclass(frozen=True)
class Recognized:
    """The data set that was found in a tree of files.

    Attributes:
        tree: the files of the data set.
        format: the format of its labels; None for class folders.
        labels: its label files; None for class folders.
        folders: maps each part of a data set of class folders to the folder that has them.
        notes: which folder is used and what is not, one sentence each.
    """

    tree: FileTree
    format: Format | None = None
    labels: LabelSet | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """How the parts are used: ["all"], ["train"] or ["train", "val"]."""
        if self.labels is None:
            return list(self.folders)
        return list(choose_parts(self.labels.parts))


def recognize(tree: FileTree, wanted: str = "") -> Recognized:
    """Finds the only data set in a tree of files.

    Args:
        tree: files of a folder, or of one label file.
        wanted: the only format to look for; "" for all formats.

    Raises:
        UserError: there is no data set, or more than one.
    """
    formats = [FORMATS[wanted]] if wanted else list(FORMATS.values())
    candidates = [
        _Candidate(tree, format, labels) for format in formats for labels in format.find(tree)
    ]
    if not candidates:
        if wanted:
            raise UserError(f"'{tree.root}' has no {FORMATS[wanted].title} labels any more")
        if tree.label_file:
            raise UserError(_refuse_file(tree, tree.label_file))
        return _recognize_classes(tree)
    named = [one for one in candidates if tree.label_file in one.labels.manifests]
    if named:  # the user has named the data.yaml, and not the folder
        candidates = named
    notes: list[str] = []
    if len(candidates) == 1:
        (chosen,) = candidates
    else:
        candidates.sort(key=lambda candidate: candidate.rank, reverse=True)
        chosen, *others = candidates
        notes = _compare(tree, chosen, others)
    if not chosen.labels.base or tree.is_of_one_file:
        return Recognized(tree, chosen.format, chosen.labels, notes=notes)
    folder = chosen.path
    notes.append(f"the data set in '{folder}' is used")
    has_images = any(is_below(path, folder) for path in tree.all_images)
    if not has_images:
        return Recognized(tree, chosen.format, chosen.labels, notes=notes)
    nested = FileTree(folder, kinds=KINDS)
    for root in tree.other_roots:
        nested.add(root)
    nested.preferred = tree.preferred
    nested.other_files += _list_files_above(tree, folder)  # one of them may list the class names
    inner = recognize(nested, chosen.format.name)
    return Recognized(inner.tree, chosen.format, inner.labels, notes=[*notes, *inner.notes])


def _list_files_above(tree: FileTree, folder: str) -> list[str]:
    """Returns the files directly in the parents of a folder, up to the root, but no label files."""
    label_files = {path for files in tree.label_files.values() for path in files}
    files_above = []
    for path in tree.other_files:
        parent = os.path.dirname(path)
        if path not in label_files and is_below(folder, parent) and parent != folder:
            files_above.append(path)
    return files_above


class _Candidate:
    """One of several data sets in a tree of files. Its labels are read only to compare them."""

    def __init__(self, tree: FileTree, format: Format, labels: LabelSet) -> None:
        self.format = format
        self.labels = labels
        self.path = os.path.join(tree.root, *labels.base)
        self._tree = tree

    @cached_property
    def images(self) -> frozenset[str]:
        """Paths of the images with labels; none if the labels cannot be read."""
        files: set[str] = set()
        for part in self.labels.parts:
            try:
                labels = self.format.read(self._tree, self.labels, part)
            except UserError:
                return frozenset()
            for image in labels.images:
                has_labels = bool(image.boxes or image.label_file)
                if image.file and image.exclusion is None and has_labels:
                    files.add(image.file)
        return frozenset(files)

    def is_inside(self, other: "_Candidate") -> bool:
        """Returns whether the folder of the data set lies in that of another."""
        return self.path != other.path and is_below(self.path, other.path)

    @property
    def rank(self) -> tuple[object, ...]:
        """A tuple that is larger for better candidates.

        The criteria are, in this order: a manifest whose images exist, the number of images, a
        format that is not ``is_last``, a folder near the root, the order of ``FORMATS``.
        """
        order = list(FORMATS).index(self.format.name)
        has_manifest = bool(self.labels.manifests and self.images)
        num_images = len(self.images)
        depth = len(self.labels.base)
        return has_manifest, num_images, not self.format.is_last, -depth, -order


def _compare(tree: FileTree, chosen: _Candidate, others: Sequence[_Candidate]) -> list[str]:
    """Checks that the other data sets need not be used, and returns a note about each.

    Raises:
        UserError: another data set would add more than ``_MAX_ADDED`` of the chosen one's images.
    """
    rivals = [chosen]
    notes = []
    names = {os.path.basename(path) for path in chosen.images}
    for other in others:
        added = other.images - chosen.images
        if other.is_inside(chosen):  # predictions, or an older version
            added = frozenset(path for path in added if os.path.basename(path) not in names)
        if len(added) > _MAX_ADDED * len(chosen.images):
            rivals.append(other)
            continue
        place = "others" if other.path == chosen.path else f"'{other.path}'"
        notes.append(
            f"labels in {chosen.format.title} format are used, and not those in "
            f"{other.format.title} format of {place}"
        )
    paths = list(dict.fromkeys(rival.path for rival in rivals))
    if len(paths) > 1:
        outer = {rival.path for rival in rivals if any(other.is_inside(rival) for other in rivals)}
        commands = [shlex.join(["--data", path]) for path in paths if path not in outer]
        message = (
            f"'{tree.root}' has {len(paths)} data sets. Choose one: "
            f"{join_first(commands, 10, ' or ')}"
        )
        for path in outer:
            message += f". To use the one directly in '{path}', move the others out of it"
        raise UserError(message)
    if len(rivals) > 1:
        titles = " and ".join(dict.fromkeys(rival.format.title for rival in rivals))
        raise UserError(
            f"'{chosen.path}' has labels in the formats {titles}, of different images: keep those "
            "of one format, or pass one label file with --data"
        )
    return notes


def choose_parts(parts: Mapping[str, Any]) -> dict[str, str]:
    """Chooses the parts of a data set to use. Maps "all", or "train" and "val", to their names.

    The part "all" is used for training if there is no part "train". The part "test" is used for
    validation if there is no part "val". Without a part for training, this part has the role "all".
    """
    train = next((part for part in ("train", "all") if part in parts), None)
    val = next((part for part in ("val", "test") if part in parts), None)
    if train is None:
        return {"all": str(val)}
    if val is None:
        return {train: train}
    return {"train": train, "val": val}


def _recognize_classes(tree: FileTree) -> Recognized:
    """Recognizes a data set of class folders. Raises a ``UserError`` if there is none."""
    refusal = _find_refusal(tree)
    if refusal:
        raise UserError(f"'{tree.root}' {refusal}")
    root = _find_root_of_classes(tree)
    notes = []
    if root != tree.root:
        notes.append(f"the class folders in '{root}' are used")
    names = _list_folders(tree, root)
    if not names:
        raise UserError(_explain_missing_labels(tree))
    folders = _find_class_parts(tree, root, names) or {"all": root}
    classes = {name for folder in folders.values() for name in _list_folders(tree, folder)}
    no_classes = [name for name in sorted(classes) if part_of_name(name) or _says_nothing(name)]
    if len(no_classes) == len(classes):
        raise UserError(
            f"the folders {join_first(no_classes or names)} in '{root}' are no classes: "
            f"{_explain_missing_labels(tree)}"
        )
    return Recognized(tree, folders=folders, notes=notes)


def _find_root_of_classes(tree: FileTree) -> str:
    """Returns the folder that has the class folders or parts.

    This is the root, unless all images are in one folder below it, as in many zips.
    """
    root = tree.root
    while True:
        folders = _list_folders(tree, root)
        has_direct_images = any(os.path.dirname(path) == root for path in tree.all_images)
        if len(folders) != 1 or has_direct_images or part_of_name(folders[0]):
            return root
        inner = os.path.join(root, folders[0])
        if not _list_folders(tree, inner):  # it is a class
            return root
        root = inner


def _list_folders(tree: FileTree, root: str) -> list[str]:
    """Returns the names of the direct subfolders of ``root`` that have images."""
    start = len(root.rstrip(os.sep)) + 1
    folders: dict[str, None] = {}
    for path in tree.all_images:
        if is_below(path, root):
            folder, separator, _ = path[start:].partition(os.sep)
            if separator:
                folders[folder] = None
    return list(folders)


def _find_class_parts(tree: FileTree, root: str, names: Sequence[str]) -> dict[str, str]:
    """Maps "train" and "val" to their folders of class folders, or returns {} without parts.

    ``names`` are the subfolders of ``root``.
    """
    folders: dict[str, str] = {}
    for name in names:
        part = part_of_name(name)
        # "train" may be the class of trains, so there must not be any other folders.
        if part is None:
            return {}
        folders.setdefault(part, os.path.join(root, name))
    if "train" not in folders or len(folders) < 2:
        return {}
    if not all(_list_folders(tree, folder) for folder in folders.values()):
        return {}
    return {role: folders[part] for role, part in choose_parts(folders).items()}


def _says_nothing(name: str) -> bool:
    """Whether a folder's name says only that it has images, labels or masks."""
    return all(word in PLAIN_WORDS or word in _MASK_WORDS for word in split_words(name))


def _find_refusal(tree: FileTree) -> str | None:
    """Returns why label files in a tree cannot be read, or None if no such files are found."""
    for kind, reason in _REFUSED.items():
        files = tree.label_files.get(kind.name)
        if files:
            return f"has {reason} ('{files[0]}')"
    for path in _list_tables(tree):
        if has_unknown_boxes(path):
            return f"has a table of unknown columns: {describe_columns(path)}"
    stems = {stem_of(path) for path in tree.images}
    named_like_images = [path for path in tree.other_files if stem_of(path) in stems]
    if 2 * len(named_like_images) > len(stems) > 1:
        return f"has label files of an unknown kind, such as '{named_like_images[0]}': {_ACCEPTED}"
    for path in tree.other_files:
        format_name = _REFUSED_SUFFIXES.get(suffix_of(path))
        if format_name:
            return f"has a {format_name} file, which is not read ('{path}'): convert it to COCO"
    return None


def _list_tables(tree: FileTree) -> list[str]:
    """Returns the tables that may have labels."""
    files = [tree.label_file] if tree.label_file else tree.other_files
    return [path for path in files if suffix_of(path) in (".csv", ".tsv")]


def _refuse_file(tree: FileTree, path: str) -> str:
    """Returns why a file has no labels that are read."""
    if _list_tables(tree):
        return describe_columns(path)
    refusal = _find_refusal(tree) or f"has no labels that are read: {_ACCEPTED}"
    return f"'{path}' {refusal}"


def _explain_missing_labels(tree: FileTree) -> str:
    """Returns the message for a tree without label files and class folders."""
    masks = [path for path in tree.images if _is_in_mask_folder(tree, path)]
    tables = [path for path in _list_tables(tree) if names_images(path)]
    if tables and not masks:
        return describe_columns(tables[0])
    if not tree.all_images:
        archives = [
            path for path in tree.other_files if suffix_of(path) in (".zip", ".7z", ".tar", ".gz")
        ]
        if archives:
            return (
                f"'{tree.root}' has the archive '{archives[0]}': unpack it, or pass it with --data"
            )
        return f"'{tree.root}' has no images and no labels: {_ACCEPTED}"
    if masks:
        return f"'{tree.root}' has masks, but no boxes, such as '{masks[0]}': {_ACCEPTED}"
    problem = "images without annotations"
    suspicious = [path for path in tree.other_files if path.lower().endswith(_LABEL_SUFFIXES)]
    if suspicious:
        problem += f" (no labels were found in files such as '{suspicious[0]}')"
    return (
        f"'{tree.root}' has {problem}: {_ACCEPTED}. --images accepts images without labels, for "
        "pre-training"
    )


def _is_in_mask_folder(tree: FileTree, path: str) -> bool:
    """Returns whether a folder between the root and a file is named like masks."""
    folders = folders_of(tree, path)
    return any(_MASK_WORDS.intersection(split_words(folder)) for folder in folders)
