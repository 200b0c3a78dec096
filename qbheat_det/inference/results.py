# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detections, which can be drawn, and converted for COCO, Label Studio and CVAT."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import PIL.Image

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.core.other_names import NamesAttributes

from .array_instances import ArrayInstances
from .drawing import draw_instances
from .images import Image, read_rgb

if TYPE_CHECKING:  # an exported file runs without Detectron2
    from detectron2.structures import Instances
    from torch import Tensor

Format = Literal["coco", "cvat", "label-studio"]
FORMATS: tuple[Format, ...] = get_args(Format)
_LOCAL_FILES = "/data/local-files/?d="  # Label Studio's URL of files in local storage


class _Box(NamedTuple):
    """The fields of ``DetectedBox``, because a ``NamedTuple`` cannot have another base class."""

    xyxy: tuple[float, float, float, float]
    score: float
    class_name: str
    class_id: int


class DetectedBox(NamesAttributes, _Box):
    """One box with its corners in pixels, its score in [0, 1], and its class."""

    __slots__ = ()


@dataclass(frozen=True, repr=False)
class Detections(NamesAttributes):
    """The boxes that a detector found in one image, in descending order of scores.

    Iterating yields a ``DetectedBox`` for each box. ``detections[0]`` is the best one.

    Attributes:
        prediction: the boxes, scores and classes: Detectron2's ``Instances`` on the CPU, or
            ``ArrayInstances`` from an exported file.
        class_names: class names of the model, indexed by ``pred_classes``; empty if unknown.
        category_ids: ids in the training annotations, indexed by ``pred_classes``; empty if
            unknown.
        source: the image (H, W, 3), uint8, RGB, or the path of its file. A file is read only when
            the image is needed, so that the results of a large folder fit in memory.
        file_name: a path, or a text such as "image 3".
        frame: index of the frame in a video, from 0; None for an image.
    """

    prediction: "Instances | ArrayInstances"
    class_names: Sequence[str]
    category_ids: Sequence[int]
    source: Image | Path
    file_name: str = "image"
    frame: int | None = None

    def __len__(self) -> int:
        return len(self.prediction)

    def __repr__(self) -> str:
        height, width = self.image_size
        name = self.file_name
        if self.frame is not None:
            name = f"{name}, frame {self.frame}"
        counts = Counter(self.labels).most_common()
        contents = "nothing"
        if counts:
            contents = ", ".join(f"{count} {label}" for label, count in counts)
        return f"Detections({name}, {width}x{height}: {contents})"

    def __iter__(self) -> Iterator[DetectedBox]:
        for xyxy, score, class_name, class_id in zip(
            self.boxes.tolist(),
            self.scores.tolist(),
            self.labels,
            self.prediction.pred_classes.tolist(),
            strict=True,
        ):
            yield DetectedBox(tuple(xyxy), score, class_name, class_id)

    def __getitem__(self, index: int) -> DetectedBox:
        try:
            return list(self)[index]
        except IndexError:
            raise IndexError(f"{self} has no box {index}") from None

    @property
    def image(self) -> Image:
        """The upright RGB image (H, W, 3), uint8. Raises a ``UserError`` if its file is gone."""
        if isinstance(self.source, Path):
            return read_rgb(self.source)
        return self.source

    @property
    def image_size(self) -> tuple[int, int]:
        """(H, W) of the image in pixels."""
        return self.prediction.image_size

    @property
    def instances(self) -> "Instances":
        """Detectron2's ``Instances`` on the CPU: ``pred_boxes``, ``scores`` and ``pred_classes``.

        For an exported file, this imports PyTorch.
        """
        if isinstance(self.prediction, ArrayInstances):
            return self.prediction.to_instances()
        return self.prediction

    @property
    def boxes(self) -> "Tensor | npt.NDArray[np.float32]":
        """Boxes (N, 4), XYXY in pixels of the image. An exported file returns a NumPy array."""
        if isinstance(self.prediction, ArrayInstances):
            return self.prediction.pred_boxes
        return self.prediction.pred_boxes.tensor

    @property
    def scores(self) -> "Tensor | npt.NDArray[np.float32]":
        """Scores (N,) in [0, 1]. An exported file returns a NumPy array."""
        return self.prediction.scores

    @property
    def labels(self) -> list[str]:
        """The class name of each box, or its class index as text if names are unknown."""
        indices = self.prediction.pred_classes.tolist()
        if not self.class_names:
            return [str(index) for index in indices]
        return [self.class_names[index] for index in indices]

    def select(self, threshold: float, classes: Sequence[str] = ()) -> "Detections":
        """Returns the boxes with a score of at least ``threshold``.

        If ``classes`` are given, returns only boxes of classes with these names.
        """
        keep = np.asarray(self.scores >= threshold)
        if classes:
            keep &= np.array([label in classes for label in self.labels], dtype=np.bool_)
        return replace(self, prediction=self.prediction[keep])

    def draw(self) -> Image:
        """Returns the image with boxes, RGB (H, W, 3), uint8. Small images are enlarged."""
        return draw_instances(self.image, self.prediction, self.class_names)

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
        if isinstance(self.prediction, ArrayInstances):
            results = self.prediction.to_coco(image_id)
        else:
            from detectron2.evaluation.coco_evaluation import instances_to_coco_json

            results = instances_to_coco_json(self.prediction, image_id)
        for box in results:
            class_index = box["category_id"]
            if self.category_ids:
                box["category_id"] = self.category_ids[class_index]
            else:
                box["category_id"] = class_index + 1
        return results


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
            "width" in pixels. If the image is a file, "path" is its absolute path. In videos, a
            dict also has "frame".
        num_images: number of images and videos that were predicted on.
        best_score: highest score of all boxes, including boxes below the threshold.
        class_names: class names of the model; empty if they are unknown.
        skipped: (path, reason) of each unreadable file.
        undrawn: (path, reason) of each image that could not be drawn. Its boxes are in ``results``.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    num_images: int = 0
    best_score: float = 0.0
    class_names: Sequence[str] = ()
    skipped: list[tuple[str, str]] = field(default_factory=list)
    undrawn: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def join(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Returns the predictions of several parts as one, with image ids from 1."""
        whole = cls()
        for part in parts:
            offset = len(whole.images)
            for image in part.images:
                whole.images.append({**image, "id": image["id"] + offset})
            for result in part.results:
                if "image_id" in result:  # a box
                    result = {**result, "image_id": result["image_id"] + offset}
                whole.results.append(result)
            whole.num_images += part.num_images
            whole.best_score = max(whole.best_score, part.best_score)
            whole.skipped += part.skipped
            whole.undrawn += part.undrawn
        return whole

    def add(self, detections: Detections, file: Path | None = None) -> None:
        """Adds the boxes of the next image or frame. Image ids start from 1.

        ``file`` is the image or video file; by default ``detections.source``, if this is a path.
        """
        image_id = len(self.images) + 1
        height, width = detections.image_size
        origin: dict[str, Any] = {"file_name": detections.file_name}
        if detections.frame is not None:
            origin["frame"] = detections.frame
        image = {"id": image_id, **origin, "height": height, "width": width}
        path = file or detections.source
        if isinstance(path, Path):
            image["path"] = os.path.abspath(path)
        self.images.append(image)
        for box in detections.to_coco(image_id):
            self.results.append({**box, **origin})


def save_annotations(detections: Iterable[Detections], path: str | Path, format: Format) -> None:
    """Writes detections to one file for import into a labelling tool.

    ``render_annotations`` describes the formats.

    Args:
        detections: the results of a detector for each image, such as
            ``detector.stream("photos/")``.
        path: the JSON file to write.
        format: "coco", "cvat" or "label-studio".

    Raises:
        UserError: the file cannot be written, or the format does not allow videos.
    """
    check_writable(path)
    predictions = Predictions()
    class_names: Sequence[str] = ()
    category_ids: Sequence[int] = ()
    for image_detections in detections:
        predictions.add(image_detections)
        class_names = image_detections.class_names
        category_ids = image_detections.category_ids
    content = render_annotations(
        predictions.results, predictions.images, class_names, category_ids, format
    )
    write_atomically(path, json.dumps(content).encode())


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
        images: all images, as in ``Predictions.images``, also those without boxes.
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
    ids = category_ids or range(1, 1 + len(class_names))
    known_names = dict(zip(ids, class_names, strict=False))
    # Classes without a name in the config are named by their ids.
    id_names = {box["category_id"]: str(box["category_id"]) for box in results}
    names = {**id_names, **known_names}
    if format == "coco":
        return [{**box, "category_name": names[box["category_id"]]} for box in results]
    for image in images:
        if "frame" in image:
            raise UserError(
                f"'{format}' is for images, but '{image['file_name']}' is a video: use coco"
            )
    if format == "cvat":
        return _render_dataset(results, images, names)
    boxes: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for box in results:
        boxes[box["image_id"]].append(box)
    return [_render_task(image, boxes[image["id"]], names) for image in images]


def _render_dataset(
    results: Sequence[dict[str, Any]], images: Sequence[dict[str, Any]], names: dict[int, str]
) -> dict[str, Any]:
    """Returns the content of a COCO annotation file. ``names`` has the name of each category id."""
    files = []
    for image in images:
        files.append({key: value for key, value in image.items() if key != "path"})
    annotations = []
    for number, box in enumerate(results, start=1):
        _, _, width, height = box["bbox"]
        annotations.append(
            {
                "id": number,
                "image_id": box["image_id"],
                "category_id": box["category_id"],
                "bbox": box["bbox"],
                "score": box["score"],
                "area": width * height,
                "iscrowd": 0,
                "segmentation": [],
            }
        )
    categories = [{"id": key, "name": name, "supercategory": ""} for key, name in names.items()]
    return {"images": files, "annotations": annotations, "categories": categories}


def _render_task(
    image: dict[str, Any], boxes: Sequence[dict[str, Any]], names: dict[int, str]
) -> dict[str, Any]:
    """Returns a task of Label Studio for one image. Its boxes are in percent of the image's sides.

    ``names`` has the name of each category id.
    """
    image_height = image["height"]
    image_width = image["width"]
    shapes = []
    for number, box in enumerate(boxes):
        x, y, width, height = box["bbox"]
        shapes.append(
            {
                "type": "rectanglelabels",
                "from_name": "label",
                "to_name": "image",
                "original_width": image_width,
                "original_height": image_height,
                "image_rotation": 0,
                "id": f"{image['id']}-{number}",
                "score": box["score"],
                "value": {
                    "x": 100 * x / image_width,
                    "y": 100 * y / image_height,
                    "width": 100 * width / image_width,
                    "height": 100 * height / image_height,
                    "rotation": 0,
                    "rectanglelabels": [names[box["category_id"]]],
                },
            }
        )
    path = image.get("path", image["file_name"])
    url = _LOCAL_FILES + quote(os.fsencode(path))  # the path may not be UTF-8
    task: dict[str, Any] = {"data": {"image": url}}
    if boxes:
        mean_score = sum(box["score"] for box in boxes) / len(boxes)
        task["predictions"] = [
            {"model_version": "qbheat_det", "score": mean_score, "result": shapes}
        ]
    return task
