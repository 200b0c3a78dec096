# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pascal VOC's format: an XML file per image.

The XML files may be anywhere: in ``Annotations`` beside ``JPEGImages``, beside the images as
LabelImg writes them, or in a folder of any other name. The image of a.xml is a.jpg. If there is no
such image, it is the image that the file names.

Pixels are numbered from 1, as in VOC, so a box from xmin 1 to xmax 100 is 100 pixels wide.
Difficult objects become crowds, which training and evaluation ignore.
"""

import os
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets.file_tree import FileTree, stem_of
from qbheat_det.data.datasets.label_kinds import Ends, LabelKind
from qbheat_det.data.datasets.labelled_image import LabelledImage
from qbheat_det.data.datasets.layout import (
    Folders,
    find_lists_of_parts,
    group_per_image_files,
    sort_into_parts,
)
from qbheat_det.data.datasets.text_files import UnreadableFileError, parse_xml, read_lines

from .base import Format, Labels, LabelSet, read_per_image


def find_voc(tree: FileTree) -> list[LabelSet]:
    """Finds XML files.

    Files such as ``ImageSets/Main/train.txt`` list the parts. Without them, folders tell the parts.
    """
    files = tree.label_files.get("voc", ())
    sets = []
    for base, group in group_per_image_files(tree, files).items():
        lists = _find_lists(tree, base)
        if lists:
            sets.append(LabelSet(base, lists, list(lists.values())))
        else:
            sets.append(LabelSet(base, sort_into_parts(tree, group, base, by_folder=True)))
    return sets


def _find_lists(tree: FileTree, base: Folders) -> dict[str, str]:
    """Maps parts to the text files that list their images. Returns {} if there are none.

    The first of the folders ``ImageSets/Main``, ``ImageSets`` and ``base`` with such files is used.
    In ``base`` itself, they must list two parts or more, as one such file may be something else.
    """
    top = os.path.join(tree.root, *base)
    for names in (("ImageSets", "Main"), ("ImageSets",), ()):
        folder = os.path.join(top, *names)
        lists = find_lists_of_parts(tree, folder)
        if not names and len(lists) < 2:
            continue
        if "train" in lists:
            lists.pop("all", None)
            return lists
        if "all" in lists:
            return lists
    return {}


def read_voc(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the XML files of a part of a data set, and finds their images.

    If a file of ``ImageSets`` lists the part, each listed image without an XML file is left out.
    """
    if not labels.manifests:
        return _read(tree, labels, part)
    list_file = labels.parts[part]
    base = os.path.join(tree.root, *labels.base)
    label_files = [path for path in tree.label_files["voc"] if path.startswith(base)]
    listed, missing = _read_list(list_file, label_files)
    result = _read(tree, LabelSet(labels.base, {part: listed}), part)
    result.files.append(list_file)
    result.images = [*missing, *result.images]
    return result


def _read_list(list_file: str, label_files: Sequence[str]) -> tuple[list[str], list[LabelledImage]]:
    """Reads a file of ``ImageSets/Main``.

    Returns the label files of the images that it lists, and the images without a label file.
    """
    try:
        lines = read_lines(list_file)
    except UnreadableFileError as error:
        raise UserError(f"'{list_file}': {error}") from error
    by_name = {stem_of(path): path for path in label_files}
    if label_files:  # a line may be a path below the folder of the XML files
        folder = os.path.commonpath([os.path.dirname(path) for path in label_files])
        for path in label_files:
            by_name[os.path.splitext(os.path.relpath(path, folder))[0]] = path
    listed: dict[str, None] = {}
    missing = []
    for number, line in lines:
        # A line is a name, which may contain spaces, or a name and a flag.
        first_word = line.split()[0]
        paths = [line, os.path.splitext(line)[0], first_word, os.path.splitext(first_word)[0]]
        names = [*paths, *map(os.path.basename, paths)]
        label_file = next((by_name[name] for name in names if name in by_name), None)
        if label_file:
            listed[label_file] = None
        else:
            image = LabelledImage(f"{list_file}, line {number}")
            image.mark_missing(f"there is no XML file of the name '{line}'")
            missing.append(image)
    return list(listed), missing


def read_name(root: Element) -> str:
    """Returns the file name of the image without its folders, or "" if it is missing."""
    path = root.findtext("filename", "").strip()
    return path.replace("\\", "/").rpartition("/")[2]


def add_objects(image: LabelledImage, root: Element) -> None:
    """Adds the size and the boxes in an XML file to an image."""
    width = _read_side(root, "size/width")
    height = _read_side(root, "size/height")
    if width and height:
        image.size = (width, height)
    for number, entry in enumerate(root.iter("object"), start=1):
        with image.skip_invalid_box(f"{image.label_file}, object {number}") as location:
            left, top, right, bottom = _read_edges(entry)
            image.add_box(
                location,
                entry.findtext("name", "").strip(),
                [(left - 1, top - 1), (right, bottom)],  # VOC numbers the pixels from 1
                is_box=True,
                is_crowd=entry.findtext("difficult", "").strip() == "1",
            )


def _read_side(root: Element, path: str) -> int:
    """Returns the number in an element, or 0 if it has no valid one."""
    text = root.findtext(path, "").strip()
    if not text.isdecimal() or len(text) >= 10:
        return 0
    return int(text)


def _read_edges(entry: Element) -> list[float]:
    """Returns the left, top, right and bottom edge of an object."""
    requirement = "its bndbox must have the numbers xmin, ymin, xmax and ymax"
    box = entry.find("bndbox")
    if box is None:
        raise ValueError(requirement)
    try:
        return [float(box.findtext(key, "")) for key in ("xmin", "ymin", "xmax", "ymax")]
    except ValueError:
        raise ValueError(requirement) from None


_read = read_per_image(parse_xml, add_objects, read_name)


def _is_voc(ends: Ends) -> bool:
    text = ends.start
    if "<annotation" not in text or "<annotations" in text:
        return False
    # LabelMe's website has files of the same root, with polygons.
    return "<bndbox>" in text or "<polygon>" not in text


VOC = Format(
    name="voc",
    title="Pascal VOC",
    kinds=(LabelKind(name="voc", suffixes=(".xml",), matches=_is_voc, has_one_image=True),),
    find=find_voc,
    read=read_voc,
    data="a folder with an XML file for each image, such as `VOCdevkit/VOC2007` with "
    "`Annotations/` and `JPEGImages/`, or a folder of LabelImg with XML files beside the images",
    images="below the folder, found by their names",
)
