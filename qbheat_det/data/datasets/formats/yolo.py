# Copyright (c) qbheat_det contributors. Apache-2.0.
"""YOLO's format: a text file per image, with one object per line.

A line has the class, center, width and height of an object, or its class and a polygon, which is
replaced by its bounding box. Coordinates are fractions of the image's sides. An image without a
label file has no objects.

The parts and the classes are in a *manifest*: ``data.yaml`` of Ultralytics, or ``obj.data`` of
Darknet. Nothing that a manifest names is downloaded or executed. Without a manifest, the parts are
folders, and the classes are in ``classes.txt``, ``obj.names`` or ``_darknet.labels``.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.data.checks import short
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.file_tree import FileTree, is_below, stem_of
from qbheat_det.data.datasets.image_suffixes import is_image
from qbheat_det.data.datasets.label_kinds import Ends, LabelKind, lines_like
from qbheat_det.data.datasets.labelled_image import LabelledImage
from qbheat_det.data.datasets.layout import (
    find_ending,
    find_images_of_stem,
    find_lists_of_parts,
    folders_of,
    group_per_image_files,
    pair,
    sort_into_parts,
)
from qbheat_det.data.datasets.text_files import (
    UnreadableFileError,
    number_lines,
    read_lines,
    read_text,
)

from .base import Format, Labels, LabelSet, add_unpaired, find_foreign_labels, locate_image

_MANIFEST = "yolo manifest"
_OBJECT = r"^\s*\d+(\.0*)?(\s+[-+0-9.eE]+|\s+nan){4,}\s*$"  # class and four numbers or more
_LARGEST = 10_000_000  # largest size of a manifest in bytes
_IS_DATA_YAML = re.compile(r"^[\"']?(names|nc)[\"']?\s*:", re.MULTILINE)
_HAS_PART = re.compile(r"^[\"']?(train|val|test)[\"']?\s*:", re.MULTILINE)
_HAS_LIST = re.compile(r"^\s*(train|valid|test)\s*=", re.MULTILINE)
_IS_OBJ_DATA = re.compile(r"^\s*names\s*=", re.MULTILINE)
_NAMES_FILES = (
    *("classes.txt", "obj.names", "_darknet.labels", "names.txt", "labels.txt", "class.txt"),
    "class_names.txt",
)
_NAMES_SUFFIXES = (".names", ".labels")
_LARGEST_COORDINATE = 2.0  # larger values cannot be fractions of a side
_PARENTS = 3  # number of folders above a manifest in which its paths are looked up


@dataclass(frozen=True)
class Manifest:
    """A ``data.yaml`` or ``obj.data``.

    Attributes:
        file: path of the file.
        names: class names.
        parts: maps parts to image folders, and to text files that list images.
        has_keypoints: whether lines have the points of a pose after the box.
        notes: paths that were replaced.
    """

    file: str
    names: list[str]
    parts: dict[str, list[str]]
    has_keypoints: bool = False
    notes: list[str] = field(default_factory=list)


def find_yolo(tree: FileTree) -> list[LabelSet]:
    """Finds manifests, and text files of labels without a manifest.

    Raises:
        UserError: a manifest is invalid, see ``read_manifest``.
    """
    manifests = _read_manifests(tree.label_files.get(_MANIFEST, ()))
    sets = [LabelSet(folders_of(tree, one.file), one.parts, [one.file]) for one in manifests]
    files = [path for path in tree.label_files.get("yolo", ()) if not _has_names(path)]
    if sets and not files and tree.list_other_labels("yolo"):
        sets = []  # a data.yaml beside labels in another format
    if sets:
        for place in (path for one in sets for paths in one.parts.values() for path in paths):
            if not tree.has(place):
                tree.add(_find_root(place))
        return sets
    files = [path for path in files if find_images_of_stem(tree, stem_of(path))]
    return [
        LabelSet(base, sort_into_parts(tree, own, base, by_folder=True))
        for base, own in group_per_image_files(tree, files).items()
    ]


def _is_manifest(ends: Ends) -> bool:
    text = ends.start
    is_of_darknet = _IS_OBJ_DATA.search(text) and _HAS_LIST.search(text)
    return bool(is_of_darknet or (_IS_DATA_YAML.search(text) and _HAS_PART.search(text)))


def _read_manifests(files: Sequence[str]) -> list["Manifest"]:
    """Reads manifests, one per folder. Those that cannot be used are left out if others can.

    Raises:
        UserError: no manifest can be used, or two in one folder have different classes or parts.
    """
    manifests: dict[str, Manifest] = {}
    errors = []
    for file in files:
        try:
            manifest = read_manifest(file)
        except UserError as error:
            errors.append(error)
            continue
        first = manifests.setdefault(os.path.dirname(file), manifest)
        for what, differs in (
            ("class names", first.names != manifest.names),
            ("parts", first.parts != manifest.parts),
        ):
            if differs:
                raise UserError(
                    f"'{first.file}' and '{file}' have different {what}: pass one of them with "
                    "--data"
                )
    if errors and not manifests:
        raise errors[0]
    return list(manifests.values())


def _find_root(place: str) -> str:
    """Returns the folder that has the images and the labels of an image folder or list."""
    folder = place if os.path.isdir(place) else os.path.dirname(place)
    names = folder.split(os.sep)
    if "images" in names:
        last = len(names) - 1 - names[::-1].index("images")
        return os.sep.join(names[:last]) or os.sep
    return folder


def read_manifest(file: str) -> Manifest:
    """Reads a ``data.yaml`` or ``obj.data``.

    Raises:
        UserError: the file cannot be read, or its classes or folders are invalid.
    """
    try:
        if os.path.getsize(file) > _LARGEST:
            raise UserError(f"'{file}' is too large for a data.yaml")
        text = read_text(file).content
        # All values are texts, so that names such as "off" and "0123" stay as they are written.
        content = _parse_obj_data(text) if file.endswith(".data") else yaml.load(text, _Loader)
    except (OSError, UnreadableFileError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read as YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"'{file}' is not a data.yaml of YOLO: it has no 'train'")
    notes: list[str] = []
    parts: dict[str, list[str]] = {}
    for part in ("train", "val", "test"):
        key = "valid" if part == "val" and "val" not in content else part
        if content.get(key):
            parts[part] = _resolve(file, content, key, notes)
    parts = {part: places for part, places in parts.items() if places}
    if not parts:
        raise UserError(f"'{file}' is not a data.yaml of YOLO: it has no 'train'")
    names = _read_names(file, content)
    return Manifest(file, names, parts, bool(content.get("kpt_shape")), notes)


class _Loader(yaml.BaseLoader):
    """Reads all scalars as text."""


def _parse_obj_data(text: str) -> dict[str, Any]:
    rows = (line.partition("=") for _, line in number_lines(text))
    return {key.strip(): value.strip() for key, separator, value in rows if separator}


def _read_names(file: str, content: dict[str, Any]) -> list[str]:
    names: Any = content.get("names")
    if isinstance(names, str) and file.endswith(".data"):
        found = find_ending(names, _list_folders(file))
        if not found:
            raise UserError(f"'{file}': there is no file '{names}' of class names")
        names = _read_names_file(found)
    if isinstance(names, dict):
        keys = [str(number) for number in range(len(names))]
        names = [names[key] for key in keys] if set(names) == set(keys) else None
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UserError(f"'{file}': names must list the classes, or map 0, 1, … to them")
    if empty := next((str(i) for i, name in enumerate(names) if not name.strip()), None):
        raise UserError(f"'{file}': the name of class {empty} is empty")
    count = content.get("nc", content.get("classes", str(len(names))))
    if count != str(len(names)):
        raise UserError(f"'{file}': nc is {short(count)}, but names has {len(names)} classes")
    return [name.strip() for name in names]


def _list_folders(file: str) -> list[str]:
    """Returns the folder of a manifest, and some of its parents."""
    folders = [os.path.dirname(file)]
    for _ in range(_PARENTS):
        folders.append(os.path.dirname(folders[-1]))
    return list(dict.fromkeys(folders))


def _resolve(file: str, content: dict[str, Any], key: str, notes: list[str]) -> list[str]:
    """Returns the folders and list files of a part.

    They are relative to ``path`` or to the manifest. If there is no such folder, the longest ending
    of the path that exists near the manifest is used. Raises a ``UserError`` if the training images
    are not found; a missing validation or test part is only noted.
    """
    root = content.get("path") or ""
    entries = content[key] if isinstance(content[key], list) else [content[key]]
    folder = os.path.dirname(file)
    found = []
    for entry in entries:
        if not isinstance(entry, str) or not isinstance(root, str):
            raise UserError(f"'{file}': {key} and path must be paths, not {short(entry)}")
        exact = os.path.normpath(os.path.join(folder, root, entry))
        if any(mark in entry for mark in "*?["):
            found += sorted(filter(_has_images, glob.glob(exact)))
            files = [path for path in glob.glob(exact) if os.path.isfile(path)]
            found += sorted({os.path.dirname(path) for path in files if is_image(path)})
            if found:
                continue
        place = exact if _has_images(exact) else _find_elsewhere(file, root, entry)
        if place:
            found.append(place)
            if place != exact:
                notes.append(f"'{file}': '{place}' is used for the path '{entry}' of {key}")
        elif key == "train":
            raise UserError(
                f"'{file}': {key} is '{entry}', but there is no such folder or list of images "
                f"(.txt) in '{os.path.join(folder, root)}'"
            )
        else:
            notes.append(f"'{file}': there is no '{entry}', so the part {key} is missing")
    return found


def _has_images(place: str) -> bool:
    return os.path.isdir(place) or (place.lower().endswith(".txt") and os.path.isfile(place))


def _find_elsewhere(file: str, root: str, entry: str) -> str | None:
    """Finds the longest ending of a path below the folder of a manifest, or its parents."""
    near, *above = _list_folders(file)
    path = f"{root}/{entry}"
    # Elsewhere, one name alone, such as "images", may belong to another data set.
    found = find_ending(path, [near]) or find_ending(path, above, min_names=2)
    return found if found and _has_images(found) else None


class _Lists(NamedTuple):
    """What a YOLO data set lists: its label files and classes.

    Attributes:
        label_files: files with the labels of one image each.
        names: class names.
        files: files that list classes or images.
        notes: what was assumed or replaced.
        has_keypoints: whether lines have the points of a pose after the box.
    """

    label_files: list[str]
    names: list[str]
    files: list[str]
    notes: list[str]
    has_keypoints: bool = False


def _open_manifest(tree: FileTree, file: str) -> _Lists:
    manifest = read_manifest(file)
    places = [path for own in manifest.parts.values() for path in own]
    lists = [path for path in places if os.path.isfile(path)]
    every = tree.label_files.get("yolo", ())
    label_files = [path for path in every if not _has_names(path) and path not in lists]
    files, notes = [file, *lists], list(manifest.notes)
    near = [path for path in tree.others if _has_names(path)]
    if file.endswith(".data"):
        files += [path for path in near if _read_names_file(path) == manifest.names]
    if other := next((path for path in near if _read_names_file(path) != manifest.names), None):
        notes.append(f"the class names are those of '{file}', and not of '{other}'")
    return _Lists(label_files, manifest.names, files, notes, manifest.has_keypoints)


def _open_folder(tree: FileTree, labels: LabelSet) -> _Lists:
    names, notes, files = _find_names(tree, labels)
    for path in _find_lists(tree, labels):
        notes.append(f"'{path}' is not used: a data.yaml must name the lists of images")
    label_files = [path for own in labels.parts.values() for path in own]
    return _Lists(label_files, names, files, notes)


def read_yolo(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the label files of a part's images, see ``Format.read``."""
    if labels.manifests:
        lists = _open_manifest(tree, labels.manifests[0])
    else:
        lists = _open_folder(tree, labels)
    pairs = pair(tree, lists.label_files)
    label_of = {image: file for file, image in pairs.image_of.items()}
    result = Labels([], files=lists.files, notes=lists.notes)
    result.categories = [{"id": number, "name": name} for number, name in enumerate(lists.names)]
    wanted = _list_images(tree, labels, part, result)
    if not labels.manifests:  # other images, such as pictures of a web page, are not background
        folders = {os.path.dirname(path) for path in label_of}
        wanted = {path: "" for path in wanted if os.path.dirname(path) in folders}
    own = set(wanted)
    folders = {os.path.dirname(label_of[path]) for path in wanted if path in label_of}
    pairs.doubles = {path: first for path, first in pairs.doubles.items() if path in own}
    pairs.orphans = {
        file: reason for file, reason in pairs.orphans.items() if os.path.dirname(file) in folders
    }
    pairs.spares = {
        file: reason for file, reason in pairs.spares.items() if os.path.dirname(file) in folders
    }
    foreign = find_foreign_labels(tree, "yolo")
    num_background = 0
    for path, name in wanted.items():
        if path in pairs.doubles:
            continue
        file = label_of.get(path, "")
        image = LabelledImage(file or path, name, path, file)
        result.images.append(image)
        if file:
            read_label_file(image, lists.names, has_keypoints=lists.has_keypoints)
        elif path in foreign:
            image.leave_out("with labels in another format", f"its labels are in '{foreign[path]}'")
        else:
            num_background += 1
    if num_background:
        result.notes.append(
            f"{num_background:,} of {len(wanted):,} images have no label file: they are used as "
            "images without objects"
        )
    if wanted and not folders:
        first = next(iter(wanted))
        usual = os.path.splitext(first.replace("/images/", "/labels/"))[0] + ".txt"
        result.problem = f"no image of '{part}' has a label file, such as '{usual}'"
    add_unpaired(result, pairs)
    return result


def _list_images(tree: FileTree, labels: LabelSet, part: str, result: Labels) -> dict[str, str]:
    """Returns the images of a part, and their names in a list, or "".

    Images that a list names, and that are missing, are added to the result.

    Raises a ``UserError`` if a list cannot be read.
    """
    if not labels.manifests:
        return dict.fromkeys(_list_images_of_folders(tree, labels, part), "")
    images: dict[str, str] = {}
    for place in labels.parts[part]:
        if os.path.isdir(place):
            own = [path for path in tree.all_images if is_below(path, place)]
            if not own:  # a link to a folder that is searched already
                real = os.path.realpath(place)
                own = [path for path in tree.all_images if is_below(path, real)]
            images.update(dict.fromkeys(own, ""))
            continue
        try:
            lines = read_lines(place)
        except UnreadableFileError as error:
            raise UserError(f"'{place}': {error}") from error
        for number, name in lines:
            image = LabelledImage(f"{place}, line {number}", name)
            exact = os.path.normpath(os.path.join(os.path.dirname(place), name))
            image.file = exact if exact in tree.image_set else ""
            locate_image(tree, image, place, part)
            if image.file:
                images[image.file] = name
            else:
                result.images.append(image)
    return images


def _list_images_of_folders(tree: FileTree, labels: LabelSet, part: str) -> list[str]:
    """Returns the images of a part of a data set without a manifest."""
    base = os.path.join(tree.root, *labels.base)
    images = [path for path in tree.all_images if is_below(path, base)]
    return sort_into_parts(tree, images, labels.base, by_folder=True).get(part, [])


def _has_names(path: str) -> bool:
    return os.path.basename(path).lower() in _NAMES_FILES


def _read_names_file(path: str) -> list[str]:
    """Returns the class names in a file, one per line.

    Raises:
        UserError: the file cannot be read, or has a blank line before its last name.
    """
    try:
        lines = [line.strip() for line in read_text(path).content.split("\n")]
    except UnreadableFileError as error:
        raise UserError(f"'{path}': {error}") from error
    while lines and not lines[-1]:
        lines.pop()
    if "" in lines:
        raise UserError(
            f"'{path}', line {lines.index('') + 1}: the name of class {lines.index('')} is missing"
        )
    return lines


def _find_lists(tree: FileTree, labels: LabelSet) -> list[str]:
    """Returns files such as "train.txt" in the folder of a data set and above."""
    base = os.path.join(tree.root, *labels.base)
    folders = {os.path.dirname(path) for path in tree.others}
    above = sorted(folder for folder in folders if is_below(base, folder))
    return [path for folder in above for path in find_lists_of_parts(tree, folder).values()]


def _find_names(tree: FileTree, labels: LabelSet) -> tuple[list[str], list[str], list[str]]:
    """Returns the class names of a data set without a manifest, notes, and the files of names."""
    base = os.path.join(tree.root, *labels.base)
    near = [
        path
        for path in tree.others
        if _has_names(path) or path.lower().endswith(_NAMES_SUFFIXES)
        if is_below(path, base) or is_below(base, os.path.dirname(path))
    ]
    lists = {path: _read_names_file(path) for path in near}
    lists = {path: names for path, names in lists.items() if names}
    if lists:
        first, *others = lists
        if other := next((path for path in others if lists[path] != lists[first]), None):
            raise UserError(
                f"'{first}' and '{other}' have different class names: keep one of them, or write a "
                "data.yaml"
            )
        return lists[first], [], list(lists)
    files = [path for own in labels.parts.values() for path in own]
    count = 1
    for file in files:
        try:
            words = [line.split()[0] for _, line in read_lines(file)]
        except UnreadableFileError:
            continue
        numbers = [int(word) for word in words if word.isdecimal() and len(word) < 4]
        count = max(count, *(number + 1 for number in numbers), 1)
    note = f"'{base}': no classes.txt names the classes, so they are named 0 to {count - 1}"
    return [str(number) for number in range(count)], [note], []


def read_label_file(
    image: LabelledImage, names: Sequence[str], *, has_keypoints: bool = False
) -> None:
    """Adds the boxes in an image's label file to the image."""
    try:
        text = read_text(image.label_file).content
    except UnreadableFileError as error:
        file = image.label_file
        image.reason = LeftOut("that cannot be read", file, str(error), "label file")
        return
    for number, line in number_lines(text):
        with image.reading(f"{image.label_file}, line {number}") as place:
            _add_line(image, place, line, names, has_keypoints=has_keypoints)


def _add_line(
    image: LabelledImage, place: str, line: str, names: Sequence[str], *, has_keypoints: bool
) -> None:
    """Adds the object in a line to an image. Raises a ``ValueError`` if the line is invalid."""
    try:
        number, *values = map(float, line.split())
    except ValueError:
        must = "must be numbers, class, x, y, width and height"
        raise ValueError(f"{must}, but is {short(line)}") from None
    count = len(names)
    if number not in range(count):
        known = f"none of the {count} in names, which are numbered from 0"
        raise ValueError(f"class {line.split()[0]} is {known}")
    # Behind a box, there may be a confidence, the number of a track, or the points of a pose.
    is_track = len(values) == 6 and line.split()[-1].isdecimal()
    has_points = len(values) > 6 and not (len(values) - 4) % 3 and set(values[6::3]) <= {0, 1, 2}
    if has_keypoints or is_track or has_points or len(values) == 5:
        values = values[:4]
    if len(values) < 4 or len(values) % 2:
        must = "must be class, x, y, width and height, or class and a polygon"
        raise ValueError(f"{must}, but has {len(values) + 1} numbers")
    if not all(abs(value) <= _LARGEST_COORDINATE for value in values):
        must = "must be fractions of the image's sides, from 0 to 1"
        raise ValueError(f"{must}, but is {short(line)}")
    if len(values) == 4:
        x, y, width, height = values
        if width < 0 or height < 0:
            raise ValueError(f"has a negative width or height: {short(line)}")
        values = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    points = zip(values[::2], values[1::2], strict=True)
    image.add(place, names[int(number)], points, is_relative=True, category=int(number))


YOLO = Format(
    "yolo",
    "YOLO",
    (
        LabelKind("yolo", (".txt",), lines_like(_OBJECT), has_one_image=True),
        LabelKind(_MANIFEST, (".yaml", ".yml", ".data"), _is_manifest, names_others=True),
    ),
    find_yolo,
    read_yolo,
    data="a `data.yaml` of Ultralytics or an `obj.data` of Darknet, or a folder with one of them; "
    "or a folder of images with a `.txt` file for each image, beside it or in `labels/`",
    images="the folders or lists (`.txt`) that the file names, or beside the labels. Without a "
    "`data.yaml`, class names come from `classes.txt`, `obj.names` or `_darknet.labels`; without "
    "such a file they are numbers",
    lists_classes=True,
)
