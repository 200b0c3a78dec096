# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens the data sets given by ``--data``, and registers them with Detectron2.

``open_source`` recognizes the data set in a file or folder, and returns a ``DataSource``. It has a
``Source`` for each part of the data set. A ``Source`` tells how to read the part, and is saved in
``run.json``. ``read_annotations`` reads the boxes of a ``Source``.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from qbheat_det.core.errors import UserError, refuse_unreadable
from qbheat_det.core.files import file_lock, get_cache_dir, is_output_folder, parse_record
from qbheat_det.core.object_stores import fetch
from qbheat_det.core.text import format_bytes
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

from .account import Account, Item, LeftOut
from .annotated import find_annotated, mentions_keys
from .annotations import Annotations, build_annotations
from .file_tree import FileTree, is_below
from .formats import FORMATS, Labels
from .formats.base import find_foreign_labels
from .formats.yolo import find_data_folder
from .image_folder import (
    PathLike,
    account_for_folders,
    check_image_folder,
    is_new,
    register_image_folders,
)
from .image_suffixes import describe_format
from .joining import join_annotations
from .labelled_image import LabelledImage
from .layout import holds_labels, part_of, sort_into_parts
from .recognition import KINDS, Recognized, choose_parts, recognize

logger = logging.getLogger(__name__)

CLASSES = "classes"
"""Name of the format of class folders, which has no boxes."""
IMAGES = "images"
"""Name of the format of images without labels."""
JOINED = "joined"
"""Name of the format of several data sets with boxes."""
_TITLES = {CLASSES: "class folders", IMAGES: "image folders"}
_MAX_EXPANSION = 200  # ratio of the unpacked size to the size of a zip


@dataclass(frozen=True)
class Source:
    """How to read a part of a data set. It is saved as JSON with each run.

    Attributes:
        format: a key of ``FORMATS``, "classes" (class folders), "images" (no labels) or "joined".
        path: file or folder of the data set, as it was given.
        part: "train", "val", or "all" if the data set has no parts.
        image_root: folder of the images of a label file; "" for the folder of the file.
        folders: folders of images, if the format is "classes" or "images".
        labelled: whether to read the boxes or classes.
        classes: names of the classes, if the label files do not list them; () for the classes of
            the boxes.
        joined: the sources of several data sets that are joined; () for one data set. ``format`` is
            then "joined", and ``classes`` has the joined classes.
        renamed: pairs of a class name in the data sets and its name in ``classes``.
        split_file: path of a ``split.json`` that lists the images to use; "" to use all images.
        split_part: the list in this file, "train" or "val".
    """

    format: str
    path: str
    part: str = "all"
    image_root: str = ""
    folders: tuple[str, ...] = ()
    labelled: bool = True
    classes: tuple[str, ...] = ()
    joined: "tuple[Source, ...]" = ()
    renamed: tuple[tuple[str, str], ...] = ()
    split_file: str = ""
    split_part: str = ""

    @property
    def title(self) -> str:
        """Name of the format for users, such as "YOLO"."""
        if self.joined:
            return " and ".join(dict.fromkeys(source.title for source in self.joined))
        if self.has_boxes:
            return FORMATS[self.format].title
        return _TITLES[self.format]

    @property
    def has_boxes(self) -> bool:
        """Whether the format has boxes."""
        return self.format in FORMATS or bool(self.joined)

    @property
    def lists_classes(self) -> bool:
        """Whether the classes are known without the boxes."""
        return bool(self.joined) or (self.has_boxes and FORMATS[self.format].lists_classes)

    @classmethod
    def join(
        cls, sources: "Sequence[Source]", classes: Sequence[str], class_map: Mapping[str, str]
    ) -> "Source":
        """Returns the source of several data sets with boxes, see ``join_annotations``."""
        return cls(
            JOINED,
            " + ".join(source.path for source in sources),
            classes=tuple(classes),
            joined=tuple(sources),
            renamed=tuple(class_map.items()),
        )

    def without_labels(self) -> "Source":
        """Returns the source of the images alone."""
        return dataclasses.replace(self, labelled=False)

    def with_classes(self, classes: Sequence[str]) -> "Source":
        """Returns the source with these classes, or itself if its label files list the classes."""
        if not classes or not self.has_boxes or self.lists_classes:
            return self
        return dataclasses.replace(self, classes=tuple(classes))

    def with_split(self, file: str, part: str) -> "Source":
        """Returns the source of the images that a ``split.json`` lists for a part."""
        return dataclasses.replace(self, split_file=file, split_part=part)

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes that differ from their defaults, for ``run.json``."""
        content: dict[str, Any] = {}
        for attribute in dataclasses.fields(self):
            value = getattr(self, attribute.name)
            if value != attribute.default:
                content[attribute.name] = list(value) if isinstance(value, tuple) else value
        if self.joined:
            content["joined"] = [source.to_json() for source in self.joined]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any], place: str) -> "Source":
        """Reads an entry of ``run.json``. Raises a ``UserError`` if it is invalid."""
        return parse_record(cls, dict(content), place)


@dataclass(frozen=True)
class DataSource:
    """An opened data set.

    Attributes:
        train: source of the training images.
        val: source of the validation images; None if the data set has no such part.
        annotations: maps the names of the parts to their images and boxes; empty if the data set
            has no boxes.
        account: what is used and what is left out of both parts; None if it is unknown.
    """

    train: Source
    val: Source | None = None
    annotations: Mapping[str, Annotations] = field(default_factory=dict, repr=False)
    account: Account | None = field(default=None, repr=False)

    @property
    def format(self) -> str:
        """A key of ``FORMATS``, "classes" or "images"."""
        return self.train.format

    @property
    def has_boxes(self) -> bool:
        """Whether the data set has boxes."""
        return self.train.has_boxes


def open_source(path: str, image_root: str = "", *, likely_root: str = "") -> DataSource:
    """Recognizes the data set in a file, a folder or a zip.

    Args:
        path: the file, folder or zip.
        image_root: folder of the images, if ``path`` is a label file or a folder of them; "" to
            look near the label files.
        likely_root: folder in which the images of a label file are looked up first; "" for none.

    Raises:
        UserError: the path has no data set, or several.
    """
    path = unpack(path)
    if not os.path.exists(path):
        raise UserError(f"'{path}' does not exist")
    absolute = os.path.abspath(path)
    image_root = fetch(image_root)
    likely_root = fetch(likely_root)
    root = ""
    data_set = None
    if not os.path.isdir(path):
        root, data_set = _find_image_root(absolute, image_root, likely_root)
    elif image_root:
        root = os.path.abspath(image_root)
    recognized = _recognize(absolute, root)
    if recognized.format is None:
        if root:
            raise UserError(f"'{path}' contains its images: leave out the images '{image_root}'")
        sources = [
            Source(CLASSES, absolute, part, folders=(folder,))
            for part, folder in recognized.folders.items()
        ]
        val = sources[1] if len(sources) > 1 else None
        account = _account_for_classes(recognized, absolute)
        return DataSource(sources[0], val, account=account)
    name = recognized.format.name
    data_set = data_set or _read(absolute, root, name, ())
    sources = [Source(name, absolute, part, root) for part in data_set.parts]
    val = sources[1] if len(sources) > 1 else None
    return DataSource(sources[0], val, data_set.parts, data_set.account)


def find_format(path: str) -> str:
    """Returns the format of a file, folder or zip: a key of ``FORMATS``, or ``CLASSES``.

    Recognizes the data set as ``open_source`` does, but does not read its annotations. Raises a
    ``UserError`` if the path has no data set, or several.
    """
    path = unpack(path)
    if not os.path.exists(path):
        raise UserError(f"'{path}' does not exist")
    recognized = _recognize(os.path.abspath(path), "")
    if recognized.format is None:
        return CLASSES
    return recognized.format.name


def open_images(paths: Sequence[str]) -> DataSource:
    """Returns the source of images without labels in folders.

    Raises a ``UserError`` if a folder has no images.
    """
    folders = tuple(os.path.abspath(fetch(folder)) for folder in paths)
    for folder in folders:
        check_image_folder(folder)
    source = Source(IMAGES, folders[0], folders=folders, labelled=False)
    return DataSource(source, account=account_for_folders(folders))


def _find_image_root(file: str, given: str, likely: str) -> tuple[str, "_DataSet"]:
    """Finds the folder of the images of a label file. Returns it and the data set that was read.

    The candidates are ``given`` alone, or else ``likely``, the folder that a ``data.yaml`` names,
    the folder of the label file, and its parent if the folder is named like a folder of labels. The
    first with an image is used. The folder that a ``data.yaml`` names must have all of the images.

    Args:
        file: path of the label file.
        given: folder that the user has given; "" for none.
        likely: folder to try first; "" for none.

    Raises:
        UserError: the label file cannot be read, or no candidate has an image.
    """
    folder = os.path.dirname(file)
    roots = [folder]
    if holds_labels(os.path.basename(folder)):
        roots.append(os.path.dirname(folder))
    named = find_data_folder(file)
    if named:
        roots.insert(0, named)
    if given:
        roots = [os.path.abspath(given)]
    elif likely:
        roots.insert(0, os.path.abspath(likely))
    errors: list[UserError] = []
    for root in roots:
        try:
            recognized = _recognize(file, root)
            name = recognized.format.name if recognized.format else ""
            data_set = _read(file, root, name, ())
        except UserError as error:
            errors.append(error)
            continue
        if root == named and not given and not _is_complete(data_set, recognized):
            continue
        if any(part.images for part in data_set.parts.values()):
            return root, data_set
    if errors:
        raise errors[0]
    message = (
        f"the images of '{file}' were not found: set their folder with --images, or with "
        "--val-images for --val"
    )
    if data_set.account.faults:
        message += f" ({data_set.account.faults[0].message})"
    raise UserError(message)


def _is_complete(data_set: "_DataSet", recognized: Recognized) -> bool:
    """Returns whether all images and parts that the labels name were found, with label files."""
    roles = choose_parts(recognized.labels.parts) if recognized.labels else {}
    has_problem = any(part.problem for part in data_set.parts.values())
    has_missing = any(one.item == "missing image" for one in data_set.account.left_out)
    return len(data_set.parts) == len(roles) and not has_problem and not has_missing


def _recognize(path: str, image_root: str) -> Recognized:
    with refuse_unreadable(path):
        return recognize(_walk(path, image_root))


def _walk(path: str, image_root: str) -> FileTree:
    """Returns the files of a data set's folder or label file, and of the folder of its images."""
    if not os.path.isdir(path):
        return FileTree(image_root or os.path.dirname(path), label_file=path, kinds=KINDS)
    tree = FileTree(path, kinds=KINDS)
    if image_root:
        tree.prefer(image_root)
    return tree


@dataclass(frozen=True)
class _DataSet:
    """All parts of a data set with boxes, and their account."""

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
    data_set = _read(source.path, source.image_root, source.format, source.classes)
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
def _read(path: str, image_root: str, format: str, classes: tuple[str, ...]) -> _DataSet:
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


def _read_parts(path: str, image_root: str, format: str, classes: tuple[str, ...]) -> _DataSet:
    """Does the work of ``_read``, whose arguments it takes. May raise errors of any type."""
    tree = _walk(path, image_root)
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
        roles, labels_of = _split_by_folders(tree, labels_of["all"], account)
    if len(labels_of) == 2:
        _remove_overlap(tree, labels_of, roles, account)
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
    _account_for_other_files(recognized, path, mentioned | label_files, used_parts, account)
    for part in parts.values():
        account.notes += [note for note in part.note_classes() if note not in account.notes]
    return _DataSet(parts, account)


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


def _split_by_folders(
    tree: FileTree, labels: Labels, account: Account
) -> tuple[dict[str, str], dict[str, Labels]]:
    """Splits labels without parts by the images' folders, if these are named "train" and "val".

    Args:
        tree: the files of the data set.
        labels: the labels of all images.
        account: the account, to which a note is added if the labels are split.

    Returns:
        Two dicts. The first maps the roles "train" and "val" to the names of the parts, and the
        second maps the roles to the labels. If an image is in no such folder, both have the single
        role "all".
    """
    files = dict.fromkeys(image.file for image in labels.images if image.file)
    parts = sort_into_parts(tree, files, (), by_folder=True)
    roles = choose_parts(parts)
    if len(roles) < 2 or "all" in parts:
        return {"all": "all"}, {"all": labels}
    part_of_file = {file: part for part, paths in parts.items() for file in paths}
    train = dataclasses.replace(labels, images=[], is_original=False)
    val = dataclasses.replace(labels, images=[], is_original=False, left_out=[], notes=[])
    for image in labels.images:
        part = part_of_file.get(image.file, roles["train"])
        if part not in roles.values():
            image.leave_out(f"of the part '{part}'", "this part is not used", is_fault=False)
        if part == roles["val"]:
            val.images.append(image)
        else:
            train.images.append(image)
    names = " and ".join(f"'{part}'" for part in roles.values())
    account.notes.append(f"the folders of the images tell the parts {names}")
    return roles, {"train": train, "val": val}


def _remove_overlap(
    tree: FileTree, labels: dict[str, Labels], roles: Mapping[str, str], account: Account
) -> None:
    """Leaves out training images that are in the validation part too.

    There are three special cases:

    - If an image is in the folder of one part, but the labels of the other part name an image of
      the same file name, the image of the other part is marked as missing.
    - If all training images are in the validation part, the validation part is removed.
    - If the validation part has no boxes, it is removed. Training then holds out other images.

    Args:
        tree: the files of the data set.
        labels: the labels of the roles "train" and "val", which are changed.
        roles: maps the roles to the names of the parts.
        account: the account, to which notes are added.
    """
    by_file: dict[str, dict[str, LabelledImage]] = {}  # role -> path of the image -> image
    for role, labels_of_part in labels.items():
        by_file[role] = {
            image.file: image
            for image in labels_of_part.images
            if image.file and not image.exclusion
        }
    in_both = []
    for file in by_file["train"].keys() & by_file["val"].keys():
        entries = {role: images[file] for role, images in by_file.items()}
        wrong = _find_wrong_entries(tree, file, entries, roles)
        if len(wrong) == 1:
            wrong[0].file = ""
            wrong[0].mark_missing(f"its image is not there, only '{file}' of another part")
        else:
            in_both.append(file)
    if in_both and len(in_both) == len(by_file["train"]):
        account.notes.append(
            f"the part '{roles['val']}' has all images of the part '{roles['train']}', and is not "
            "used for validation"
        )
        del labels["val"]
        return
    for file in in_both:
        image = by_file["train"][file]
        image.leave_out("of the validation part", "it is used for validation", is_fault=False)
    if in_both:
        account.notes.append(f"{len(in_both):,} images of the validation part are not trained on")
    val = labels["val"]
    usable = [image for image in val.images if image.exclusion is None]
    has_no_boxes = bool(usable) and not any(image.boxes for image in usable)
    if val.problem or not val.images or has_no_boxes:
        account.notes.append(f"the part '{roles['val']}' has no labels, and is not used")
        del labels["val"]


def _find_wrong_entries(
    tree: FileTree, file: str, entries: Mapping[str, LabelledImage], roles: Mapping[str, str]
) -> list[LabelledImage]:
    """Returns the entries for an image that are in the labels of another part than its folder.

    An entry is right if the image's name in the label file, or else the path of its label file,
    tells the same part as the folder of the image.

    Args:
        tree: the files of the data set.
        file: path of an image in the labels of both parts.
        entries: its entry in the labels of each role.
        roles: maps the roles to the names of the parts.
    """
    part_of_file = part_of(tree.relative(file), by_folder=True)
    if part_of_file not in roles.values():
        return []
    wrong = []
    for role, part in roles.items():
        entry = entries[role]
        name = entry.name or tree.relative(entry.label_file or entry.file)
        if part != part_of_file and part_of(name, by_folder=True) != part_of_file:
            wrong.append(entry)
    return wrong


def _account_for_other_files(
    recognized: Recognized,
    path: str,
    mentioned: Collection[str],
    parts: Collection[str],
    account: Account,
) -> None:
    """Adds each file that is not in ``mentioned`` to the left out items of an account.

    Files in a folder that this package has written are added together, as one item.

    Args:
        recognized: the data set.
        path: the folder or file of the data set, as it was given.
        mentioned: files that the account has already: images of the labels, and label files.
        parts: names of the parts that are used.
        account: the account, which is changed.
    """
    tree = recognized.tree
    unread = frozenset(tree.unread_images)
    kinds = {file: kind for kind, files in tree.label_files.items() for file in files}
    kind_of_unused, reason_of_unused = _explain_unused(recognized, parts)
    foreign: Mapping[str, str] = {}
    if recognized.format:
        foreign = find_foreign_labels(tree, recognized.format.kinds[0].name)

    def leave_out(file: str, kind: str, reason: str, item: Item) -> None:
        account.left_out.append(
            LeftOut(kind=kind, where=f"'{file}'", reason=reason, item=item, is_fault=False)
        )

    num_written: Counter[str] = Counter()

    def is_output(file: str, written_in: Mapping[str, str]) -> bool:
        """Whether a file is output of this package, which is counted."""
        folder = written_in.get(os.path.dirname(file))
        if folder:
            num_written[folder] += 1
        return bool(folder)

    written_in = _find_output_folders(tree, mentioned)
    for file in (*tree.all_images, *tree.other_files):
        if file in mentioned:
            continue
        if is_output(file, written_in):
            continue
        is_image = file in tree.image_set
        if not is_image and file not in kinds:
            leave_out(file, "without labels", "it has no labels that are read", "other file")
            continue
        item: Item = "image" if is_image else "label file"
        part = part_of(tree.relative(file), by_folder=is_image)
        if part and part not in parts and "all" not in parts:
            leave_out(file, f"of the part '{part}'", "this part is not used", item)
        elif file in unread:
            leave_out(file, "in a format that is not read", "and no label file names it", item)
        elif file in foreign:
            reason = f"its labels are in '{foreign[file]}'"
            kind = "with labels in another format"
            account.left_out.append(LeftOut(kind=kind, where=f"'{file}'", reason=reason))
        elif is_image:
            leave_out(file, kind_of_unused, reason_of_unused, item)
        else:
            reason = f"its {kinds[file]} labels are not those of a used image"
            leave_out(file, "not used", reason, item)
    for file in sorted(tree.companions):
        if is_output(file, written_in):
            continue
        leave_out(file, "in a folder of masks or previews", "it is named like an image", "image")
    account.left_out += tree.skipped
    if tree.root != path and os.path.isdir(path):
        whole = FileTree(path)
        written_in = _find_output_folders(whole, mentioned)
        reason = "it is outside the folder of the data set"
        for file in (*whole.all_images, *whole.other_files):
            if not tree.has(file) and file not in mentioned and file not in tree.other_files:
                if is_output(file, written_in):
                    continue
                item = "image" if file in whole.image_set else "other file"
                leave_out(file, "outside the data set", reason, item)
        account.left_out += [link for link in whole.skipped if not tree.has(link.where)]
    for folder, count in num_written.items():
        reason = f"its files ({count:,}) are output of this package"
        leave_out(folder, "that is a folder of output", reason, "other file")


def _find_output_folders(tree: FileTree, mentioned: Collection[str]) -> dict[str, str]:
    """Maps the folders of files that this package has written to the outermost folder of output.

    A folder of output has no file that is in ``mentioned``, and is below the root of the tree.
    """
    files = (*tree.all_images, *tree.other_files, *tree.companions)
    folders = _list_folders_above(files, tree.root)
    in_use = _list_folders_above(mentioned, tree.root)
    written_in: dict[str, str] = {}
    for folder in sorted(folders):  # outer folders first
        above = written_in.get(os.path.dirname(folder))
        if above:
            written_in[folder] = above
        elif folder not in in_use and is_output_folder(folder):
            written_in[folder] = folder
    return written_in


def _list_folders_above(files: Iterable[str], root: str) -> set[str]:
    """Returns all folders between a root and the files below it, without the root."""
    folders: set[str] = set()
    for file in files:
        folder = os.path.dirname(file)
        while folder not in folders and folder != root and is_below(folder, root):
            folders.add(folder)
            folder = os.path.dirname(folder)
    return folders


def _explain_unused(recognized: Recognized, parts: Collection[str]) -> tuple[str, str]:
    """Returns ``LeftOut.kind`` and ``LeftOut.reason`` of images that belong to no used part."""
    labels = recognized.labels
    if labels is None:
        return "in no class folder", "only images in class folders are used"
    if labels.manifests:
        lists = " and ".join(f"'{file}'" for file in labels.manifests)
        return "in no part of the data set", f"it is not listed by {lists}"
    unused = sorted(set(labels.parts) - set(parts))
    if unused:
        names = ["what has no part" if part == "all" else f"'{part}'" for part in unused]
        return "outside the used parts", f"{' and '.join(names)} is not used"
    return "without labels", "no label file names it"


def _account_for_classes(recognized: Recognized, path: str) -> Account:
    """Returns the account of a data set of class folders, which is at ``path``."""
    tree = recognized.tree
    folders = list(recognized.folders.values())
    account = Account(notes=list(recognized.notes))
    mentioned: set[str] = set()
    for file in tree.images:
        is_inside = any(is_below(file, folder) for folder in folders)
        if is_inside and os.path.dirname(file) not in folders:
            account.used["image"] += 1
            mentioned.add(file)
    for file in tree.all_images:
        if os.path.dirname(file) in folders:
            reason = f"it is in no class folder of '{os.path.dirname(file)}'"
            account.left_out.append(
                LeftOut(kind="in no class folder", where=f"'{file}'", reason=reason)
            )
            mentioned.add(file)
    for file in tree.unread_images:
        is_inside = any(is_below(file, folder) for folder in folders)
        if is_inside and file not in mentioned:
            kind, reason = describe_format(file)
            account.left_out.append(LeftOut(kind=kind, where=f"'{file}'", reason=reason))
            mentioned.add(file)
    _account_for_other_files(recognized, path, mentioned, set(recognized.folders), account)
    return account


def register_coco_json(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers a COCO file. Raises a ``UserError`` if the name is in use for other files."""
    path = os.path.abspath(json_file)
    root = os.path.abspath(image_root)
    if not is_new(name, json_file=path, image_root=root, unlabelled=None):
        return
    DatasetCatalog.register(name, lambda: load_coco_records(path, root, name))
    MetadataCatalog.get(name).set(json_file=path, image_root=root, evaluator_type="coco")


def load_coco_records(json_file: str, image_root: str, name: str) -> list[dict[str, Any]]:
    """Returns the records of a COCO file, as Detectron2 reads them, with ``ANNOTATED_CLASSES``.

    A record has this key if not all classes are annotated in its image. ``name`` is that of the
    data set, whose metadata get the classes.
    """
    records: list[dict[str, Any]] = load_coco_json(json_file, image_root, name)
    if not mentions_keys(json_file):
        return records
    annotated = find_annotated(json.loads(Path(json_file).read_bytes()))
    index_of_id = MetadataCatalog.get(name).thing_dataset_id_to_contiguous_id
    for record in records:
        ids = annotated.get(record["image_id"])
        if ids is not None:
            record[ANNOTATED_CLASSES] = sorted(index_of_id[id_] for id_ in ids)
    return records


def register_coco_images(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers the images of a COCO file without their annotations, for pre-training.

    The file is read when the set is first loaded, and only needs the list "images". Registering the
    same files again does nothing. Raises a ``UserError`` if the name is in use for other files.
    """
    path = os.path.abspath(json_file)
    root = os.path.abspath(image_root)
    if not is_new(name, json_file=path, image_root=root, unlabelled=True):
        return
    DatasetCatalog.register(name, lambda: load_coco_images(path, root))
    MetadataCatalog.get(name).set(
        json_file=path, image_root=root, unlabelled=True, evaluator_type="reconstruction"
    )


def load_coco_images(json_file: PathLike, image_root: PathLike) -> list[dict[str, Any]]:
    """Returns ``file_name`` and ``image_id`` of every image, sorted by id.

    Raises a ``UserError`` if the file is not in COCO's format, or too many images are missing.
    """
    data_set = _read(str(json_file), str(image_root), "coco", ())
    (annotations,) = data_set.parts.values()  # named "train" if the file is train.json
    annotations.account.check()
    return list_image_records(annotations)


def list_image_records(annotations: Annotations) -> list[dict[str, Any]]:
    """Returns ``file_name`` and ``image_id`` of every image, sorted by id."""
    records = []
    for image in sorted(annotations.images, key=lambda image: int(image["id"])):
        path = os.path.join(annotations.image_root, image["file_name"])
        records.append({"file_name": path, "image_id": image["id"]})
    return records


def register_source(
    name: str,
    source: Source,
    *,
    annotations: Annotations | None = None,
    keep: Collection[str] | None = None,
) -> None:
    """Registers a source as a data set. A data set with the same name is replaced.

    Args:
        name: name of the data set.
        source: the source. Its split is ignored.
        annotations: the content of a source with boxes; by default, ``read_annotations`` reads it.
        keep: names of the images to use; None for all.

    Raises:
        UserError: a file or folder is missing, or there are no boxes.
    """
    forget_source(name)
    if not source.has_boxes:
        for folder in source.folders:
            check_image_folder(folder)
        register_image_folders(name, source.folders, labelled=source.labelled, keep=keep)
        return
    annotations = annotations or read_annotations(source)
    if source.labelled:
        _register_boxes(name, source, annotations, keep)
        return
    records = list_image_records(annotations)
    DatasetCatalog.register(name, lambda: records)
    MetadataCatalog.get(name).set(unlabelled=True, evaluator_type="reconstruction")


def _register_boxes(
    name: str, source: Source, annotations: Annotations, keep: Collection[str] | None
) -> None:
    """Registers images with boxes as a COCO file, which is written if there is none."""
    annotations.check()
    path = annotations.original
    if keep is not None or not path:
        path = _write_json(name, source.path, annotations.keep(keep))
    register_coco_json(name, path, annotations.image_root)
    ids = {category: index for index, category in enumerate(annotations.category_ids)}
    MetadataCatalog.get(name).set(
        thing_classes=list(annotations.class_names),
        thing_dataset_id_to_contiguous_id=ids,
    )


def forget_source(name: str) -> None:
    """Removes a data set if it is registered."""
    if name in DatasetCatalog:
        DatasetCatalog.remove(name)
    if name in MetadataCatalog.list():
        MetadataCatalog.remove(name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns the same folder in each call."""
    return tempfile.TemporaryDirectory(prefix="qbheat_data_")  # removed when the process ends


def _write_json(name: str, origin: str, content: Mapping[str, Any]) -> str:
    """Writes annotations to a temporary file for Detectron2, and returns its path."""
    words = re.sub(r"\W+", "_", f"{name} {Path(origin).name}")
    folder = tempfile.mkdtemp(dir=_temporary_folder().name)
    path = Path(folder) / f"{words[:100]}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def unpack(path: str) -> str:
    """Unpacks a zip into the cache folder, if this has not been done before.

    Downloads the data at an address such as s3://bucket/folder or s3://bucket/set.zip first.

    Returns the folder that has the content. If the zip has a single folder on top, returns this
    folder. Returns a path that is no zip unchanged.

    Raises:
        UserError: the file is not a valid zip, or is too large for the disk.
    """
    path = fetch(path)
    if not (path.lower().endswith(".zip") and os.path.isfile(path)):
        return path
    state = os.stat(path)
    identity = f"{os.path.abspath(path)}|{state.st_size}|{state.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = get_cache_dir() / "unpacked" / f"{Path(path).stem}_{digest}"
    if not folder.is_dir():
        lock = folder.with_name(f".{folder.name}.lock")
        with (
            refuse_unreadable(path),
            file_lock(lock, f"Waiting for another process that unpacks '{path}'"),
        ):
            if not folder.is_dir():
                _extract(path, folder)
    inner = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX"))]
    if len(inner) == 1:
        return str(inner[0])
    return str(folder)


def _extract(path: str, folder: Path) -> None:
    """Unpacks a zip, so that the folder is complete once it exists.

    Raises a ``UserError`` if the content is too large for the disk, or for an honest zip.
    """
    with (
        zipfile.ZipFile(path) as archive,
        tempfile.TemporaryDirectory(prefix=".zip_", dir=folder.parent) as partial,
    ):
        size = sum(entry.file_size for entry in archive.infolist())  # bytes
        free = shutil.disk_usage(partial).free
        if size > free or size > _MAX_EXPANSION * os.path.getsize(path):
            raise UserError(f"'{path}' would unpack to {format_bytes(size)}")
        archive.extractall(Path(partial, "set"))  # drops ".." and absolute paths
        os.replace(Path(partial, "set"), folder)
