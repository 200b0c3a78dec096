# Copyright (c) qbheat_det contributors. Apache-2.0.
"""KITTI's format: a text file per image, with class, corners and 3D box of an object per line.

Regions of the class "DontCare", whose objects are not labelled, are left out.
"""

from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.label_kinds import LabelKind, lines_like
from qbheat_det.data.datasets.labelled_image import LabelledImage
from qbheat_det.data.datasets.text_files import read_lines

from .base import Format, find_per_image, read_per_image

_OBJECT = r"^\s*[a-z]\S*(\s+[-+]?\d+(\.\d*)?(e[-+]?\d+)?){14,15}\s*$"
_MIN_COLUMNS = 8  # class, truncation, occlusion, angle and the corners
_UNLABELLED_REGION = "DontCare"


def add_objects(image: LabelledImage, lines: list[tuple[int, str]]) -> None:
    """Adds the objects in the lines of a label file to an image."""
    for number, line in lines:
        with image.skip_invalid_box(f"{image.label_file}, line {number}") as location:
            columns = line.split()
            if columns[0] == _UNLABELLED_REGION:
                reason = "its objects are not labelled"
                image.left_out_boxes.append(
                    LeftOut(
                        kind="that KITTI does not label",
                        where=location,
                        reason=reason,
                        item="box",
                        is_fault=False,
                    )
                )
                continue
            if len(columns) < _MIN_COLUMNS:
                raise ValueError(
                    f"must have {_MIN_COLUMNS} columns or more, but has {len(columns)}"
                )
            left, top, right, bottom = columns[4:8]  # pixels
            image.add_box(location, columns[0], [(left, top), (right, bottom)], is_box=True)


KITTI = Format(
    name="kitti",
    title="KITTI",
    kinds=(
        LabelKind(
            name="kitti", suffixes=(".txt",), matches=lines_like(_OBJECT), has_one_image=True
        ),
    ),
    find=find_per_image("kitti"),
    read=read_per_image(read_lines, add_objects),
    data="a folder with a `.txt` file for each image, such as `label_2/` beside `image_2/`",
    images="below the folder, found by their names",
)
