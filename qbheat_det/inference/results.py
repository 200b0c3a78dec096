# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detections, which can be drawn, and converted for COCO, Label Studio and CVAT."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import quote

import PIL.Image
import torch
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically

from .drawing import draw_instances
from .images import Image, read_rgb

Format = Literal["coco", "cvat", "label-studio"]
FORMATS: tuple[Format, ...] = get_args(Format)
_LOCAL_FILES = "/data/local-files/?d="  # Label Studio's URL of files in local storage


class DetectedBox(NamedTuple):
    """One box with its corners in pixels, its score in [0, 1], and its class."""

    xyxy: tuple[float, float, float, float]
    score: float
    class_name: str
    class_id: int


@dataclass(frozen=True, repr=False)
class Detections:
    """The boxes that a detector found in one image, in descending order of scores.

    Iterating yields a ``DetectedBox`` for each box.

    Attributes:
        instances: Detectron2's ``Instances`` on the CPU, with ``pred_boxes``, ``scores`` and
            ``pred_classes``.
        class_names: class names of the model, indexed by ``pred_classes``.
        category_ids: ids of the classes in the training annotations; empty if unknown.
        source: the image (H, W, 3), uint8, RGB, or the path of its file. A file is read only when
            the image is needed, so that the results of a large folder fit in memory.
        file_name: a path, or a text such as "image 3".
        frame: index of the frame in a video, from 0; None for an image.
    """

    instances: Instances
    class_names: Sequence[str]
    category_ids: Sequence[int]
    source: Image | Path
    file_name: str = "image"
    frame: int | None = None

    def __len__(self) -> int:
        return len(self.instances)

    def __repr__(self) -> str:
        height, width = self.instances.image_size
        counts = Counter(self.labels).most_common()
        found = ", ".join(f"{count} {name}" for name, count in counts) or "nothing"
        frame = "" if self.frame is None else f", frame {self.frame}"
        return f"Detections({self.file_name}{frame}, {width}x{height}: {found})"

    def __iter__(self) -> Iterator[DetectedBox]:
        columns = self.scores.tolist(), self.labels, self.instances.pred_classes.tolist()
        for xyxy, *row in zip(self.boxes.tolist(), *columns, strict=True):
            yield DetectedBox(tuple(xyxy), *row)

    @property
    def image(self) -> Image:
        """The upright RGB image (H, W, 3), uint8. Raises a ``UserError`` if its file is gone."""
        return read_rgb(self.source) if isinstance(self.source, Path) else self.source

    @property
    def boxes(self) -> Tensor:
        """Boxes (N, 4), XYXY in pixels of the image."""
        return self.instances.pred_boxes.tensor

    @property
    def scores(self) -> Tensor:
        """Scores (N,) in [0, 1]."""
        return self.instances.scores

    @property
    def labels(self) -> list[str]:
        """The class name of each box."""
        names, indices = self.class_names, self.instances.pred_classes.tolist()
        return [names[index] if names else str(index) for index in indices]

    def select(self, threshold: float, classes: Sequence[str] = ()) -> "Detections":
        """Returns the boxes with a score of at least ``threshold``, optionally of some classes."""
        keep = self.instances.scores >= threshold
        if classes:
            keep &= torch.tensor([label in classes for label in self.labels], dtype=torch.bool)
        return replace(self, instances=self.instances[keep])

    def draw(self) -> Image:
        """Returns the image with boxes, RGB (H, W, 3), uint8. Small images are enlarged."""
        return draw_instances(self.image, self.instances, self.class_names)

    def show(self) -> None:
        """Shows the image with boxes in a viewer, or below the cell of a notebook."""
        PIL.Image.fromarray(self.draw()).show()

    def save(self, path: str | Path) -> None:
        """Writes the image with boxes, and creates the folder if needed.

        Raises:
            UserError: the file cannot be written, or its suffix is not that of an image format.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(self.draw()).save(path, quality=92)  # PNG ignores ``quality``
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write '{path}': {error}") from error

    def to_coco(self, image_id: int = 1) -> list[dict[str, Any]]:
        """Returns one dict per box, in COCO's results format.

        If ``category_ids`` is empty, the category id is the class index + 1.
        """
        found: list[dict[str, Any]] = instances_to_coco_json(self.instances, image_id)
        for box in found:
            index = box["category_id"]
            box["category_id"] = self.category_ids[index] if self.category_ids else index + 1
        return found


@dataclass
class Predictions:
    """Results on many images or files.

    Attributes:
        results: for a detector, one dict per box with "image_id", "file_name", "category_id",
            "bbox" (XYWH, pixels of the upright image) and "score". If the model predicts masks, a
            dict also has "segmentation" (RLE). In videos, a dict also has "frame" (from 0), and
            each frame has its own image id. For a classifier, one dict per image with "file_name"
            and "classes", a list of "name" and "score" in descending order of scores.
        images: for a detector, one dict per image or frame with "id", "file_name", "height" and
            "width" in pixels, and "frame" in videos.
        num_images: number of images and videos that were predicted on.
        best_score: highest score of all boxes, including boxes below the threshold.
        skipped: (path, reason) of each unreadable file.
        undrawn: (path, reason) of each image that could not be drawn. Its boxes are in ``results``.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    num_images: int = 0
    best_score: float = 0.0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    undrawn: list[tuple[str, str]] = field(default_factory=list)

    def add(self, found: Detections, file: Path | None = None) -> None:
        """Adds the boxes of the next image or frame, from ``file``. Image ids start from 1."""
        number, (height, width) = len(self.images) + 1, found.instances.image_size
        origin: dict[str, Any] = {"file_name": found.file_name}
        if found.frame is not None:
            origin["frame"] = found.frame
        image = {"id": number, **origin, "height": height, "width": width}
        if isinstance(path := file or found.source, Path):
            image["path"] = os.path.abspath(path)
        self.images.append(image)
        self.results += [{**box, **origin} for box in found.to_coco(number)]


def save_annotations(found: Iterable[Detections], path: str | Path, format: Format) -> None:
    """Writes detections to one file for import into a labelling tool.

    ``render_annotations`` describes the formats.

    Args:
        found: detections of one detector, such as ``detector.stream("photos/")``.
        path: the JSON file to write.
        format: "coco", "cvat" or "label-studio".

    Raises:
        UserError: the file cannot be written, or the format does not allow videos.
    """
    check_writable(path)
    every = Predictions()
    names: Sequence[str] = ()
    ids: Sequence[int] = ()
    for one in found:
        every.add(one)
        names, ids = one.class_names, one.category_ids
    content = json.dumps(render_annotations(every.results, every.images, names, ids, format))
    write_atomically(path, content.encode())


def render_annotations(
    results: Sequence[dict[str, Any]],
    images: Sequence[dict[str, Any]],
    class_names: Sequence[str],
    category_ids: Sequence[int],
    format: Format,
) -> Any:
    """Converts predictions to the JSON data of a format.

    Args:
        results: boxes as in ``Predictions.results``.
        images: all images, as in ``Predictions.images``; "path" is the absolute path of a file.
        class_names: class names of the model, by index.
        category_ids: ids of the classes in ``results``, by index; empty if the ids start from 1.
        format: "coco" returns ``results`` with "category_name", for COCO's evaluation. "cvat"
            returns a complete annotation file for CVAT's import "COCO 1.0", which matches images by
            file name. "label-studio" returns a list of tasks with predictions, for a configuration
            with ``<Image name="image" value="$image"/>`` and
            ``<RectangleLabels name="label" toName="image">``. Images are files in local storage.

    Raises:
        UserError: the format is unknown, or it does not support frames of a video.
    """
    if format not in FORMATS:
        raise UserError(f"the format '{format}' is not one of {', '.join(FORMATS)}")
    # Classes without a name in the config are named by their ids.
    names = {box["category_id"]: str(box["category_id"]) for box in results}
    names |= dict(zip(category_ids or range(1, 1 + len(class_names)), class_names, strict=False))
    if format == "coco":
        return [{**box, "category_name": names[box["category_id"]]} for box in results]
    if video := next((image["file_name"] for image in images if "frame" in image), None):
        raise UserError(f"'{format}' is for images, but '{video}' is a video: use coco")
    if format == "cvat":
        return _render_dataset(results, images, names)
    boxes: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for box in results:
        boxes[box["image_id"]].append(box)
    return [_render_task(image, boxes[image["id"]], names) for image in images]


def _render_dataset(
    results: Sequence[dict[str, Any]], images: Sequence[dict[str, Any]], names: dict[int, str]
) -> dict[str, Any]:
    keys = ("image_id", "category_id", "bbox", "score")
    annotations = [
        {
            "id": number,
            **{key: box[key] for key in keys},
            "area": box["bbox"][2] * box["bbox"][3],
            "iscrowd": 0,
            "segmentation": [],
        }
        for number, box in enumerate(results, start=1)
    ]
    categories = [{"id": key, "name": name, "supercategory": ""} for key, name in names.items()]
    files = [{key: value for key, value in image.items() if key != "path"} for image in images]
    return {"images": files, "annotations": annotations, "categories": categories}


def _render_task(
    image: dict[str, Any], boxes: Sequence[dict[str, Any]], names: dict[int, str]
) -> dict[str, Any]:
    """Returns a task of Label Studio, with boxes in percent of the image's sides."""
    height, width = image["height"], image["width"]
    common: dict[str, Any] = {"type": "rectanglelabels", "from_name": "label", "to_name": "image"}
    common |= {"original_width": width, "original_height": height, "image_rotation": 0}
    shapes = []
    for number, box in enumerate(boxes):
        x, y, w, h = (100 * side for side in box["bbox"])
        value = {"x": x / width, "y": y / height, "width": w / width, "height": h / height}
        value |= {"rotation": 0, "rectanglelabels": [names[box["category_id"]]]}
        shape = {"id": f"{image['id']}-{number}", "score": box["score"], "value": value}
        shapes.append({**common, **shape})
    path = image.get("path", image["file_name"])
    path = quote(os.fsencode(path))  # also names that are not UTF-8
    task: dict[str, Any] = {"data": {"image": _LOCAL_FILES + path}}
    if boxes:
        mean = sum(box["score"] for box in boxes) / len(boxes)
        prediction = {"model_version": "qbheat_det", "score": mean, "result": shapes}
        task["predictions"] = [prediction]
    return task
