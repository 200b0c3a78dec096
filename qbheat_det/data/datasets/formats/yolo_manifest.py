# Copyright (c) qbheat_det contributors. Apache-2.0.
"""YOLO's manifests, which name the parts and the classes of a data set.

A *manifest* is a ``data.yaml`` of Ultralytics, or an ``obj.data`` of Darknet. Nothing that it names
is downloaded or executed.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.core.yaml_text import load_yaml
from qbheat_det.data.checks import short
from qbheat_det.data.datasets.file_tree import is_below
from qbheat_det.data.datasets.image_suffixes import is_image
from qbheat_det.data.datasets.label_kinds import Ends
from qbheat_det.data.datasets.locating import MAX_PATH, find_ending
from qbheat_det.data.datasets.pairing import split_at_last
from qbheat_det.data.datasets.text_files import (
    UnreadableFileError,
    number_lines,
    read_lines,
    read_text,
)

MANIFEST_SUFFIXES = (".yaml", ".yml", ".data")
_MAX_MANIFEST_SIZE = 10_000_000  # bytes
_IS_DATA_YAML = re.compile(r"^[\"']?(names|nc)[\"']?\s*:", re.MULTILINE)
_HAS_PART = re.compile(r"^[\"']?(train|val|test)[\"']?\s*:", re.MULTILINE)
_HAS_LIST = re.compile(r"^\s*(train|valid|test)\s*=", re.MULTILINE)
_IS_OBJ_DATA = re.compile(r"^\s*names\s*=", re.MULTILINE)
_NUM_PARENTS = 3  # folders above a manifest in which its paths are looked up


@dataclass(frozen=True)
class Manifest:
    """A ``data.yaml`` or ``obj.data``.

    Attributes:
        file: path of the file.
        names: class names.
        parts: maps "train", "val" and "test" to their image folders and to text files that list
            images.
        has_keypoints: whether lines have the points of a pose after the box.
        notes: which paths were replaced or are missing, one sentence each.
        folder: the existing folder that the field "path" names; "" if there is none.
    """

    file: str
    names: list[str]
    parts: dict[str, list[str]]
    has_keypoints: bool = False
    notes: list[str] = field(default_factory=list)
    folder: str = ""

    @property
    def places(self) -> list[str]:
        """The image folders and the lists of images of all parts."""
        return [place for places in self.parts.values() for place in places]


def is_manifest(ends: Ends) -> bool:
    text = ends.start
    if _IS_OBJ_DATA.search(text) and _HAS_LIST.search(text):  # of Darknet
        return True
    return bool(_IS_DATA_YAML.search(text) and _HAS_PART.search(text))


def read_manifests(files: Sequence[str]) -> list[Manifest]:
    """Reads manifests, and returns one for each folder. Skips invalid ones if others are valid.

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
        difference = ""
        if first.names != manifest.names:
            difference = "class names"
        elif first.parts != manifest.parts:
            difference = "parts"
        if difference:
            raise UserError(
                f"'{first.file}' and '{file}' have different {difference}: pass one of them with "
                "--data"
            )
    if errors and not manifests:
        raise errors[0]
    return list(manifests.values())


def find_data_folder(file: str) -> str:
    """Returns the folder that has all images and labels of a manifest, by its field "path".

    If "path" names a folder outside of the manifest's folder, other data sets may be there too.
    Then returns the innermost folder that has all images.

    Returns "" if the field is missing or names no folder, if this folder contains the manifest, or
    if images are outside of it. Also returns "" if the file is no valid manifest.
    """
    if not file.lower().endswith(MANIFEST_SUFFIXES):
        return ""
    try:
        manifest = read_manifest(file)
        if not manifest.folder:
            return ""
        folder = find_root(manifest.folder)
        if is_below(file, folder) or not all(is_below(place, folder) for place in manifest.places):
            return ""
        if not is_below(folder, os.path.dirname(file)):
            folder = os.path.commonpath([find_root(place) for place in manifest.places])
        lists = [place for place in manifest.places if os.path.isfile(place)]
        has_others = any(_lists_images_outside(path, folder) for path in lists)
    except (UserError, UnreadableFileError):  # reading the data set explains it
        return ""
    return "" if has_others else folder


def _lists_images_outside(file: str, folder: str) -> bool:
    """Returns whether a list of images names an existing file outside of a folder.

    Raises an ``UnreadableFileError`` if the list cannot be read.
    """
    parent = os.path.dirname(file)
    for _, name in read_lines(file):
        exact = os.path.normpath(os.path.join(parent, name))
        if not is_below(exact, folder) and "\0" not in exact and os.path.isfile(exact):
            return True
    return False


def find_root(place: str) -> str:
    """Returns the folder to search for the images and labels of an image folder or list.

    This is the folder above "images", if the path has a folder of this name.
    """
    folder = place if os.path.isdir(place) else os.path.dirname(place)
    above, _, _ = split_at_last(folder, "images")
    return above or folder


def read_manifest(file: str) -> Manifest:
    """Reads a ``data.yaml`` or ``obj.data``.

    Raises:
        UserError: the file cannot be read, or its classes or folders are invalid.
    """
    try:
        if os.path.getsize(file) > _MAX_MANIFEST_SIZE:
            raise UserError(f"'{file}' is too large for a data.yaml")
        text = read_text(file).content
        # All values are texts, so that names such as "off" and "0123" stay as they are written.
        if file.endswith(".data"):
            content = _parse_obj_data(text)
        else:
            content = load_yaml(text, scalars_as_text=True)
    except (OSError, UnreadableFileError, yaml.YAMLError) as error:
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
    path = content.get("path")
    folder = os.path.normpath(os.path.join(os.path.dirname(file), path)) if path else ""
    if not os.path.isdir(folder):
        folder = ""
    return Manifest(file, names, parts, bool(content.get("kpt_shape")), notes, folder)


def _parse_obj_data(text: str) -> dict[str, Any]:
    """Returns the fields of an ``obj.data``, which has lines "key = value"."""
    content = {}
    for _, line in number_lines(text):
        key, separator, value = line.partition("=")
        if separator:
            content[key.strip()] = value.strip()
    return content


def _read_names(file: str, content: dict[str, Any]) -> list[str]:
    """Returns the class names that a manifest lists, or that are in the file that it names.

    Raises a ``UserError`` if there are no names, or their number differs from the manifest's.
    """
    names: Any = content.get("names")
    if isinstance(names, str) and file.endswith(".data"):
        names_file = find_ending(names, _list_folders(file))
        if not names_file:
            raise UserError(f"'{file}': there is no file '{names}' of class names")
        names = read_names_file(names_file)
    if isinstance(names, dict):
        keys = [str(number) for number in range(len(names))]
        if set(names) == set(keys):
            names = [names[key] for key in keys]
    is_list_of_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not names or not is_list_of_texts:
        raise UserError(f"'{file}': names must list the classes, or map 0, 1, … to them")
    for number, name in enumerate(names):
        if not name.strip():
            raise UserError(f"'{file}': the name of class {number} is empty")
    count = content.get("nc", content.get("classes", str(len(names))))
    if count != str(len(names)):
        raise UserError(f"'{file}': nc is {short(count)}, but names has {len(names)} classes")
    return [name.strip() for name in names]


def _list_folders(file: str) -> list[str]:
    """Returns the folder of a manifest and its ``_NUM_PARENTS`` nearest parents."""
    folders = [os.path.dirname(file)]
    for _ in range(_NUM_PARENTS):
        folders.append(os.path.dirname(folders[-1]))
    return list(dict.fromkeys(folders))


def _resolve(file: str, content: dict[str, Any], key: str, notes: list[str]) -> list[str]:
    """Returns the existing image folders and lists of images of a part.

    Paths in a manifest are relative to its folder and its field "path". If such a path does not
    exist, the longest ending of it that exists in or above the manifest's folder is used.

    Args:
        file: path of the manifest.
        content: content of the manifest.
        key: field of the manifest that has the paths of the part.
        notes: list to which a note is added for each path that is replaced or missing.

    Raises:
        UserError: a path of the training part was not found, or an entry is no path.
    """
    root = content.get("path") or ""
    entries = content[key] if isinstance(content[key], list) else [content[key]]
    folder = os.path.dirname(file)
    places: list[str] = []
    for entry in entries:
        if not isinstance(entry, str) or not isinstance(root, str):
            raise UserError(f"'{file}': {key} and path must be paths, not {short(entry)}")
        if len(root) + len(entry) > MAX_PATH:
            raise UserError(f"'{file}': {key} is too long for a path: {short(entry)}")
        exact = os.path.normpath(os.path.join(folder, root, entry))
        is_pattern = any(mark in entry for mark in "*?[")
        if is_pattern:
            matches = glob.glob(exact)
            places += sorted(filter(_is_place, matches))
            images = [path for path in matches if os.path.isfile(path) and is_image(path)]
            places += sorted({os.path.dirname(path) for path in images})
            if places:
                continue
        if _is_place(exact):
            places.append(exact)
            continue
        place = _find_elsewhere(file, root, entry)
        if place:
            places.append(place)
            notes.append(f"'{file}': '{place}' is used for the path '{entry}' of {key}")
        elif key == "train":
            raise UserError(
                f"'{file}': {key} is '{entry}', but there is no such folder or list of images "
                f"(.txt) in '{os.path.join(folder, root)}'"
            )
        else:
            notes.append(f"'{file}': there is no '{entry}', so the part {key} is missing")
    return places


def _is_place(path: str) -> bool:
    """Returns whether a path is a folder, or a text file that may list images."""
    return os.path.isdir(path) or (path.lower().endswith(".txt") and os.path.isfile(path))


def _find_elsewhere(file: str, root: str, entry: str) -> str | None:
    """Returns the longest ending of a manifest's path that exists near the manifest, or None.

    Args:
        file: path of the manifest.
        root: the field "path" of the manifest, or "".
        entry: path of a folder or a list of images in the manifest.
    """
    near, *above = _list_folders(file)
    path = f"{root}/{entry}"
    # In the folders above, a single name such as "images" may belong to another data set.
    place = find_ending(path, [near]) or find_ending(path, above, min_names=2)
    if not place or not _is_place(place):
        return None
    return place


def read_names_file(path: str) -> list[str]:
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
        number = lines.index("")
        raise UserError(f"'{path}', line {number + 1}: the name of class {number} is missing")
    return lines
