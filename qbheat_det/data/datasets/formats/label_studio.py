# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Label Studio's exports JSON, JSON-MIN and CSV. Shapes become their bounding boxes.

Images of tasks without a finished annotation are left out. Of several annotations of a task, the
ground truth is read, or else the last one.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qbheat_det.data.checks import short
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import LabelKind, json_list, starts_with
from qbheat_det.data.datasets.labelled_image import (
    BROKEN,
    LabelledImage,
    NoBoxError,
    corners,
    describe,
    enclose_ellipse,
    rotate_box,
)
from qbheat_det.data.datasets.text_files import read_json, read_table

from .base import Format, Labels, LabelSet, find_by_kind, find_path, read_with

_UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # Label Studio adds this prefix to uploaded files
# The keys of a region. A region with only these keys was drawn without a label.
_SHAPE = {
    *("x", "y", "width", "height", "rotation", "points", "closed", "radiusX", "radiusY"),
    *("original_width", "original_height", "image_rotation"),
}


@dataclass
class Task(LabelledImage):
    """The image of a task. ``num_annotations`` is the number of its finished annotations."""

    num_annotations: int = 1


def read_label_studio(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the files of a part, see ``Format.read``."""
    result = _read(tree, labels, part)
    missing = [one for one in result.images if one.reason and one.reason.item == "missing image"]
    _find_uploaded(tree, [image for image in missing if image.name])
    tasks = [image for image in result.images if isinstance(image, Task)]
    for task in tasks:
        if not task.num_annotations and task.file:
            reason = "its task has no finished annotation"
            task.leave_out("without a finished annotation", reason, is_fault=False)
    several = sum(task.num_annotations > 1 for task in tasks)
    if several:
        result.notes.append(
            f"{several:,} tasks have several annotations: of each, the ground truth or the last "
            "is read"
        )
    return result


def _find_uploaded(tree: FileTree, images: Sequence[LabelledImage]) -> None:
    """Finds the original images of uploaded ones, whose names have a prefix.

    If several files or uploads have a name, it does not tell which file an upload is.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for path in tree.all_images:
        files[_clean(os.path.basename(path))].append(path)
    uploads: dict[str, set[str]] = defaultdict(set)
    original = {}
    for image in images:
        last = image.name.rpartition("/")[2]
        original[image.name] = _clean(_UPLOADED.sub("", last))
        uploads[original[image.name]].add(last)
    for image in images:
        name = original[image.name]
        if len(files[name]) == 1 and len(uploads[name]) == 1:
            image.file, image.reason = files[name][0], None
        elif files[name]:
            reason = f"several uploads or files have the name '{name}', such as '{files[name][0]}'"
            image.leave_out("of an ambiguous name", reason)


def _clean(name: str) -> str:
    """Returns a file name as Label Studio stores it."""
    return re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))


def read_file(file: str) -> Iterator[Task]:
    """Reads an export."""
    tasks = _read_tasks(file) if file.lower().endswith(".csv") else read_json(file)
    for number, task in enumerate(tasks, start=1):
        image = Task(f"{file}, task {number}")
        results: Sequence[Any] = ()
        try:
            results = _read_task(image, task)
        except BROKEN as error:
            image.miss(describe(error))
        for index, result in enumerate(results, start=1):
            with image.reading(f"{image.place}, region {index}") as place:
                _add_result(image, place, result)
        yield image


def _read_tasks(file: str) -> list[dict[str, Any]]:
    """Returns the rows of a CSV export as tasks of JSON-MIN."""
    keys = ("label", "bbox")
    return [
        {**row, **{key: json.loads(row[key]) for key in keys if row.get(key, "").startswith("[")}}
        for row in read_table(file)
    ]


def _read_task(image: Task, task: Any) -> Sequence[Any]:
    """Reads a task into its image, and returns its list of regions."""
    if not isinstance(task, dict):
        raise ValueError(f"it must be a JSON object, but is {short(task)}")
    data = task.get("data", task)
    texts = [value for value in data.values() if isinstance(value, str) and "." in value]
    named = [data[key] for key in ("image", "img", "ocr") if key in data]
    addresses = [*named, *texts]
    if not addresses:
        raise ValueError("it names no image")
    image.place = f"{image.place.rpartition(' ')[0]} {task.get('id', '')}".rstrip()
    image.name = find_path(str(addresses[0]))
    attempts = task.get("annotations", task.get("completions"))
    if attempts is None:  # JSON-MIN
        return list(task.get("label") or task.get("bbox") or [])
    done = [one for one in attempts if not one.get("was_cancelled")]
    image.num_annotations = len(done)
    truth = [one for one in done if one.get("ground_truth")]
    chosen = (truth or done)[-1:]
    return [region for one in chosen for region in one["result"]]


def _add_result(image: LabelledImage, place: str, result: Mapping[str, Any]) -> None:
    """Adds a region, whose coordinates are percentages of the image's sides, to an image."""
    value = result.get("value", result)
    kind = next((key for key in value if key.endswith("labels")), None)
    if kind is None and value and value.keys() <= _SHAPE:
        raise ValueError("it has no class")
    if kind is None or kind in ("labels", "choices"):  # not about a region
        return
    source = {**result, **value}
    wide = float(source.get("original_width") or 1)
    high = float(source.get("original_height") or 1)
    turn = float(value.get("rotation") or 0)

    # Rotations are in pixel coordinates.
    def pixels(*keys: str) -> list[float]:
        sides = {"x": wide, "width": wide, "radiusX": wide}
        return [value[key] / 100 * sides.get(key, high) for key in keys]

    if "points" in value and kind != "brushlabels":
        points = [(x / 100 * wide, y / 100 * high) for x, y in value["points"]]
    elif kind == "ellipselabels":
        x, y, rx, ry = pixels("x", "y", "radiusX", "radiusY")
        points = enclose_ellipse(x, y, rx, ry, turn)
    elif kind == "rectanglelabels":
        box = corners(*pixels("x", "y", "width", "height"))
        points = rotate_box(*box[0], *box[1], turn, box[0])
    else:
        raise NoBoxError(f"regions of the kind '{kind}' have no box")
    shares = [(x / wide, y / high) for x, y in points]
    image.add(place, next(iter(value[kind]), None), shares, is_relative=True)


_read = read_with(read_file, "Label Studio")

LABEL_STUDIO = Format(
    "label_studio",
    "Label Studio",
    (
        LabelKind(
            "label studio",
            (".json",),
            json_list(
                ("annotations", "data"),
                ("completions", "data"),
                ("label", "annotator"),
                ("label", "image"),
                ("image", "annotator"),
                ("image", "annotation_id"),
            ),
        ),
        LabelKind("label studio table", (".csv",), starts_with("annotation_id", "annotator")),
    ),
    find_by_kind("label studio", "label studio table"),
    read_label_studio,
    data="an export as JSON, JSON-MIN or CSV",
    images="below the folder of the file, found by their names; or `--images DIR`",
)
