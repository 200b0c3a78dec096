# Copyright (c) qbheat_det contributors. Apache-2.0.
"""VoTT's format: a JSON file per image, or an export with all images. Boxes are in pixels."""

from collections.abc import Iterator
from typing import Any

from qbheat_det.data.checks import short
from qbheat_det.data.datasets.label_kinds import LabelKind, json_object
from qbheat_det.data.datasets.labelled_image import LabelledImage, corners
from qbheat_det.data.datasets.text_files import read_json

from .base import Format, find_by_kind, find_path, read_with


def read_file(file: str) -> Iterator[LabelledImage]:
    """Reads the file of one image ("…-asset.json"), or a JSON export of all images.

    Yields the images with their boxes. A region gets the first of its tags as its class.
    """
    content = read_json(file)
    entries = [content]
    if "assets" in content:
        entries = list(content["assets"].values())
    for entry in entries:
        name = _find_name(entry)
        image = LabelledImage(f"{file}, asset {short(name)}")
        if not isinstance(name, str):
            image.mark_missing("it has no asset with a name")
            yield image
            continue
        image.name = find_path(name)
        for number, region in enumerate(entry.get("regions") or (), start=1):
            with image.skip_invalid_box(f"{image.location}, region {number}") as location:
                box = region["boundingBox"]
                points = corners(*(float(box[key]) for key in ("left", "top", "width", "height")))
                image.add_box(location, next(iter(region["tags"]), None), points, is_box=True)
        yield image


def _find_name(entry: Any) -> object:
    """Returns the name of the asset in an entry, or None."""
    if not isinstance(entry, dict) or not isinstance(entry.get("asset"), dict):
        return None
    return entry["asset"].get("name")


VOTT = Format(
    name="vott",
    title="VoTT",
    kinds=(LabelKind(name="vott", suffixes=(".json",), matches=json_object(("regions", "asset"))),),
    find=find_by_kind("vott"),
    read=read_with(read_file, "VoTT"),
    data="a project or a JSON export",
    images="below the folder, found by their names; or `--images DIR`",
)
