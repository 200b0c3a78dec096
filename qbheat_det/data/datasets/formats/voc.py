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
    """Finds XML files. Files such as ``ImageSets/Main/train.txt`` list the parts, or else folders
    tell them.
    """
    files = tree.label_files.get("voc", ())
    sets = []
    for base, own in group_per_image_files(tree, files).items():
        parts = _find_lists(tree, base)
        folders = sort_into_parts(tree, own, base, by_folder=True)
        sets.append(LabelSet(base, parts or folders, [*parts.values()]))
    return sets


def _find_lists(tree: FileTree, base: Folders) -> dict[str, str]:
    """Maps parts to the files that list their images, in ``ImageSets/Main`` or above it.

    Directly in the folder of the data set, such files are used if they have two parts or more.
    """
    top = os.path.join(tree.root, *base)
    for names in (("ImageSets", "Main"), ("ImageSets",), ()):
        folder = os.path.join(top, *names)
        lists = find_lists_of_parts(tree, folder)
        if lists.keys() & {"train", "all"} and (names or len(lists) > 1):
            if "train" in lists:
                lists.pop("all", None)
            return lists
    return {}


def read_voc(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the XML files of a part, see ``Format.read``."""
    if not labels.manifests:
        return _read(tree, labels, part)
    result = Labels([], files=[labels.parts[part]])
    base = os.path.join(tree.root, *labels.base)
    every = [path for path in tree.label_files["voc"] if path.startswith(base)]
    files = _read_list(labels.parts[part], every, result)
    read = _read(tree, LabelSet(labels.base, {part: files}), part)
    result.images += read.images
    result.notes += read.notes
    return result


def _read_list(place: str, files: Sequence[str], result: Labels) -> list[str]:
    """Returns the label files of the images in a list, which is a file of ``ImageSets/Main``."""
    by_stem = {stem_of(path): path for path in files}
    # A line may be a path below the folder of the XML files.
    folder = os.path.commonpath(list(map(os.path.dirname, files))) if files else ""
    by_stem |= {os.path.splitext(os.path.relpath(path, folder))[0]: path for path in files}
    chosen: dict[str, None] = {}
    try:
        lines = read_lines(place)
    except UnreadableFileError as error:
        raise UserError(f"'{place}': {error}") from error
    for number, line in lines:
        # A line is a name, which may contain spaces, or a name and a flag.
        tried = (line, line.split()[0])
        paths = [one for name in tried for one in (name, os.path.splitext(name)[0])]
        names = [*paths, *map(os.path.basename, paths)]
        file = next((by_stem[name] for name in names if name in by_stem), None)
        if file:
            chosen[file] = None
            continue
        image = LabelledImage(f"{place}, line {number}")
        image.miss(f"there is no XML file of the name '{line}'")
        result.images.append(image)
    return list(chosen)


def _read_name(root: Element) -> str:
    name = root.findtext("filename", "") or ""
    return name.strip().replace("\\", "/").rpartition("/")[2]


def _add_objects(image: LabelledImage, root: Element) -> None:
    """Adds the size and the boxes in an XML file to an image."""
    width, height = (_read_side(root, key) for key in ("width", "height"))
    if width and height:
        image.size = width, height
    for number, thing in enumerate(root.iter("object"), start=1):
        with image.reading(f"{image.label_file}, object {number}") as place:
            _add_object(image, place, thing)


def _read_side(root: Element, key: str) -> int:
    text = (root.findtext(f"size/{key}", "") or "").strip()
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _add_object(image: LabelledImage, place: str, thing: Element) -> None:
    try:
        left, top, right, bottom = _read_edges(thing)
    except (TypeError, ValueError):
        raise ValueError("its bndbox must have the numbers xmin, ymin, xmax and ymax") from None
    points = [(left - 1, top - 1), (right, bottom)]
    is_crowd = (thing.findtext("difficult", "") or "").strip() == "1"
    name = (thing.findtext("name", "") or "").strip()
    image.add(place, name, points, is_box=True, is_crowd=is_crowd)


def _read_edges(thing: Element) -> list[float]:
    box = thing.find("bndbox")
    if box is None:
        raise ValueError("it has no bndbox")
    return [float(box.findtext(key) or "") for key in ("xmin", "ymin", "xmax", "ymax")]


_read = read_per_image(parse_xml, _add_objects, _read_name)


def _is_voc(ends: Ends) -> bool:
    text = ends.start
    # LabelMe's website has files of the same root, with polygons.
    is_of_labelme = "<polygon>" in text and "<bndbox>" not in text
    return "<annotation" in text and "<annotations" not in text and not is_of_labelme


VOC = Format(
    "voc",
    "Pascal VOC",
    (LabelKind("voc", (".xml",), _is_voc, has_one_image=True),),
    find_voc,
    read_voc,
    data="a folder with an XML file for each image, such as `VOCdevkit/VOC2007` with "
    "`Annotations/` and `JPEGImages/`, or a folder of LabelImg with XML files beside the images",
    images="below the folder, found by their names",
)
