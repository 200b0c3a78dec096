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
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import Ends, LabelKind
from qbheat_det.data.datasets.labelled_image import LabelledImage
from qbheat_det.data.datasets.layout import (
    Folders,
    Pairs,
    group_per_image_files,
    locate,
    pair,
    sort_into_parts,
)
from qbheat_det.data.datasets.text_files import UnreadableFileError, parse_xml, read_lines

from .base import Format, Labels, LabelSet, add_unpaired

_LISTS = {"train": ("train", "trainval"), "val": ("val", "test")}


def find_voc(tree: FileTree) -> list[LabelSet]:
    """Finds XML files. ``ImageSets/Main`` lists the parts, or else folders tell them."""
    files = tree.label_files.get("voc", ())
    sets = []
    for base, own in group_per_image_files(tree, files).items():
        lists = _find_lists(tree, base)
        parts = lists if "train" in lists else {}
        folders = sort_into_parts(tree, own, base, by_folder=True)
        sets.append(LabelSet(base, parts or folders, [*parts.values()]))
    return sets


def _find_lists(tree: FileTree, base: Folders) -> dict[str, str]:
    """Maps parts to the files in ``ImageSets/Main`` that list their images."""
    folder = os.path.join(tree.root, *base, "ImageSets", "Main")
    return {
        part: path
        for part, stems in _LISTS.items()
        for stem in reversed(stems)
        if os.path.isfile(path := os.path.join(folder, f"{stem}.txt"))
    }


def read_voc(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the XML files of a part, see ``Format.read``."""
    result = Labels([])
    if labels.manifests:
        base = os.path.join(tree.root, *labels.base)
        every = [path for path in tree.label_files["voc"] if path.startswith(base)]
        files = _read_list(labels.parts[part], every, result)
    else:
        files = list(labels.parts[part])
    roots: dict[str, Element] = {}
    for file in files:
        try:
            roots[file] = parse_xml(file)
        except UnreadableFileError as error:
            image = LabelledImage(file, label_file=file)
            image.reason = LeftOut("that cannot be read", file, str(error), "label file")
            result.images.append(image)
    names = {file: _read_name(root) for file, root in roots.items()}
    pairs = pair(tree, list(roots), names)
    find_by_name(tree, pairs, names, part, result)
    for file, path in pairs.image_of.items():
        image = LabelledImage(file, file=path, label_file=file)
        result.images.append(image)
        _read_objects(image, roots[file])
    add_unpaired(result, pairs)
    return result


def find_by_name(
    tree: FileTree, pairs: Pairs, names: dict[str, str], part: str, result: Labels
) -> None:
    """Looks up images by the names in label files, if there is no image of the file's name.

    Also notes how many label files name another image than that of their own name. Such files were
    renamed together with their image.
    """
    renamed = 0
    for file, path in pairs.image_of.items():
        if names[file] and names[file] != os.path.basename(path):
            found = locate(tree, names[file], file, part)
            renamed += isinstance(found, str) and found != path
    if renamed:
        result.notes.append(
            f"{renamed:,} label files name another image than that of their own name: the boxes "
            "belong to the image of the same name"
        )
    taken = {path: file for file, path in pairs.image_of.items()}
    for file in list(pairs.orphans):
        found = locate(tree, names[file], file, part) if names[file] else []
        if not isinstance(found, str):
            pairs.orphans[file] += f", nor one image '{names[file]}'" if names[file] else ""
        elif found in taken:
            pairs.orphans[file] += f", and '{found}' has the labels of '{taken[found]}'"
        else:
            del pairs.orphans[file]
            pairs.image_of[file] = found
            taken[found] = file


def _read_list(place: str, files: Sequence[str], result: Labels) -> list[str]:
    """Returns the label files of the images in a list, which is a file of ``ImageSets/Main``."""
    by_stem = {os.path.splitext(os.path.basename(path))[0]: path for path in files}
    chosen: dict[str, None] = {}
    try:
        lines = read_lines(place)
    except UnreadableFileError as error:
        raise UserError(f"'{place}': {error}") from error
    result.files.append(place)
    for number, line in lines:
        # A line is a name, which may contain spaces, or a name and a flag.
        tried = (os.path.basename(name) for name in (line, line.split()[0]))
        names = [one for name in tried for one in (name, os.path.splitext(name)[0])]
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


def _read_objects(image: LabelledImage, root: Element) -> None:
    """Adds the size and the boxes in an XML file to an image."""
    width, height = (_read_side(root, key) for key in ("width", "height"))
    if width and height:
        image.size = width, height
    for number, thing in enumerate(root.iter("object"), start=1):
        with image.reading(place := f"{image.label_file}, object {number}"):
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
