# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recognizes the data set in a folder by its label files, or as a set of class folders."""

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
from .label_kinds import Ends, LabelKind, json_list, json_object, lines_like, starts_with
from .layout import PLAIN_WORDS, folders_of, part_of_name, split_words

_LINE_OF_WIDER = re.compile(r"^\s*(-?\d+\s+){9}-?\d+\s*$")


def _is_wider_face(ends: Ends) -> bool:
    lines = ends.lines
    return len(lines) > 2 and lines[1].isdecimal() and bool(_LINE_OF_WIDER.match(lines[2]))


# Kinds of label files that are recognized and not read, and what to do.
_REFUSED = {
    LabelKind(
        "coco results", (".json",), json_list(("image_id", "bbox", "score"))
    ): "the results of a detector, and no data set: name the annotation file that the results "
    "belong to",
    LabelKind(
        "datumaro", (".json",), json_object(("items", "categories"))
    ): "a data set of Datumaro: export COCO instead",
    LabelKind(
        "ground truth", (".manifest", ".jsonl"), starts_with('"source-ref"')
    ): "a manifest of SageMaker Ground Truth: convert it to COCO",
    LabelKind(
        "labelbox", (".ndjson", ".jsonl"), starts_with('"data_row"')
    ): "an export of Labelbox: export COCO instead",
    LabelKind(
        "labelme xml", (".xml",), lambda ends: "<annotation>" in ends.start and _has_polygons(ends)
    ): "XML files of the LabelMe website: export COCO, Pascal VOC or 'CVAT for images' instead",
    LabelKind(
        "via3", (".json",), json_object(("project", "metadata", "vid"))
    ): "a project of VIA 3: export COCO instead",
    LabelKind(
        "visdrone", (".txt",), lines_like(r"^\s*(-?\d+,){7}-?\d+,?\s*$")
    ): "labels of VisDrone: convert them to COCO or YOLO",
    LabelKind("wider face", (".txt",), _is_wider_face): "lists of WIDER FACE: convert them to COCO",
}
KINDS = (*_REFUSED, *(kind for row in FORMATS.values() for kind in row.kinds))
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
_SUFFIXES_OF_LABELS = (".csv", ".json", ".txt", ".tsv", ".xlsx", ".xml", ".yaml")
_TAKEN = (
    f"--data needs {', '.join(row.title for row in FORMATS.values())}, class folders, or a zip of "
    "one of these (docs/train.md#data-formats)"
)


def _has_polygons(ends: Ends) -> bool:
    return "<polygon>" in ends.start and "<bndbox>" not in ends.start


_SMALL = 0.1  # share of the images of another data set up to which a data set is left out
_MASK_WORDS = frozenset({"mask", "masks", "segmentation", "segmentations", "seg", "semantic"})


@dataclass(frozen=True)
class Recognized:
    """A data set in a tree of files.

    Attributes:
        tree: the files of the data set.
        format: the format of its labels; None for class folders.
        labels: its label files; None for class folders.
        folders: the class folders of its parts.
        notes: how it was found, and what else there is.
    """

    tree: FileTree
    format: Format | None = None
    labels: LabelSet | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """The parts that are used: "all", or "train" and optionally "val"."""
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
    found = [_Candidate(tree, row, one) for row in formats for one in row.find(tree)]
    if not found:
        if wanted:
            raise UserError(f"'{tree.root}' has no {FORMATS[wanted].title} labels any more")
        if tree.label_file:
            raise UserError(_refuse_file(tree, tree.label_file))
        return _recognize_classes(tree)
    chosen, *others = sorted(found, key=lambda one: one.rank, reverse=True) if found[1:] else found
    notes = _compare(tree, chosen, others) if others else []
    row, base = chosen.row, chosen.labels.base
    if base and not tree.is_of_one_file:
        folder = os.path.join(tree.root, *base)
        notes.append(f"the data set in '{folder}' is used")
        if any(is_below(path, folder) for path in tree.all_images):
            nested = FileTree(folder, kinds=KINDS)
            for other in tree.other_roots:
                nested.add(other)
            nested.preferred = tree.preferred
            nested.others += _list_files_above(tree, folder)  # may have the class names
            again = recognize(nested, row.name)
            return Recognized(again.tree, row, again.labels, notes=[*notes, *again.notes])
    return Recognized(tree, row, chosen.labels, notes=notes)


def _list_files_above(tree: FileTree, folder: str) -> list[str]:
    """Returns the files between the root and a folder that are no label files."""
    label_files = {path for files in tree.label_files.values() for path in files}
    return [
        path
        for path in tree.others
        if path not in label_files and is_below(folder, above := os.path.dirname(path))
        if above != folder
    ]


class _Candidate:
    """A data set that may be meant. Its images are found only if there is another one."""

    def __init__(self, tree: FileTree, row: Format, labels: LabelSet) -> None:
        self.row = row
        self.labels = labels
        self.path = os.path.join(tree.root, *labels.base)
        self._tree = tree

    @cached_property
    def images(self) -> frozenset[str]:
        """Paths of the images with labels; none if the labels cannot be read."""
        try:
            parts = [self.row.read(self._tree, self.labels, part) for part in self.labels.parts]
        except UserError:
            return frozenset()
        return frozenset(
            image.file
            for part in parts
            for image in part.images
            if image.file and image.reason is None and (image.boxes or image.label_file)
        )

    def is_inside(self, other: "_Candidate") -> bool:
        """Returns whether the folder of the data set lies in that of another."""
        return self.path != other.path and is_below(self.path, other.path)

    @property
    def rank(self) -> tuple[object, ...]:
        """Candidates with a higher rank are preferred.

        A file that names the parts and classes decides, if its images are there. Then the number of
        images does, and last the order of the table of formats.
        """
        order = list(FORMATS).index(self.row.name)
        has_manifest = bool(self.labels.manifests and self.images)
        size = len(self.images)
        return has_manifest, size, not self.row.is_last, -len(self.labels.base), -order


def _compare(tree: FileTree, chosen: _Candidate, others: Sequence[_Candidate]) -> list[str]:
    """Returns notes of the other data sets, which repeat the chosen one or are much smaller.

    Raises:
        UserError: another data set has images of its own.
    """
    rivals = [chosen]
    notes = []
    names = {os.path.basename(path) for path in chosen.images}
    for other in others:
        own = other.images - chosen.images
        if other.is_inside(chosen):  # predictions, or an older version
            own = frozenset(path for path in own if os.path.basename(path) not in names)
        if len(own) > _SMALL * len(chosen.images):
            rivals.append(other)
        else:
            files = f"'{other.path}'" if other.path != chosen.path else "others"
            notes.append(
                f"labels in {chosen.row.title} format are used, and not those in "
                f"{other.row.title} format of {files}"
            )
    paths = list(dict.fromkeys(one.path for one in rivals))
    if len(paths) > 1:
        outer = {one.path for one in rivals for other in rivals if other.is_inside(one)}
        commands = [shlex.join(["--data", path]) for path in paths if path not in outer]
        moved = "".join(
            f". To use the one directly in '{path}', move the others out of it" for path in outer
        )
        raise UserError(
            f"'{tree.root}' has {len(paths)} data sets. Choose one: "
            f"{join_first(commands, 10, ' or ')}{moved}"
        )
    if len(rivals) > 1:
        titles = " and ".join(dict.fromkeys(one.row.title for one in rivals))
        raise UserError(
            f"'{chosen.path}' has labels in the formats {titles}, of different images: keep those "
            "of one format, or pass one label file with --data"
        )
    return notes


def choose_parts(parts: Mapping[str, Any]) -> dict[str, str]:
    """Maps "all", or "train" and optionally "val", to names of parts that a data set has.

    The test part is used for validation if there is no other. A part of unknown name is used for
    training if there is no training part.
    """
    train = next((name for name in ("train", "all") if name in parts), None)
    val = next((name for name in ("val", "test") if name in parts), None)
    if train is None:
        return {"all": str(val)}
    if val is None:
        return {"all" if train == "all" else "train": train}
    return {"train": train, "val": val}


def _recognize_classes(tree: FileTree) -> Recognized:
    """Recognizes a set of class folders. Raises a ``UserError`` for anything else."""
    if refusal := _find_refusal(tree):
        raise UserError(f"'{tree.root}' {refusal}")
    notes = []
    root = tree.root
    while True:  # an unpacked export often has one folder on top
        folders = _list_folders(tree, root)
        if len(folders) != 1 or _has_direct_images(tree, root):
            break
        inner = os.path.join(root, folders[0])
        if not _list_folders(tree, inner) or part_of_name(folders[0]):
            break
        root = inner
        notes = [f"the class folders in '{root}' are used"]
    names = _list_folders(tree, root)
    if not names:
        raise UserError(_explain_missing_labels(tree))
    parts = _find_class_parts(tree, root, names)
    folders_of_parts = parts or {"all": root}
    classes = {name for path in folders_of_parts.values() for name in _list_folders(tree, path)}
    plain = [name for name in sorted(classes) if part_of_name(name) or _says_nothing(name)]
    if len(plain) == len(classes):
        raise UserError(
            f"the folders {join_first(plain or names)} in '{root}' are no classes: "
            f"{_explain_missing_labels(tree)}"
        )
    return Recognized(tree, folders=folders_of_parts, notes=notes)


def _list_folders(tree: FileTree, root: str) -> list[str]:
    """Returns the names of the direct subfolders that have images."""
    start = len(root.rstrip(os.sep)) + 1
    inside = (path[start:].split(os.sep) for path in tree.all_images if is_below(path, root))
    return list(dict.fromkeys(names[0] for names in inside if len(names) > 1))


def _has_direct_images(tree: FileTree, root: str) -> bool:
    return any(os.path.dirname(path) == root for path in tree.all_images)


def _find_class_parts(tree: FileTree, root: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the folders of the training and the validation part, or {} if there are none."""
    parts = {part: name for name in reversed(names) if (part := part_of_name(name))}
    # "train" may be the class of trains, so there must not be any other folders.
    if "train" not in parts or not all(map(part_of_name, names)) or len(parts) < 2:
        return {}
    paths = {part: os.path.join(root, name) for part, name in parts.items()}
    if not all(_list_folders(tree, path) for path in paths.values()):
        return {}
    return {role: paths[part] for role, part in choose_parts(paths).items()}


def _says_nothing(name: str) -> bool:
    return all(word in PLAIN_WORDS or word in _MASK_WORDS for word in split_words(name))


def _is_mask(name: str) -> bool:
    return any(word in _MASK_WORDS for word in split_words(name))


def _find_refusal(tree: FileTree) -> str | None:
    """Returns why the label files of a tree are not read, or None if there are none."""
    for kind, text in _REFUSED.items():
        if files := tree.label_files.get(kind.name):
            return f"has {text} ('{files[0]}')"
    for path in _list_tables(tree):
        if has_unknown_boxes(path):
            return f"has a table of unknown columns: {describe_columns(path)}"
    stems = {stem_of(path) for path in tree.images}
    beside = [path for path in tree.others if stem_of(path) in stems]
    if 2 * len(beside) > len(stems) > 1:
        return f"has label files of an unknown kind, such as '{beside[0]}': {_TAKEN}"
    for path in tree.others:
        name = _REFUSED_SUFFIXES.get(os.path.splitext(path)[1].lower())
        if name:
            return f"has a {name} file, which is not read ('{path}'): convert it to COCO"
    return None


def _list_tables(tree: FileTree) -> list[str]:
    files = [tree.label_file] if tree.label_file else tree.others
    return [path for path in files if path.lower().endswith((".csv", ".tsv"))]


def _refuse_file(tree: FileTree, path: str) -> str:
    """Returns why a file has no labels that are read."""
    if _list_tables(tree):
        return describe_columns(path)
    refusal = _find_refusal(tree)
    return f"'{path}' {refusal}" if refusal else f"'{path}' has no labels that are read: {_TAKEN}"


def _explain_missing_labels(tree: FileTree) -> str:
    """Returns a message for a tree without labels that are read."""
    masks = [path for path in tree.images if any(map(_is_mask, folders_of(tree, path)))]
    tables = [path for path in _list_tables(tree) if names_images(path)]
    if tables and not masks:
        return describe_columns(tables[0])
    archives = [
        path for path in tree.others if path.lower().endswith((".zip", ".7z", ".tar", ".gz"))
    ]
    if not tree.all_images and archives:
        return f"'{tree.root}' has the archive '{archives[0]}': unpack it, or pass it with --data"
    if not tree.all_images:
        return f"'{tree.root}' has no images and no labels: {_TAKEN}"
    if masks:
        return f"'{tree.root}' has masks, but no boxes, such as '{masks[0]}': {_TAKEN}"
    suspicious = [path for path in tree.others if path.lower().endswith(_SUFFIXES_OF_LABELS)]
    files = f" (no labels were found in files such as '{suspicious[0]}')" if suspicious else ""
    return (
        f"'{tree.root}' has images without annotations{files}: {_TAKEN}. --images accepts images "
        "without labels, for pre-training"
    )
