# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The metadata of an image folder of Hugging Face: ``metadata.jsonl`` or ``metadata.csv``.

A row has "file_name", and "objects" with "bbox" and "categories". A bbox is [x, y, width, height]
in pixels, as in the object detection guide of Hugging Face.
"""

import csv
import json
from collections.abc import Iterator
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets.label_kinds import LabelKind, starts_with
from qbheat_det.data.datasets.labelled_image import BROKEN, LabelledImage, corners, describe
from qbheat_det.data.datasets.text_files import read_text

from .base import Format, find_by_kind, read_with
from .via import NAME_KEYS, choose_name


def read_file(file: str) -> Iterator[LabelledImage]:
    """Reads the metadata of images."""
    for number, row in enumerate(_read_rows(file), start=1):
        try:
            image = LabelledImage(f"{file}, entry {number}", row["file_name"])
            objects = row.get("objects") or {}
            objects = json.loads(objects) if isinstance(objects, str) else objects
            if isinstance(objects, dict):
                keys = (*NAME_KEYS, "categories", "labels")
                names: list[Any] = next((objects[key] for key in keys if key in objects), [])
                pairs = zip(objects.get("bbox", []), names, strict=True)
                objects = [{"bbox": box, "category": name} for box, name in pairs]
        except BROKEN as error:
            raise UserError(f"{file}, entry {number}: {describe(error)}") from error
        for index, thing in enumerate(objects, start=1):
            with image.reading(place := f"{image.place}, object {index}"):
                x, y, width, height = map(float, thing["bbox"])
                points = corners(x, y, width, height)
                image.add(place, choose_name(thing), points, is_box=True)
        yield image


def _read_rows(file: str) -> list[Any]:
    text = read_text(file).content
    if file.lower().endswith(".csv"):
        return list(csv.DictReader(text.splitlines()))
    return [json.loads(line) for line in text.splitlines() if line.strip()]


HUGGING_FACE = Format(
    "hugging_face",
    "Hugging Face metadata",
    (
        LabelKind("hugging face", (".jsonl",), lambda ends: '"file_name"' in ends.start),
        LabelKind("hugging face table", (".csv",), starts_with("file_name", "objects")),
    ),
    find_by_kind("hugging face", "hugging face table"),
    read_with(read_file, "Hugging Face metadata"),
    data="a folder with `metadata.jsonl` or `metadata.csv`",
    images="the same folder",
)
