# Copyright (c) qbheat_det contributors. Apache-2.0.
"""CreateML's format: a JSON list of images. Boxes have their centre and size in pixels."""

from collections.abc import Iterator

from qbheat_det.data.checks import short
from qbheat_det.data.datasets.label_kinds import LabelKind, json_list
from qbheat_det.data.datasets.labelled_image import LabelledImage, corners
from qbheat_det.data.datasets.text_files import read_json

from .base import Format, find_by_kind, read_with


def read_file(file: str) -> Iterator[LabelledImage]:
    """Reads a JSON file of CreateML, LabelImg or Roboflow. Yields the images with their boxes."""
    for number, entry in enumerate(read_json(file), start=1):
        image = LabelledImage(f"{file}, entry {number}")
        if not isinstance(entry, dict):
            image.mark_missing(f"it must be an object, but is {short(entry)}")
            yield image
            continue
        name = entry.get("image", entry.get("imagefilename"))
        if not isinstance(name, str) or not name:
            image.mark_missing(f"its image must be a file name, not {short(name)}")
            yield image
            continue
        image.name = name
        annotations = entry.get("annotations", entry.get("annotation")) or ()
        for index, annotation in enumerate(annotations, start=1):
            with image.skip_invalid_box(f"{image.location}, annotation {index}") as location:
                box = annotation["coordinates"]
                x, y, width, height = (float(box[key]) for key in ("x", "y", "width", "height"))
                points = corners(x - width / 2, y - height / 2, width, height)
                image.add_box(location, annotation.get("label"), points, is_box=True)
        yield image


CREATEML = Format(
    name="createml",
    title="CreateML",
    kinds=(
        LabelKind(
            name="createml",
            suffixes=(".json",),
            matches=json_list(
                ("coordinates",),
                ("imagefilename", "annotation"),
                ("image", "annotations", "verified"),
            ),
        ),
    ),
    find=find_by_kind("createml"),
    read=read_with(read_file, "CreateML"),
    data="a JSON file, or a folder with one per part, such as `train/_annotations.createml.json`",
    images="below the folder, found by their names; or `--images DIR`",
)
