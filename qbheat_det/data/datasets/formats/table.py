# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tables (CSV) with one box per row, with any separator and with or without a header.

A row whose cells of the box are empty is an image without objects. In the format of Open Images
("ImageID, LabelName, XMin, …"), boxes are in fractions of the image's sides.
"""

import csv
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.image_suffixes import is_image_name
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
_MIN_NUMBERS = 4  # in a row that may have a box
_OPEN_IMAGES = "imageid"  # marks Open Images, if there are corners
_DESCRIPTIONS = "class-descriptions"  # a file of Open Images that maps codes to class names
_REQUIRED = (
    "a column of images (such as filename), one of classes (such as class), and xmin, ymin, xmax, "
    "ymax, or x, y, width, height, or bbox with [x, y, width, height]"
)

Points = Sequence[tuple[float, float]]


class Columns(NamedTuple):
    """The indices of the columns of a table.

    Attributes:
        image: column of image names.
        label: column of class names; None if there is none, and all objects are "object".
        box: columns of the box, in the order that ``to_points`` expects.
        to_points: converts the cells in ``box`` to the top left and the bottom right corner.
        is_relative: whether boxes are in fractions of the image's sides, and not in pixels.
        has_header: whether the first line has the names of the columns.
    """

    image: int
    label: int | None
    box: tuple[int, ...]
    to_points: Callable[[Sequence[str]], Points]
    is_relative: bool = False
    has_header: bool = True


def read_corners(cells: Sequence[str]) -> Points:
    """Converts [left, top, right, bottom] to the top left and the bottom right corner."""
    left, top, right, bottom = map(parse_number, cells)
    return [(left, top), (right, bottom)]


def read_quad(cells: Sequence[str]) -> Points:
    """Converts [x1, y1, …, x4, y4] of a quadrilateral to two corners of its bounding box."""
    numbers = list(map(parse_number, cells))
    xs = numbers[::2]
    ys = numbers[1::2]
    return [(min(xs), min(ys)), (max(xs), max(ys))]


def read_sizes(cells: Sequence[str]) -> Points:
    """Converts [left, top, width, height] to the top left and the bottom right corner."""
    x, y, width, height = map(parse_number, cells)
    return corners(x, y, width, height)


def read_centers(cells: Sequence[str]) -> Points:
    """Converts [center x, center y, width, height] to the top left and bottom right corner."""
    x, y, width, height = map(parse_number, cells)
    return corners(x - width / 2, y - height / 2, width, height)


def read_list(cells: Sequence[str]) -> Points:
    """Converts a single cell "[left, top, width, height]" to two corners."""
    numbers = re.findall(r"[-+0-9.eE]+", cells[0])
    if len(numbers) != 4:
        raise ValueError(f"its bbox must have four numbers, but is {cells[0]!r}")
    return read_sizes(numbers)


# Each layout has the known names of the columns of a box, and the function that reads their cells.
# The first layout whose columns all exist is used.
_LAYOUTS: tuple[tuple[tuple[Sequence[str], ...], Callable[[Sequence[str]], Points]], ...] = (
    (tuple((name,) for name in _QUAD), read_quad),
    ((_LEFT, _TOP, _RIGHT, _BOTTOM), read_corners),
    ((_CENTER_X, _CENTER_Y, _WIDTH, _HEIGHT), read_centers),
    ((_X, _Y, _WIDTH, _HEIGHT), read_sizes),
    ((_BOX,), read_list),
)


def parse_number(text: str) -> float:
    """Converts a number with a decimal point or comma. Raises a ``ValueError`` if it is none."""
    try:
        return float(text)
    except ValueError:
        # Tables of spreadsheets in many languages have decimal commas.
        return float(text.replace(",", ".", 1))


def find_columns(header: Sequence[str], row: Sequence[str] = ()) -> Columns | None:
    """Returns the columns of a table, or None if it is no table of boxes.

    The columns of the box must have known names. The columns of images and classes may have any
    name: then they are recognized by the content of the first row.

    Args:
        header: cells of the first line.
        row: cells of the second line.
    """
    names = [_normalize(cell) for cell in header]
    for known_names, to_points in _LAYOUTS:
        box = [_find_column(names, known) for known in known_names]
        if None in box:
            continue
        image = next((column for column, cell in enumerate(row) if is_image_name(cell)), None)
        if image is None:
            image = _find_column(names, _IMAGE)
        if image is None:
            return None
        box_columns = tuple(column for column in box if column is not None)
        label = _choose_label(names, row, (image, *box_columns))
        is_relative = names[image] == _OPEN_IMAGES and "labelname" in names
        return Columns(
            image=image, label=label, box=box_columns, to_points=to_points, is_relative=is_relative
        )
    return _find_columns_without_header(header)


def _normalize(name: str) -> str:
    """Converts the name of a column to lower case without spaces and punctuation."""
    return re.sub(r"[\s_.\"'-]", "", name.strip("\ufeff").lower())


def _find_column(names: Sequence[str], known: Sequence[str]) -> int | None:
    """Returns the index of the first of ``known`` that is in ``names``, or None."""
    for name in known:
        if name in names:
            return names.index(name)
    return None


def _choose_label(names: Sequence[str], row: Sequence[str], others: Sequence[int]) -> int | None:
    """Returns the index of the column of classes, or None if there is none.

    The first choice is a column with a known name whose cell is a text. The second choice is the
    only column of texts, and the last choice is a column of numbers with a known name.

    Args:
        names: names of the columns, as ``_normalize`` returns them.
        row: cells of the first row of the table.
        others: columns of the image and the box.
    """
    known = [names.index(name) for name in _CLASS if name in names]
    known = [column for column in known if column not in others]
    for column in known:
        if column < len(row) and not is_number(row[column]):
            return column
    label = _find_label_by_content(names, row, others)
    if label is not None:
        return label
    if known:
        return known[0]
    return None


def _find_label_by_content(
    names: Sequence[str], row: Sequence[str], others: Sequence[int]
) -> int | None:
    """Returns the only column whose cell is a text that may be a class, or None.

    If the names of several columns allow classes, a name with a word such as "class" decides.
    """
    with_class_word = []
    possible = []
    for column, (name, cell) in enumerate(zip(names, row, strict=False)):
        if column in others or not cell or is_number(cell):
            continue
        if any(word in name for word in _CLASS_WORDS):
            with_class_word.append(column)
        if name not in _NO_CLASSES:
            possible.append(column)
    if len(with_class_word) == 1:
        return with_class_word[0]
    if len(possible) == 1:
        return possible[0]
    return None


def _find_columns_without_header(row: Sequence[str]) -> Columns | None:
    """Returns the columns of a table without a header, or None if their order is unknown.

    ``row`` has the cells of the first line.
    """
    if not row or not is_image_name(row[0]):
        return None
    for num_columns, label, box in (
        (6, 5, (1, 2, 3, 4)),  # path, x1, y1, x2, y2, class
        (8, 5, (1, 2, 3, 4)),  # path, x1, y1, x2, y2, class, image width, image height (SKU-110K)
        (8, 3, (4, 5, 6, 7)),  # path, image width, image height, class, x1, y1, x2, y2
    ):
        if len(row) != num_columns:
            continue
        cells = [row[column] for column in box]
        is_box = all(map(is_number, cells))
        is_empty = not any(cells)  # an image without objects
        if is_box or is_empty:
            return Columns(image=0, label=label, box=box, to_points=read_corners, has_header=False)
    return None


def is_number(text: str) -> bool:
    """Returns whether a text is a number with a decimal point, and not nan."""
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


class Header(NamedTuple):
    """The first lines of a table, and what they tell about its columns.

    Attributes:
        first: cells of the first line that is not blank.
        second: cells of the second line that is not blank; empty if there is none.
        delimiter: the character between cells.
    """

    first: list[str]
    second: list[str]
    delimiter: str

    @property
    def columns(self) -> Columns | None:
        """The columns of the image, class and box; None if it is no table of boxes."""
        return find_columns(self.first, self.second)

    @property
    def split_column(self) -> int | None:
        """Index of the column that tells whether a row is for training, or None."""
        if self.columns is None or not self.columns.has_header:
            return None
        names = [_normalize(cell) for cell in self.first]
        return _find_column(names, _SPLIT)

    @classmethod
    def parse(cls, lines: Sequence[str]) -> "Header":
        """Parses the first lines of a table."""
        if not lines:
            return cls([], [], ",")
        delimiter = max(",;\t|", key=lines[0].count)
        rows: list[list[str]] = []
        for line in lines[:2]:
            cells = next(csv.reader([line], delimiter=delimiter), [])
            rows.append([cell.strip() for cell in cells])
        if len(rows) == 1:
            rows.append([])
        return cls(rows[0], rows[1], delimiter)

    @classmethod
    def read(cls, path: str) -> "Header":
        """Reads the first lines of a table."""
        ends = Ends.read(path)
        return cls.parse(ends.lines if ends else ())


def find_table(tree: FileTree) -> list[LabelSet]:
    """Finds tables. The part of a row is told by a column such as "split", or by the file's name.

    Each part of a ``LabelSet`` is a list of (file, value), which stands for the rows of the table
    ``file`` with ``value`` in this column. If ``value`` is "", these are all rows.
    """
    sets = []
    for label_set in find_sets(tree, tree.label_files.get("table", ())):
        parts: dict[str, list[tuple[str, str]]] = {}
        for part, files in label_set.parts.items():
            for file in files:
                for value in _list_splits(file) or [""]:
                    part_of_value = part_of_name(value) or part
                    parts.setdefault(part_of_value, []).append((file, value))
        sets.append(LabelSet(label_set.base, parts))
    return sets


def _list_splits(file: str) -> list[str]:
    """Returns the different values of the column that tells the part of a row, such as "train".

    Returns [] if there is no such column, or no value is the name of a part.
    """
    header = Header.read(file)
    split_column = header.split_column
    if split_column is None:
        return []
    rows = read_rows(file, header.delimiter)[1:]
    values: dict[str, None] = {}  # in the order of the table
    for _, row in rows:
        if len(row) > split_column:
            values[row[split_column].strip()] = None
    if not any(map(part_of_name, values)):
        return []
    return list(values)


def _is_table(ends: Ends) -> bool:
    return Header.parse(ends.lines).columns is not None


def describe_columns(path: str) -> str:
    """Returns a message with the columns that a table has, and those that it needs."""
    columns = ", ".join(Header.read(path).first) or "(none)"
    return f"'{path}' has the columns {columns}, but --data needs {_REQUIRED}"


def names_images(path: str) -> bool:
    """Returns whether the second line of a table has the name of an image."""
    return any(map(is_image_name, Header.read(path).second))


def has_unknown_boxes(path: str) -> bool:
    """Returns whether the second line of a table has an image, and at least four numbers.

    If ``find_columns`` returns None for such a table, it has boxes in columns of unknown names.
    """
    return names_images(path) and sum(map(is_number, Header.read(path).second)) >= _MIN_NUMBERS


def read_table(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the rows of a part of a data set, which may be in several tables."""
    result = Labels(images=[])
    for file, value in labels.parts[part]:
        read_part = read_with(functools.partial(read_file, value=value), "CSV")
        table = read_part(tree, LabelSet(labels.base, {part: [file]}), part)
        result.files += table.files
        result.notes += table.notes
        result.images += table.images
    for file in dict.fromkeys(result.files):
        header = Header.read(file)
        columns = header.columns
        if columns is None or columns.label is None:
            note = f"'{file}' has no column of classes: all boxes have '{ONLY_CLASS}'"
            result.notes.append(note)
        elif columns.has_header and columns.image != columns.label:
            result.notes += _note_guesses(file, columns, header.first)
        if columns is None or not columns.is_relative:
            continue
        for image in result.images:
            # The tables of Open Images list images that most users do not have.
            if image.exclusion and image.exclusion.item == "missing image":
                image.exclusion = dataclasses.replace(image.exclusion, is_fault=False)
    _replace_codes(tree, result)
    return result


def _note_guesses(file: str, columns: Columns, names: Sequence[str]) -> list[str]:
    """Returns a note for each column with an unknown name that was found by its content."""
    notes = []
    for column, known_names, content in (
        (columns.image, _IMAGE, "images"),
        (columns.label, _CLASS, "classes"),
    ):
        if column is not None and _normalize(names[column]) not in known_names:
            notes.append(f"'{file}': the column '{names[column]}' has the {content}")
    return notes


def _replace_codes(tree: FileTree, result: Labels) -> None:
    """Replaces class codes such as "/m/01g317" by names, if Open Images' table of them exists."""
    tables = [path for path in tree.other_files if path.endswith(".csv")]
    descriptions = [path for path in tables if os.path.basename(path).startswith(_DESCRIPTIONS)]
    if not descriptions:
        return
    result.files.append(descriptions[0])
    names = {row[0]: row[1] for _, row in read_rows(descriptions[0]) if len(row) == 2}
    for image in result.images:
        image.boxes = [
            box._replace(class_name=names.get(box.class_name, box.class_name))
            for box in image.boxes
        ]


def read_file(file: str, value: str = "") -> list[LabelledImage]:
    """Returns the images in a table with their boxes. The rows of an image may be anywhere.

    Args:
        file: path of the table.
        value: only rows with this value in the column that tells the part are read; "" for all.

    Raises:
        UserError: the columns of images or boxes were not recognized.
    """
    header = Header.read(file)
    columns = header.columns
    if columns is None:
        raise UserError(describe_columns(file))
    split_column = header.split_column or 0
    rows: list[tuple[int, list[str]]] = []
    for number, row in read_rows(file, header.delimiter):
        cells = [cell.strip() for cell in row]
        if any(cells):
            rows.append((number, cells))
    if columns.has_header:
        rows = rows[1:]
    num_columns = 1 + max((columns.image, columns.label or 0, *columns.box))
    images: dict[str, LabelledImage] = {}
    for number, row in rows:
        if value and (len(row) <= split_column or row[split_column] != value):
            continue
        cells = row + [""] * (num_columns - len(row))
        name = cells[columns.image]
        box = [cells[column] for column in columns.box]
        class_name = ONLY_CLASS if columns.label is None else cells[columns.label]
        location = f"{file}, line {number}"
        image = images.setdefault(name, LabelledImage(location, name))
        # Images without objects have empty boxes, and may have a class such as "No finding".
        if all(cell.lower() in _EMPTY for cell in box):
            continue
        with image.skip_invalid_box(location):
            if not name:
                raise ValueError("it names no image")
            points = columns.to_points(box)
            image.add_box(
                location, class_name, points, is_relative=columns.is_relative, is_box=True
            )
    return list(images.values())


TABLE = Format(
    name="table",
    title="CSV",
    kinds=(LabelKind(name="table", suffixes=(".csv", ".tsv"), matches=_is_table),),
    find=find_table,
    read=read_table,
    data="a file with the columns `filename, class, xmin, ymin, xmax, ymax`, or `x, y, width, "
    "height`, or `bbox`; a file without a header with `path, x1, y1, x2, y2, class`; a folder with "
    "`train_labels.csv` and `test_labels.csv`; a file of Open Images",
    images="below the folder of the file, found by their names; or `--images DIR`",
    is_last=True,  # a table may repeat labels, or list results
)
