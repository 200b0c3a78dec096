# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The metadata of an image folder of Hugging Face: ``metadata.jsonl`` or ``metadata.csv``.

A row has "file_name", and "objects" with "bbox" and "categories". A bbox is [x, y, width, height]
in pixels, as in the object detection guide of Hugging Face.
"""

import json
from collections.abc import Iterator
from typing import Any

from qbheat_det.data.datasets.label_kinds import LabelKind, starts_with
from qbheat_det.data.datasets.labelled_image import LabelledImage, corners, describe
from qbheat_det.data.datasets.text_files import read_lines, read_table

from .base import NAME_KEYS, Format, choose_name, find_by_kind, read_with


def read_file(file: str) -> Iterator[LabelledImage]:
    """Reads ``metadata.jsonl`` or ``metadata.csv``. Yields the images with their boxes."""
    rows: list[tuple[int, Any]]
    if file.lower().endswith(".csv"):
        rows = list(enumerate(read_table(file), start=1))
    else:
        rows = list(read_lines(file))
    for number, row in rows:
        image = LabelledImage(f"{file}, entry {number}")
        objects: list[Any] = []
        try:
            if isinstance(row, str):  # a line of JSON
                row = json.loads(row)
            image.name = row["file_name"]
            objects = _list_objects(row)
        except Exception as error:
            image.mark_missing(describe(error))
        for index, entry in enumerate(objects, start=1):
            with image.skip_invalid_box(f"{image.location}, object {index}") as location:
                x, y, width, height = map(float, entry["bbox"])
                points = corners(x, y, width, height)
                image.add_box(location, choose_name(entry), points, is_box=True)
        yield image


def _list_objects(row: dict[str, Any]) -> list[Any]:
    """Returns one dict per object of an image, with the keys "bbox" and "category".

    Hugging Face stores the boxes and the classes as two lists. A list of objects is returned as it
    is.
    """
    objects = row.get("objects") or {}
    if isinstance(objects, str):  # in a table
        objects = json.loads(objects)
    if not isinstance(objects, dict):
        return list(objects)
    keys = (*NAME_KEYS, "categories", "labels")
    names: list[Any] = next((objects[key] for key in keys if key in objects), [])
    boxes = objects.get("bbox", [])
    return [{"bbox": box, "category": name} for box, name in zip(boxes, names, strict=True)]


HUGGING_FACE = Format(
    name="hugging_face",
    title="Hugging Face metadata",
    kinds=(
        LabelKind(
            name="hugging face",
            suffixes=(".jsonl",),
            matches=lambda ends: '"file_name"' in ends.start,
        ),
        LabelKind(
            name="hugging face table",
            suffixes=(".csv",),
            matches=starts_with("file_name", "objects"),
        ),
    ),
    find=find_by_kind("hugging face", "hugging face table"),
    read=read_with(read_file, "Hugging Face metadata"),
    data="a folder with `metadata.jsonl` or `metadata.csv`",
    images="below the same folder",
)
