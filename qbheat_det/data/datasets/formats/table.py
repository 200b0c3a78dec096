# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tables (CSV) with one box per line, with any separator and with or without a header.

A line with only an image name is an image without boxes. In the format of Open Images ("ImageID,
LabelName, XMin, …"), boxes are fractions of the image's sides.
"""

import csv
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.image_suffixes import IMAGE_SUFFIXES, UNREAD_SUFFIXES
from qbheat_det.data.datasets.label_kinds import Ends, LabelKind
from qbheat_det.data.datasets.labelled_image import LabelledImage, corners
from qbheat_det.data.datasets.layout import part_of_name
from qbheat_det.data.datasets.text_files import read_rows

from .base import ONLY_CLASS, Format, Labels, LabelSet, find_sets, read_with

# Known names of each column, in lower case and without underscores, spaces and dots.
_IMAGE = (
    *("filename", "imageid", "image", "imagepath", "imagename", "imagefile", "path", "img", "file"),
    *("filepath", "imgname", "externalid", "name"),
)
_CLASS = (
    *("class", "label", "labelname", "classname", "category", "categoryname", "objectclass"),
    *("classid", "categoryid", "labelid", "name", "species", "target"),
)
_BOX = ("bbox", "box", "boundingbox")
_LEFT = ("xmin", "x1", "left", "x0", "bboxx1", "bboxxmin", "topleftx", "bboxleft")
_TOP = ("ymin", "y1", "top", "y0", "bboxy1", "bboxymin", "toplefty", "bboxtop")
_RIGHT = ("xmax", "x2", "right", "bboxx2", "bboxxmax", "bottomrightx", "bboxright")
_BOTTOM = ("ymax", "y2", "bottom", "bboxy2", "bboxymax", "bottomrighty", "bboxbottom")
_X = ("x", "bboxx", "boxx", *_LEFT)
_Y = ("y", "bboxy", "boxy", *_TOP)
_CENTER_X = ("xcenter", "centerx", "xc", "cx", "xcentre")
_CENTER_Y = ("ycenter", "centery", "yc", "cy", "ycentre")
# "width" and "height" may be the sides of the image.
_WIDTH = ("bboxwidth", "bboxw", "boxwidth", "boxw", "w", "width")
_HEIGHT = ("bboxheight", "bboxh", "boxheight", "boxh", "h", "height")
_QUAD = ("x1", "y1", "x2", "y2", "x3", "y3", "x4", "y4")
_SPLIT = ("split", "subset", "set", "partition", "usage", "fold")
_EMPTY = ("", "nan", "none", "null", "na", "n/a", "-", "[]")
_CLASS_WORDS = ("class", "label", "categ", "type", "species", "kind", "klass")
_NO_CLASSES = ("source", "split", "set", "usage", "url", "user", "date", "comment", "folder")
_OPEN_IMAGES = "imageid"  # marks Open Images, if there are corners
_DESCRIPTIONS = "class-descriptions"  # a file of Open Images that maps codes to class names
_NEEDED = (
    "a column of images (such as filename), one of classes (such as class), and xmin, ymin, xmax, "
    "ymax, or x, y, width, height, or bbox with [x, y, width, height]"
)

Points = Sequence[tuple[float, float]]


class Columns(NamedTuple):
    """The indices of the columns of a table.

    Attributes:
        image: column of image names.
        label: column of classes; None if all objects have the class "object".
        box: the columns of the box.
        to_points: converts the texts in these columns to two corners.
        is_relative: whether boxes are fractions of the image's sides.
        has_header: whether the first line has the names of the columns.
    """

    image: int
    label: int | None
    box: tuple[int, ...]
    to_points: Callable[[Sequence[str]], Points]
    is_relative: bool = False
    has_header: bool = True


def _read_corners(texts: Sequence[str]) -> Points:
    left, top, right, bottom = map(_number, texts)
    return [(left, top), (right, bottom)]


def _read_quad(texts: Sequence[str]) -> Points:
    numbers = list(map(_number, texts))
    xs, ys = numbers[::2], numbers[1::2]
    return [(min(xs), min(ys)), (max(xs), max(ys))]


def _read_sizes(texts: Sequence[str]) -> Points:
    return corners(*map(_number, texts))


def _read_centers(texts: Sequence[str]) -> Points:
    x, y, width, height = map(_number, texts)
    return corners(x - width / 2, y - height / 2, width, height)


def _read_list(texts: Sequence[str]) -> Points:
    numbers = re.findall(r"[-+0-9.eE]+", texts[0])
    if len(numbers) != 4:
        raise ValueError(f"its bbox must have four numbers, but is {texts[0]!r}")
    return corners(*map(_number, numbers))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Tables of spreadsheets in many languages have decimal commas.
        return float(text.replace(",", ".", 1))


def find_columns(header: Sequence[str], row: Sequence[str] = ()) -> Columns | None:
    """Returns the columns of a table; None if it is no table of boxes.

    The columns of the box are found by their names. The columns of images and classes may also have
    unknown names, and are then found in the first row.
    """
    names = [_clean(cell) for cell in header]

    def find(known: Sequence[str], but: Sequence[int | None] = ()) -> int | None:
        places = (names.index(name) for name in known if name in names)
        return next((place for place in places if place not in but), None)

    layouts: tuple[tuple[tuple[Sequence[str], ...], Callable[[Sequence[str]], Points]], ...] = (
        (tuple((name,) for name in _QUAD), _read_quad),
        ((_LEFT, _TOP, _RIGHT, _BOTTOM), _read_corners),
        ((_CENTER_X, _CENTER_Y, _WIDTH, _HEIGHT), _read_centers),
        ((_X, _Y, _WIDTH, _HEIGHT), _read_sizes),
        ((_BOX,), _read_list),
    )
    for keys, to_points in layouts:
        box = [place for known in keys if (place := find(known)) is not None]
        if len(box) < len(keys):
            continue
        image = next((place for place, cell in enumerate(row) if _is_image(cell)), None)
        image = find(_IMAGE) if image is None else image
        if image is None:
            return None
        label = _choose_label(names, row, (image, *box))
        is_relative = names[image] == _OPEN_IMAGES and "labelname" in names
        return Columns(image, label, tuple(box), to_points, is_relative)
    return _find_columns_without_header(header)


def _clean(name: str) -> str:
    """Returns the name of a column without case, spaces and punctuation."""
    return re.sub(r"[\s_.\"'-]", "", name.strip("\ufeff").lower())


def _is_image(text: str) -> bool:
    return os.path.splitext(text)[1].lower() in IMAGE_SUFFIXES | UNREAD_SUFFIXES


def _choose_label(names: Sequence[str], row: Sequence[str], others: Sequence[int]) -> int | None:
    """Returns the column of classes: one with a known name and texts, if there is one."""
    known = [names.index(name) for name in _CLASS if name in names]
    known = [place for place in known if place not in others]
    texts = [place for place in known if place < len(row) and not _is_number(row[place])]
    unknown = _find_label(names, row, others) if not texts else None
    return next(iter([*texts, *([] if unknown is None else [unknown]), *known]), None)


def _find_label(names: Sequence[str], row: Sequence[str], others: Sequence[int]) -> int | None:
    """Returns the only column that may have classes, or None."""
    texts = [
        place
        for place, cell in enumerate(row[: len(names)])
        if place not in others and cell and not _is_number(cell)
    ]
    telling = [place for place in texts if any(word in names[place] for word in _CLASS_WORDS)]
    if len(telling) == 1:
        return telling[0]
    texts = [place for place in texts if names[place] not in _NO_CLASSES]
    return texts[0] if len(texts) == 1 else None


def _find_columns_without_header(first: Sequence[str]) -> Columns | None:
    """Returns the columns of a table without a header, which are in one of these orders.

    "path,x1,y1,x2,y2,class", the same with the width and height of the image at the end (SKU-110K),
    and "path,width,height,class,x1,y1,x2,y2".
    """
    suffix = os.path.splitext(first[0])[1].lower() if first else ""
    if suffix not in IMAGE_SUFFIXES | UNREAD_SUFFIXES:
        return None
    for length, label, box in (
        (6, 5, (1, 2, 3, 4)),
        (8, 5, (1, 2, 3, 4)),
        (8, 3, (4, 5, 6, 7)),
    ):
        texts = [first[place] for place in box] if len(first) == length else [""]
        if len(first) == length and (all(map(_is_number, texts)) or not any(texts)):
            return Columns(0, label, box, _read_corners, has_header=False)
    return None


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def find_table(tree: FileTree) -> list[LabelSet]:
    """Finds tables. The parts of a table are told by its name, or by a column such as "split"."""
    sets = []
    for one in find_sets(tree, tree.label_files.get("table", ())):
        parts: dict[str, list[tuple[str, str]]] = {}
        for part, files in one.parts.items():
            for file in files:
                for value in _list_splits(file) or [""]:
                    name = part_of_name(value) or part if value else part
                    parts.setdefault(name, []).append((file, value))
        sets.append(LabelSet(one.base, parts))
    return sets


def _find_split(file: str) -> int | None:
    """Returns the column that tells the part of each row, or None."""
    columns = _read_columns(file)
    if columns is None or not columns.has_header:
        return None
    names = [_clean(cell) for cell in _read_first(file)[0]]
    return next((names.index(name) for name in _SPLIT if name in names), None)


def _list_splits(file: str) -> list[str]:
    """Returns the values of the column that tells the part of each row."""
    place = _find_split(file)
    if place is None:
        return []
    rows = read_rows(file, _read_first(file)[2])[1:]
    values = dict.fromkeys(row[place].strip() for _, row in rows if len(row) > place)
    return list(values) if any(map(part_of_name, values)) else []


def _is_table(ends: Ends) -> bool:
    return find_columns(*_split_lines(ends.lines)[:2]) is not None


def _split_lines(lines: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Returns the cells of the first and the second line of a table, and its delimiter."""
    counts = {mark: lines[0].count(mark) if lines else 0 for mark in ",;\t|"}
    delimiter = max(counts, key=lambda mark: counts[mark])
    rows = [next(csv.reader([line], delimiter=delimiter), []) for line in lines[:2]]
    first, second = [*rows, [], []][:2]
    return [cell.strip() for cell in first], [cell.strip() for cell in second], delimiter


def _read_first(path: str) -> tuple[list[str], list[str], str]:
    """Returns the cells of the first and the second line of a table, and its delimiter."""
    ends = Ends.read(path)
    return _split_lines(ends.lines if ends else ())


def _read_columns(path: str) -> Columns | None:
    return find_columns(*_read_first(path)[:2])


def describe_columns(path: str) -> str:
    """Returns a message with the columns that a table has, and those that it needs."""
    first = ", ".join(_read_first(path)[0])
    return f"'{path}' has the columns {first or '(none)'}, but --data needs {_NEEDED}"


def names_images(path: str) -> bool:
    """Returns whether a table has a column of images."""
    return any(map(_is_image, _read_first(path)[1]))


def has_unknown_boxes(path: str) -> bool:
    """Returns whether a table has images and four numbers or more in columns of unknown names."""
    return names_images(path) and sum(map(_is_number, _read_first(path)[1])) >= 4


def read_table(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the tables of a part, see ``Format.read``."""
    result = Labels([])
    for file, value in labels.parts[part]:
        read_part = read_with(functools.partial(read_file, value=value), "CSV")
        one = read_part(tree, LabelSet(labels.base, {part: [file]}), part)
        result.files += one.files
        result.notes += one.notes
        result.images += one.images
    tables = list(dict.fromkeys(result.files))
    names = _read_descriptions(tree, result)
    for file in tables:
        columns = _read_columns(file) or _NO_COLUMNS
        if columns.label is None:
            note = f"'{file}' has no column of classes: all boxes have '{ONLY_CLASS}'"
            result.notes.append(note)
        elif columns.has_header and columns.image != columns.label:
            names_of_columns = _read_first(file)[0]
            result.notes += _note_guesses(file, columns, names_of_columns)
        for image in result.images if columns.is_relative else ():
            if image.reason and image.reason.item == "missing image":
                # The tables of Open Images list images that most users do not have.
                image.reason = dataclasses.replace(image.reason, is_fault=False)
    for image in result.images if names else ():
        image.boxes = [box._replace(name=names.get(box.name, box.name)) for box in image.boxes]
    return result


def _note_guesses(file: str, columns: Columns, header: Sequence[str]) -> list[str]:
    """Returns notes of columns that were found by their content."""
    known = {columns.image: _IMAGE, columns.label: _CLASS}
    words = {columns.image: "images", columns.label: "classes"}
    return [
        f"'{file}': the column '{header[place]}' has the {words[place]}"
        for place, names in known.items()
        if place is not None and _clean(header[place]) not in names
    ]


_NO_COLUMNS = Columns(0, None, (), _read_corners)


def _read_descriptions(tree: FileTree, result: Labels) -> dict[str, str]:
    """Returns the class names of the codes of Open Images, if their file is there."""
    for path in tree.others:
        if os.path.basename(path).startswith(_DESCRIPTIONS) and path.endswith(".csv"):
            result.files.append(path)
            return {row[0]: row[1] for _, row in read_rows(path) if len(row) == 2}
    return {}


def read_file(file: str, value: str = "") -> list[LabelledImage]:
    """Reads a table, or only the rows with a value in the column that tells the part.

    Lines of one image need not be together.

    Raises a ``UserError`` if the table has not the columns that are needed.
    """
    columns = _read_columns(file)
    if columns is None:
        raise UserError(describe_columns(file))
    delimiter = _read_first(file)[2]
    images: dict[str, LabelledImage] = {}
    split = _find_split(file) or 0
    is_first = columns.has_header
    used = [columns.image, *columns.box, *([columns.label] if columns.label is not None else [])]
    for number, row in read_rows(file, delimiter):
        if is_first or not any(cell.strip() for cell in row):
            is_first &= not any(cell.strip() for cell in row)
            continue
        if value and (len(row) <= split or row[split].strip() != value):
            continue
        cells = [row[place].strip() if place < len(row) else "" for place in used]
        name, box = cells[0], cells[1 : 1 + len(columns.box)]
        label = cells[-1] if columns.label is not None else ONLY_CLASS
        place = f"{file}, line {number}"
        image = images.setdefault(name, LabelledImage(place, name))
        # Images without objects have empty boxes, and may have a class such as "No finding".
        if all(cell.lower() in _EMPTY for cell in box):
            continue
        with image.reading(place):
            if not name:
                raise ValueError("it names no image")
            points = columns.to_points(box)
            image.add(place, label, points, is_relative=columns.is_relative, is_box=True)
    return list(images.values())


TABLE = Format(
    "table",
    "CSV",
    (LabelKind("table", (".csv", ".tsv"), _is_table),),
    find_table,
    read_table,
    data="a file with the columns `filename, class, xmin, ymin, xmax, ymax`, or `x, y, width, "
    "height`, or `bbox`; a file without a header with `path, x1, y1, x2, y2, class`; a folder with "
    "`train_labels.csv` and `test_labels.csv`; a file of Open Images",
    images="below the folder of the file, found by their names; or `--images DIR`",
    is_last=True,  # a table may repeat labels, or list results
)
