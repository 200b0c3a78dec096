# Copyright (c) qbheat_det contributors. Apache-2.0.
"""DOTA's format: a text file per image, with one object per line.

A line has the four corners of an object in pixels, its class and its difficulty. Rotated boxes
become their enclosing boxes. Roboflow calls this format "YOLOv5 Oriented Bounding Boxes".
"""

from qbheat_det.data.checks import short
from qbheat_det.data.datasets.label_kinds import LabelKind, lines_like
from qbheat_det.data.datasets.labelled_image import LabelledImage
from qbheat_det.data.datasets.text_files import read_lines

from .base import Format, find_per_image, read_per_image

_OBJECT = r"^\s*([-+]?\d+(\.\d*)?\s+){8}\D\S*\s+\d\s*$"
_HEADERS = ("imagesource:", "gsd:")


def add_objects(image: LabelledImage, lines: list[tuple[int, str]]) -> None:
    """Adds the objects in the lines of a label file to an image."""
    for number, line in lines:
        if line.startswith(_HEADERS):
            continue
        with image.skip_invalid_box(f"{image.label_file}, line {number}") as location:
            *numbers, name, difficulty = line.split()
            if len(numbers) != 8:
                raise ValueError(
                    f"must be four corners, class and difficulty, but is {short(line)}"
                )
            points = zip(numbers[::2], numbers[1::2], strict=True)
            image.add_box(location, name, points, is_crowd=difficulty == "2")


DOTA = Format(
    name="dota",
    title="DOTA",
    kinds=(
        LabelKind(
            name="dota",
            suffixes=(".txt",),
            matches=lines_like(_OBJECT, header="imagesource:"),
            has_one_image=True,
        ),
    ),
    find=find_per_image("dota"),
    read=read_per_image(read_lines, add_objects),
    data="a folder with a `.txt` file for each image, such as `labelTxt/` beside `images/`",
    images="below the folder, found by their names",
)
