# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads data sets in the format of Pascal VOC: ``Annotations``, ``JPEGImages``, ``ImageSets``.

LabelImg writes ``a.xml`` beside ``a.jpg``, other tools folders ``annotations`` and ``images``. Both
may lie in folders of parts, such as "train" and "valid".

Pixels count from 1, as in VOC: a box from xmin 1 to xmax 100 is 100 pixels wide. Difficult objects
become crowds, which training and evaluation ignore. Classes are sorted by name.
"""

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.checks import DataError, short
from qbheat_det.data.images import read_sizes

from .coco_file import Converted
from .image_folder import IMAGE_SUFFIXES, PART_NAMES

_LARGEST = 10_000_000  # bytes of an annotation
_LISTS = {"train": ("train", "trainval"), "val": ("val", "test")}


def find_voc_folders(folder: str | Path) -> dict[str, tuple[Path, Path]]:
    """Returns the folders of annotations and images: of "all", or of "train" and perhaps "val"."""
    root = Path(folder)
    found = {}
    for subset, names in {"all": ("",), **PART_NAMES}.items():
        pairs = [pair for name in names for pair in _pair_folders(root / name)]
        if pairs:
            found[subset] = pairs[0]
    if "all" in found or "train" not in found:
        return {"all": found["all"]} if "all" in found else {}
    return found


def _pair_folders(base: Path) -> list[tuple[Path, Path]]:
    pairs = [(base / "Annotations", base / "JPEGImages"), (base / "annotations", base / "images")]
    pairs = [pair for pair in pairs if pair[0].is_dir() and pair[1].is_dir()]
    pairs = [pair for pair in pairs if pair[1].name == "JPEGImages" or any(pair[0].glob("*.xml"))]
    if base.is_dir() and {file.stem for file in base.glob("*.xml")} & _find_images(base).keys():
        pairs.append((base, base))
    return pairs


def _find_images(folder: Path) -> dict[str, Path]:
    """Returns the images of a folder by their names without suffix."""
    files = (file for file in sorted(folder.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES)
    return {file.stem: file for file in files}


def find_voc_list(folder: str | Path, subset: str) -> Path | None:
    """Returns the list file of "train" or "val", or None."""
    lists = Path(folder) / "ImageSets" / "Main"
    files = [lists / f"{name}.txt" for name in _LISTS[subset]]
    return next((file for file in files if file.is_file()), None)


def convert_voc(folder: str, subset: str, classes: Sequence[str] | None = None) -> Converted:
    """Returns a subset as COCO lists; file names are relative to the folder.

    ``subset`` is "train" or "val", by their folders or ``ImageSets/Main``, or "all". ``classes``
    are the allowed names in their order; None allows the names in all annotations. Raises a
    ``UserError`` if there are no annotations, or a list cannot be read.
    """
    root = Path(folder)
    folders = find_voc_folders(root)
    trees = {f: parse_xml(f) for pair in folders.values() for f in sorted(pair[0].glob("*.xml"))}
    if not trees:
        raise UserError(f"'{root / 'Annotations'}' has no annotations (.xml)")
    annotations, images = folders[subset if subset in folders else "all"]
    names = classes or sorted({n for tree in trees.values() for n in _list_names(tree)})
    ids = {name: index for index, name in enumerate(names)}
    converted = Converted(names)
    by_stem = _find_images(images)
    if annotations == images and (bare := sorted(by_stem.keys() - {f.stem for f in trees})):
        left_out = f"{images}: images without an annotation (.xml) are left out"
        converted.warnings.append(f"{left_out}: {join_first(by_stem[stem].name for stem in bare)}")
    for file in _list_annotations(root, annotations, subset, converted.errors):
        tree = trees[file]
        if isinstance(tree, DataError):
            converted.errors.append(tree)
            continue
        written = tree.findtext("filename", "").strip().replace("\\", "/")
        named = images / Path(written).name
        image = named if named.is_file() else by_stem.get(file.stem)
        if image is None:
            reason = f"there is no image '{named.name}' or '{file.stem}' in '{images}'"
            converted.errors.append(DataError("missing image file", str(file), reason))
            continue
        size = _read_size(tree, image)
        if isinstance(size, DataError):
            converted.errors.append(size)
            continue
        image_id = converted.add_image(str(file), os.path.relpath(image, root), size)
        for number, thing in enumerate(tree.iter("object"), start=1):
            where, found = f"{file}, object {number}", _convert_object(thing, ids)
            if isinstance(found, str):
                converted.errors.append(DataError("wrong object", where, found))
            else:
                converted.add_box(where, image_id, *found)
    return converted


def _list_annotations(root: Path, folder: Path, subset: str, errors: list[DataError]) -> list[Path]:
    list_file = None if subset == "all" else find_voc_list(root, subset)
    if list_file is None:
        return sorted(folder.glob("*.xml"))
    files: list[Path] = []
    for number, line in enumerate(list_file.read_text(errors="replace").splitlines(), start=1):
        if not (name := line.strip()):
            continue
        # Some lists have a flag after the name, and names may contain spaces.
        stems = (Path(name).name, Path(name.split()[0]).name)
        found = next((folder / f"{s}.xml" for s in stems if (folder / f"{s}.xml").is_file()), None)
        if found is None:
            reason = f"there is no annotation '{stems[0]}.xml'"
            errors.append(DataError("missing annotation", f"{list_file}, line {number}", reason))
        else:
            files.append(found)
    return list(dict.fromkeys(files))


def parse_xml(file: Path) -> "ElementTree.Element | DataError":
    """Reads an annotation file; refuses declared entities, which can expand without limit."""
    try:
        content = file.read_bytes() if file.stat().st_size <= _LARGEST else b"\0"
        if b"<!DOCTYPE" in content or b"<!ENTITY" in content or b"\0" in content:
            reason = "it is too large, not in an encoding like ASCII, or has a DOCTYPE"
            return DataError("unreadable annotation", str(file), reason)
        return ElementTree.fromstring(content)
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
        return DataError("unreadable annotation", str(file), f"it cannot be read as XML: {error}")


def _list_names(tree: "ElementTree.Element | DataError") -> list[str]:
    if isinstance(tree, DataError):
        return []
    return [name for thing in tree.iter("object") if (name := thing.findtext("name", "").strip())]


def _read_size(tree: ElementTree.Element, image: Path) -> "tuple[int, int] | DataError":
    """Returns the annotated width and height, or else the size of the image file."""
    try:
        width, height = (int(tree.findtext(f"size/{key}", "0")) for key in ("width", "height"))
    except ValueError:
        width = height = 0
    if width > 0 and height > 0:
        return width, height
    return next(read_sizes([str(image)]))


def _convert_object(
    thing: ElementTree.Element, ids: dict[str, int]
) -> "tuple[int, list[float], bool] | str":
    """Returns class, box (x, y, width, height) and whether it is a crowd; or the error."""
    name = thing.findtext("name", "").strip()
    if name not in ids:
        return f"its name {name!r} is none of the classes {short(list(ids))}"
    try:
        edges = [float(thing.findtext(f"bndbox/{key}", "")) for key in _EDGES]
    except ValueError:
        return "its bndbox must have the numbers xmin, ymin, xmax and ymax"
    left, top = max(edges[0] - 1, 0.0), max(edges[1] - 1, 0.0)
    box = [left, top, edges[2] - left, edges[3] - top]
    difficult = thing.findtext("difficult", "0").strip() == "1"
    return ids[name], box, difficult


_EDGES = ("xmin", "ymin", "xmax", "ymax")
