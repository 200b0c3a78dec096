# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads data sets in Pascal VOC's format, which has one XML file per image.

Pascal VOC has folders ``Annotations``, ``JPEGImages`` and ``ImageSets``. LabelImg writes ``a.xml``
next to ``a.jpg``, and some tools write folders ``annotations`` and ``images``. Both layouts may be
in folders of parts, such as "train" and "valid".

Pixels are numbered from 1, as in VOC, so a box from xmin 1 to xmax 100 is 100 pixels wide.
Difficult objects become crowds, which training and evaluation ignore. Classes are sorted by name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from qbheat_det.data.checks import DataError

from .conversion import MISSING_IMAGE, Converted, LabelledImage, convert, parse_xml, read_lines
from .image_folder import IMAGE_SUFFIXES, PART_NAMES

_LISTS = {"train": ("train", "trainval"), "val": ("val", "test")}


class VocPart(NamedTuple):
    """The folders of a part. ``names`` is the file in ``ImageSets`` that lists the part, if any."""

    annotations: Path
    images: Path
    names: Path | None = None


def find_voc_parts(folder: str | Path) -> dict[str, VocPart]:
    """Returns the parts that subfolders or ``ImageSets`` define: "all", or "train" (and "val")."""
    root = Path(folder)
    if whole := _pair_folders(root):
        lists = {
            part: file
            for part, stems in _LISTS.items()
            for stem in reversed(stems)
            if (file := root / "ImageSets" / "Main" / f"{stem}.txt").is_file()
        }
        listed = {part: whole._replace(names=file) for part, file in lists.items()}
        return listed if "train" in listed else {"all": whole}
    parts = {
        part: pair
        for part, names in PART_NAMES.items()
        for name in reversed(names)
        if (pair := _pair_folders(root / name))
    }
    return parts if "train" in parts else {}


def _pair_folders(base: Path) -> VocPart | None:
    if not base.is_dir():
        return None
    for pair in (("Annotations", "JPEGImages"), ("annotations", "images"), ("", "")):
        part = VocPart(*(base / name for name in pair))
        if not (part.annotations.is_dir() and part.images.is_dir()):
            continue
        stems = {file.stem for file in part.annotations.glob("*.xml")}
        beside = stems & _find_images(base).keys() if part.images == base else stems
        if pair[1] == "JPEGImages" or beside:
            return part
    return None


def _find_images(folder: Path) -> dict[str, Path]:
    """Maps the stem of each image in a folder to its path."""
    files = (file for file in sorted(folder.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES)
    return {file.stem: file for file in files}


def convert_voc(source: Mapping[str, Any]) -> Converted:
    """Converts a subset to COCO's format, with file names relative to the folder.

    ``source`` has the keys "voc_folder" and "subset" (see ``find_voc_parts``), and optionally
    "classes" (class names; by default the sorted names of all parts). Raises a ``UserError`` if a
    list of images cannot be read.
    """
    root = Path(source["voc_folder"])
    parts = {name: list(_read_part(part)) for name, part in find_voc_parts(root).items()}
    names = {box.name for part in parts.values() for image in part for box in image.boxes}
    return convert(parts[source["subset"]], source.get("classes") or sorted(names), root)


def _read_part(part: VocPart) -> Iterator[LabelledImage]:
    folder, images = part.annotations, _find_images(part.images)
    files = {str(file): file for file in sorted(folder.glob("*.xml"))}
    if part.names:
        files = {}
        for place, line in read_lines(part.names):
            # A line is a name, which may contain spaces, or a name and a flag.
            tried = [folder / f"{Path(name).name}.xml" for name in (line, line.split()[0])]
            file = next((file for file in tried if file.is_file()), None)
            files[str(file or place)] = file or tried[0]
    for place, file in files.items():
        yield _read_annotation(place, file, part.images, images)
    if part.images == folder:  # LabelImg writes no file for images without objects
        stems = {file.stem for file in files.values()}
        yield from (
            LabelledImage(str(path), is_skipped=True)
            for stem, path in images.items()
            if stem not in stems
        )


def _read_annotation(
    place: str, file: Path, folder: Path, images: Mapping[str, Path]
) -> LabelledImage:
    image = LabelledImage(place)
    try:
        tree = parse_xml(file)
    except ValueError as error:
        image.file = DataError("unreadable annotation", place, str(error))
        return image
    named = folder / Path(tree.findtext("filename", "").strip().replace("\\", "/")).name
    path = named if named.is_file() else images.get(file.stem)
    reason = f"there is no image '{named.name}' or '{file.stem}' in '{folder}'"
    image.file = str(path) if path else DataError(MISSING_IMAGE, place, reason)
    width, height = (tree.findtext(f"size/{key}", "").strip() for key in ("width", "height"))
    if width.isdecimal() and height.isdecimal() and int(width) and int(height):
        image.size = int(width), int(height)
    for number, thing in enumerate(tree.iter("object"), start=1):
        with image.reading(where := f"{place}, object {number}"):
            _add_object(image, where, thing)
    return image


def _add_object(image: LabelledImage, place: str, thing: Element) -> None:
    edges = [thing.findtext(f"bndbox/{key}", "") for key in ("xmin", "ymin", "xmax", "ymax")]
    try:
        left, top, right, bottom = map(float, edges)
    except ValueError:
        raise ValueError("its bndbox must have the numbers xmin, ymin, xmax and ymax") from None
    corners = [(max(left - 1, 0.0), max(top - 1, 0.0)), (right, bottom)]
    is_crowd = thing.findtext("difficult", "").strip() == "1"
    name = thing.findtext("name", "").strip()
    image.add(place, name, corners, is_box=True, is_crowd=is_crowd)
