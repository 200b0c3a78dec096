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
    LabelledImage,
    NoBoxError,
    describe,
    enclose_ellipse,
    rotate_box,
)
from qbheat_det.data.datasets.text_files import read_json, read_table

from .base import Format, Labels, LabelSet, find_by_kind, find_path, read_with

_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{8}-")  # Label Studio adds it to uploaded files
# The keys of a shape's geometry. A region with only these keys was drawn without a label.
_GEOMETRY_KEYS = {
    *("x", "y", "width", "height", "rotation", "points", "closed", "radiusX", "radiusY"),
    *("original_width", "original_height", "image_rotation"),
}


@dataclass
class Task(LabelledImage):
    """The image of a task.

    Attributes:
        num_annotations: number of finished annotations of the task, of which one is read.
    """

    num_annotations: int = 1


def read_label_studio(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the exports of a part of a data set, and finds the images of their tasks."""
    result = _read(tree, labels, part)
    tasks = [image for image in result.images if isinstance(image, Task)]
    missing = []
    for task in tasks:
        is_missing = task.exclusion is not None and task.exclusion.item == "missing image"
        if task.name and is_missing:
            missing.append(task)
    _find_uploaded(tree, missing)
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
    """Sets ``file`` of images that were uploaded to Label Studio, which changed their names.

    Label Studio puts eight hexadecimal digits before the name, and replaces some characters. If
    several uploads or several files have the same original name, the images are left out.

    Args:
        tree: the files of the data set.
        images: images whose name in the label file is no file of the data set.
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
    """Removes the prefix that Label Studio adds to the name of an uploaded file."""
    return _clean(_UPLOAD_PREFIX.sub("", upload))


def _clean(name: str) -> str:
    """Replaces spaces and removes special characters, as Label Studio does in an upload."""
    return re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))


def read_file(file: str) -> Iterator[Task]:
    """Reads an export as JSON, JSON-MIN or CSV. Yields the image of each task with its boxes."""
    tasks = _read_tasks(file) if file.lower().endswith(".csv") else read_json(file)
    for number, task in enumerate(tasks, start=1):
        image = Task(f"{file}, task {number}")
        regions: Sequence[Any] = ()
        try:
            regions = _read_task(image, task)
        except Exception as error:
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
    """Sets the location, name and number of annotations of a task's image from its entry.

    Returns the regions of the annotation to read: the last that is marked as ground truth, or else
    the last finished one.
    """
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
    """Adds the bounding box of a region to an image.

    A result that is no shape, such as a choice for the whole image, is ignored.

    Args:
        image: the image of the task.
        location: location of the region in the label file, for messages.
        region: an entry of the task's results. Its shape, with coordinates in percent of the
            image's sides, is in "value". In JSON-MIN, the entry itself is the shape.

    Raises:
        NoBoxError: the shape has no bounding box.
        ValueError: the shape has no class or invalid coordinates.
    """
    shape = region.get("value", region)
    # The key tells the type of the shape and has its classes, as in {"ellipselabels": ["cat"]}.
    labels_key = next((key for key in shape if key.endswith("labels")), None)
    has_only_geometry = bool(shape) and shape.keys() <= _GEOMETRY_KEYS
    if labels_key is None and has_only_geometry:
        raise ValueError("it has no class")
    if labels_key is None or labels_key == "labels":  # no shape in an image
        return
    # Pixels are needed to rotate shapes. The image's size is beside "value" or in it.
    attributes = {**region, **shape}
    image_width = float(attributes.get("original_width") or 1)
    image_height = float(attributes.get("original_height") or 1)
    degrees = float(shape.get("rotation") or 0)

    def to_pixels(x_percent: float, y_percent: float) -> tuple[float, float]:
        return x_percent / 100 * image_width, y_percent / 100 * image_height

    if "points" in shape and labels_key != "brushlabels":
        points = [to_pixels(x, y) for x, y in shape["points"]]
    elif labels_key == "ellipselabels":
        x, y = to_pixels(shape["x"], shape["y"])
        radius_x, radius_y = to_pixels(shape["radiusX"], shape["radiusY"])
        points = enclose_ellipse(x, y, radius_x, radius_y, degrees)
    elif labels_key == "rectanglelabels":
        left, top = to_pixels(shape["x"], shape["y"])
        width, height = to_pixels(shape["width"], shape["height"])
        right = left + width
        bottom = top + height
        points = rotate_box(left, top, right, bottom, degrees, around=(left, top))
    else:
        raise NoBoxError(f"regions of the kind '{labels_key}' have no box")
    fractions = [(x / image_width, y / image_height) for x, y in points]
    first_class = next(iter(shape[labels_key]), None)
    image.add_box(location, first_class, fractions, is_relative=True)


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
