# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What every format of data sets provides."""

import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import short
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import LabelKind
from qbheat_det.data.datasets.labelled_image import LabelledImage, describe
from qbheat_det.data.datasets.layout import (
    Folders,
    group_by_base,
    group_per_image_files,
    sort_into_parts,
)
from qbheat_det.data.datasets.locating import (
    locate,
)
from qbheat_det.data.datasets.pairing import (
    Pairs,
    fits_label_file,
    pair,
)
from qbheat_det.data.datasets.text_files import UnreadableFileError, read_text

Category = dict[str, Any]


@dataclass(frozen=True)
class LabelSet:
    """A data set of one format in a tree of files, before its labels are read.

    Attributes:
        base: names of the folders from the tree's root to the data set; () for the root itself.
        parts: maps each part ("train", "val", "test" or "all") to what ``Format.read`` needs, such
            as a list of label files.
        manifests: files that list the classes, or the images of each part.
    """

    base: Folders
    parts: Mapping[str, Any]
    manifests: Sequence[str] = ()


@dataclass
class Labels:
    """The labels of a part of a data set, such as its training part.

    Attributes:
        images: images with their boxes, and images that cannot be used.
        categories: COCO's categories in the order of their ids; None if the label files do not list
            the classes.
        files: label files that have been read and belong to more than one image.
        left_out: boxes whose image is unknown.
        notes: what was assumed or replaced, one sentence each.
        problem: why the images have no labels; "" if they have some.
        is_original: whether the labels are exactly the content of one COCO file.
    """

    images: list[LabelledImage]
    categories: list[Category] | None = None
    files: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    is_original: bool = False


class Format(NamedTuple):
    """A row of the table of formats.

    Attributes:
        name: key of the format in ``run.json``.
        title: name of the format for users.
        kinds: the kinds of files that the format has, and how they are recognized.
        find: returns the data sets of this format in a tree of files.
        read: reads the labels of a part of a data set, and finds its images. Raises a ``UserError``
            if the label files cannot be read.
        data: text for the documentation: which files or folders ``--data`` accepts.
        images: text for the documentation: where the images are.
        lists_classes: whether the label files list the classes. If not, the classes are those of
            the boxes.
        is_last: whether a data set with as many images in another format is preferred.
    """

    name: str
    title: str
    kinds: tuple[LabelKind, ...]
    find: Callable[[FileTree], list[LabelSet]]
    read: Callable[[FileTree, LabelSet, str], Labels]
    data: str
    images: str
    lists_classes: bool = False
    is_last: bool = False


Reader = Callable[[str], Iterable[LabelledImage]]
Content = TypeVar("Content")

ONLY_CLASS = "object"
"""The class of all objects, if the label files have no classes."""
NAME_KEYS = ("label", "class", "name", "category", "type")
"""Names of the attribute that has the class of an object, in the order of preference."""


def find_by_kind(*kinds: str) -> Callable[[FileTree], list[LabelSet]]:
    """Returns a function for ``Format.find``, if each label file has the labels of many images."""

    def find(tree: FileTree) -> list[LabelSet]:
        files = [path for kind in kinds for path in tree.label_files.get(kind, ())]
        return find_sets(tree, files)

    return find


def find_sets(tree: FileTree, files: Iterable[str]) -> list[LabelSet]:
    """Groups label files by data set, and by part within each data set."""
    groups = group_by_base(tree, files)
    return [LabelSet(base, sort_into_parts(tree, group, base)) for base, group in groups.items()]


def read_with(read_file: Reader, title: str) -> Callable[[FileTree, LabelSet, str], Labels]:
    """Returns a function for ``Format.read``, if each label file has the labels of many images.

    ``read_file`` yields the images of one label file. ``title`` names the format in messages.
    """

    def read(tree: FileTree, labels: LabelSet, part: str) -> Labels:
        result = Labels(images=[], files=list(labels.parts[part]))
        for file in result.files:
            try:
                result.notes += note_encoding(file)
                images = list(read_file(file))
            except UserError:
                raise
            except UnreadableFileError as error:
                raise UserError(f"'{file}': {error}") from error
            except Exception as error:
                reason = f"{type(error).__name__}: {describe(error)}"
                raise UserError(f"'{file}' is not a file of {title} ({reason})") from error
            for image in images:
                locate_image(tree, image, file, part)
            result.images += images
        return result

    return read


def find_per_image(kind: str) -> Callable[[FileTree], list[LabelSet]]:
    """Returns a function for ``Format.find``, if each label file has the labels of one image."""

    def find(tree: FileTree) -> list[LabelSet]:
        groups = group_per_image_files(tree, tree.label_files.get(kind, ()))
        return [
            LabelSet(base, sort_into_parts(tree, group, base, by_folder=True))
            for base, group in groups.items()
        ]

    return find


def read_per_image(
    parse: Callable[[str], Content],
    add_boxes: Callable[[LabelledImage, Content], None],
    find_name: Callable[[Content], str] = lambda content: "",
) -> Callable[[FileTree, LabelSet, str], Labels]:
    """Returns a function for ``Format.read``, if each label file has the labels of one image.

    Args:
        parse: returns the content of a label file. Raises an ``UnreadableFileError`` if it cannot
            be read.
        add_boxes: adds the boxes in this content, and the size of the image, to the image.
        find_name: returns the file name of the image in this content; "" if it has none.
    """

    def read(tree: FileTree, labels: LabelSet, part: str) -> Labels:
        result = Labels(images=[], files=list(labels.manifests))
        files: Sequence[str] = labels.parts[part]
        contents: dict[str, Content] = {}
        errors: dict[str, str] = {}
        names: dict[str, str] = {}
        for file in files:
            try:
                contents[file] = parse(file)
                names[file] = find_name(contents[file])
            except Exception as error:
                errors[file] = describe(error)
        pairs = pair(tree, files, names)
        find_by_name(tree, pairs, names, part, result)
        for file, path in pairs.image_of.items():
            image = LabelledImage(file, file=path, label_file=file)
            result.images.append(image)
            if file not in errors:
                try:
                    add_boxes(image, contents[file])
                except Exception as error:
                    errors[file] = describe(error)
            if file in errors:
                image.exclusion = LeftOut(
                    kind="that cannot be read", where=file, reason=errors[file], item="label file"
                )
        for file in pairs.orphans.keys() & errors.keys():
            pairs.orphans[file] += f", and {errors[file]}"
        add_unpaired(result, pairs)
        return result

    return read


def find_by_name(
    tree: FileTree, pairs: Pairs, names: Mapping[str, str], part: str, result: Labels
) -> None:
    """Finds the images of label files without an image of the same name, by the names in them.

    Also notes how many label files contain the name of another image than the one that has their
    file name. Such a label file was probably renamed together with its image.

    Args:
        tree: the files of the data set.
        pairs: the images that were found by file names. Those that are found here are added.
        names: maps label files to the names of images in them.
        part: the part of the data set.
        result: the labels of the part, whose notes are extended.
    """
    num_renamed = 0
    for file, path in pairs.image_of.items():
        name = names.get(file, "")
        if name and name != os.path.basename(path):
            named_image = locate(tree, name, file, part)
            if isinstance(named_image, str) and named_image != path:
                num_renamed += 1
    if num_renamed:
        result.notes.append(
            f"{num_renamed:,} label files name another image than that of their own name: the "
            "boxes belong to the image of the same name"
        )
    label_file_of = {path: file for file, path in pairs.image_of.items()}
    folders = {os.path.dirname(path) for path in label_file_of}
    for file in list(pairs.orphans):
        name = names.get(file, "")
        if not name:
            continue
        image = locate(tree, name, file, part)
        if not isinstance(image, str):
            pairs.orphans[file] += f", nor one image '{name}'"
        elif image in label_file_of:
            pairs.orphans[file] += f", and '{image}' has the labels of '{label_file_of[image]}'"
        elif folders and not fits_label_file(image, file, folders):
            pairs.orphans[file] += f", and '{image}' is in another folder"
        else:
            del pairs.orphans[file]
            pairs.image_of[file] = image
            label_file_of[image] = file


def locate_image(tree: FileTree, image: LabelledImage, label_file: str, part: str) -> None:
    """Finds the file of an image by its name, and sets ``image.file``.

    If no file or several files have the name, sets ``image.exclusion``. Images that have a file or
    an exclusion already are not changed.
    """
    image.entry_file = label_file
    if image.exclusion or image.file:
        return
    if not isinstance(image.name, str) or not image.name.strip() or "\0" in image.name:
        image.mark_missing(f"its image must be a file name, not {short(image.name)}")
        return
    located = locate(tree, image.name, label_file, part)
    if isinstance(located, str):
        image.file = located
    elif located:
        file_name = os.path.basename(image.name.replace("\\", "/"))
        reason = (
            f"{len(located)} images have the name '{file_name}', such as '{located[0]}': choose "
            "their folder with --images"
        )
        image.leave_out("of an ambiguous name", reason)
    else:
        image.mark_missing(f"there is no image {short(image.name)} below '{tree.root}'")


def find_foreign_labels(tree: FileTree, kind: str) -> dict[str, str]:
    """Maps images to their label files of any other kind than ``kind``.

    Only kinds whose files have the labels of one image count.
    """
    files = tree.list_other_labels(kind)
    if not files:
        return {}
    return {path: file for file, path in pair(tree, files).image_of.items()}


def choose_name(attributes: Mapping[str, Any]) -> object:
    """Returns the class of an object, or None if it has none.

    It is the first attribute of ``NAME_KEYS`` with a value. If the object has no such attribute, it
    is the first attribute with a value.
    """
    keys_in_lower_case = {str(key).strip().lower(): key for key in attributes}
    keys = [keys_in_lower_case[key] for key in NAME_KEYS if key in keys_in_lower_case]
    for key in keys or attributes:
        value = choose_option(attributes[key])
        if value is not None:
            return value
    return None


def choose_option(value: object) -> object:
    """Returns the value of an attribute, or the checked one of several options.

    Returns None if the value is blank, or no option is checked.
    """
    if isinstance(value, dict):
        value = next((name for name, is_checked in value.items() if is_checked), None)
    if value is None or not str(value).strip():
        return None
    return value


def find_path(address: str) -> str:
    """Returns the file's path in a URL. Returns a path as it is, with percent signs decoded.

    In URLs of Label Studio, the path of a local file is the parameter ``d`` of the query.
    """
    url = urllib.parse.urlsplit(address)
    path = address
    if "://" in address:
        path = url.path
    for parameter in url.query.split("&"):
        if parameter.startswith("d="):
            path = parameter.removeprefix("d=")
            break
    return os.fsdecode(urllib.parse.unquote_to_bytes(os.fsencode(path)))


def note_encoding(file: str) -> list[str]:
    """Returns a note if a file is not in Unicode."""
    if file.lower().endswith(".xml"):  # declares its encoding
        return []
    encoding = read_text(file).encoding
    if not encoding:
        return []
    return [f"'{file}' is not in Unicode, and is read as {encoding}"]


def add_unpaired(result: Labels, pairs: Pairs) -> None:
    """Adds the label files and images that have not been paired to the images that are left out."""
    for file, reason in pairs.orphans.items():
        image = LabelledImage(file, label_file=file)
        image.exclusion = LeftOut(
            kind="without an image", where=file, reason=reason, item="label file"
        )
        result.images.append(image)
    for file, reason in pairs.spares.items():
        image = LabelledImage(file, label_file=file)
        image.exclusion = LeftOut(
            kind="of images with other labels",
            where=file,
            reason=reason,
            item="label file",
            is_fault=False,
        )
        result.images.append(image)
    for path, chosen in pairs.doubles.items():
        image = LabelledImage(path, file=path)
        reason = f"its label file is used for '{chosen}', which has the same name"
        image.leave_out("with the label file of another", reason, is_fault=False)
        result.images.append(image)
