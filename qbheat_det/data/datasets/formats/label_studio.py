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
    describe,
    enclose_ellipse,
    rotate_box,
)
from qbheat_det.data.datasets.text_files import read_json, read_table

from .base import Format, Labels, LabelSet, find_by_kind, find_path, read_with

_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{8}-")  # Label Studio adds it to uploaded files
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
    tasks = [image for image in result.images if isinstance(image, Task)]
    _find_uploaded(
        tree,
        [
            task
            for task in tasks
            if task.name and task.exclusion and task.exclusion.item == "missing image"
        ],
    )
    for task in tasks:
        if not task.num_annotations and task.file:
            reason = "its task has no finished annotation"
            task.leave_out("without a finished annotation", reason, is_fault=False)
    num_repeated = sum(task.num_annotations > 1 for task in tasks)
    if num_repeated:
        result.notes.append(
            f"{num_repeated:,} tasks have several annotations: of each, the ground truth or the "
            "last is read"
        )
    return result


def _find_uploaded(tree: FileTree, images: Sequence[LabelledImage]) -> None:
    """Finds the original images of uploaded ones, whose names have a prefix.

    If several files or uploads have a name, it does not tell which file an upload is.
    """
    files_of_name: dict[str, list[str]] = defaultdict(list)
    for path in tree.all_images:
        files_of_name[_clean(os.path.basename(path))].append(path)
    uploads_of_name: dict[str, set[str]] = defaultdict(set)
    for image in images:
        upload = image.name.rpartition("/")[2]
        uploads_of_name[_find_original_name(upload)].add(upload)
    for image in images:
        name = _find_original_name(image.name.rpartition("/")[2])
        files = files_of_name[name]
        if len(files) == 1 and len(uploads_of_name[name]) == 1:
            image.file = files[0]
            image.exclusion = None
        elif files:
            reason = f"several uploads or files have the name '{name}', such as '{files[0]}'"
            image.leave_out("of an ambiguous name", reason)


def _find_original_name(upload: str) -> str:
    """Returns the name of a file before its upload, as Label Studio stores it."""
    return _clean(_UPLOAD_PREFIX.sub("", upload))


def _clean(name: str) -> str:
    """Returns a file name as Label Studio stores it."""
    return re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))


def read_file(file: str) -> Iterator[Task]:
    """Reads an export."""
    tasks = _read_tasks(file) if file.lower().endswith(".csv") else read_json(file)
    for number, task in enumerate(tasks, start=1):
        image = Task(f"{file}, task {number}")
        regions: Sequence[Any] = ()
        try:
            regions = _read_task(image, task)
        except BROKEN as error:
            image.mark_missing(describe(error))
        for index, region in enumerate(regions, start=1):
            with image.skip_invalid_box(f"{image.location}, region {index}") as location:
                _add_region(image, location, region)
        yield image


def _read_tasks(file: str) -> list[dict[str, Any]]:
    """Returns the rows of a CSV export as tasks of JSON-MIN."""
    tasks = []
    for row in read_table(file):
        task: dict[str, Any] = dict(row)
        for key in ("label", "bbox"):
            if row.get(key, "").startswith("["):
                task[key] = json.loads(row[key])
        tasks.append(task)
    return tasks


def _read_task(image: Task, task: Any) -> Sequence[Any]:
    """Reads a task into its image, and returns its list of regions."""
    if not isinstance(task, dict):
        raise ValueError(f"it must be a JSON object, but is {short(task)}")
    data = task.get("data", task)
    texts = [value for value in data.values() if isinstance(value, str) and "." in value]
    addresses = [data[key] for key in ("image", "img", "ocr") if key in data] or texts
    if not addresses:
        raise ValueError("it names no image")
    image.location = f"{image.location.rpartition(' ')[0]} {task.get('id', '')}".rstrip()
    image.name = find_path(str(addresses[0]))
    annotations = task.get("annotations", task.get("completions"))
    if annotations is None:  # JSON-MIN
        return list(task.get("label") or task.get("bbox") or [])
    finished = [entry for entry in annotations if not entry.get("was_cancelled")]
    image.num_annotations = len(finished)
    ground_truth = [entry for entry in finished if entry.get("ground_truth")]
    if not finished:
        return []
    chosen = (ground_truth or finished)[-1]
    return list(chosen["result"])


def _add_region(image: LabelledImage, location: str, region: Mapping[str, Any]) -> None:
    """Adds a region, whose coordinates are percentages of the image's sides, to an image."""
    value = region.get("value", region)
    kind = next((key for key in value if key.endswith("labels")), None)
    if kind is None and value and value.keys() <= _SHAPE:
        raise ValueError("it has no class")
    if kind is None or kind in ("labels", "choices"):  # not about a region
        return
    fields = {**region, **value}
    image_width = float(fields.get("original_width") or 1)
    image_height = float(fields.get("original_height") or 1)
    degrees = float(value.get("rotation") or 0)

    # Shapes are rotated in pixels.
    def pixels(x_key: str, y_key: str) -> tuple[float, float]:
        return value[x_key] / 100 * image_width, value[y_key] / 100 * image_height

    if "points" in value and kind != "brushlabels":
        points = [(x / 100 * image_width, y / 100 * image_height) for x, y in value["points"]]
    elif kind == "ellipselabels":
        x, y = pixels("x", "y")
        radius_x, radius_y = pixels("radiusX", "radiusY")
        points = enclose_ellipse(x, y, radius_x, radius_y, degrees)
    elif kind == "rectanglelabels":
        left, top = pixels("x", "y")
        width, height = pixels("width", "height")
        around = (left, top)
        points = rotate_box(left, top, left + width, top + height, degrees, around)
    else:
        raise NoBoxError(f"regions of the kind '{kind}' have no box")
    shares = [(x / image_width, y / image_height) for x, y in points]
    image.add_box(location, next(iter(value[kind]), None), shares, is_relative=True)


_read = read_with(read_file, "Label Studio")

LABEL_STUDIO = Format(
    name="label_studio",
    title="Label Studio",
    kinds=(
        LabelKind(
            name="label studio",
            suffixes=(".json",),
            matches=json_list(
                ("annotations", "data"),
                ("completions", "data"),
                ("label", "annotator"),
                ("label", "image"),
                ("image", "annotator"),
                ("image", "annotation_id"),
            ),
        ),
        LabelKind(
            name="label studio table",
            suffixes=(".csv",),
            matches=starts_with("annotation_id", "annotator"),
        ),
    ),
    find=find_by_kind("label studio", "label studio table"),
    read=read_label_studio,
    data="an export as JSON, JSON-MIN or CSV",
    images="below the folder of the file, found by their names; or `--images DIR`",
)
