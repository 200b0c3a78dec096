# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detections of an image or of many files: drawn, and as COCO, supervision, pandas, Label Studio
and CVAT have them.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from urllib.parse import quote

import numpy as np
import PIL.Image
import torch
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically

from .drawing import draw_instances
from .images import Image, read_rgb

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped, unused-ignore]
    import supervision

Format = Literal["coco", "cvat", "label-studio"]
FORMATS: tuple[Format, ...] = get_args(Format)
_LOCAL_FILES = "/data/local-files/?d="  # of Label Studio; its storage names the folder


class DetectedBox(NamedTuple):
    """One box: corners in pixels, a score in [0, 1], and its class."""

    xyxy: tuple[float, float, float, float]
    score: float
    class_name: str
    class_id: int


@dataclass(frozen=True, repr=False)
class Detections:
    """The boxes that a detector finds in one image, the highest score first.

    Iterating yields a ``DetectedBox`` for each box.

    Attributes:
        instances: Detectron2's, on the CPU: ``pred_boxes``, ``scores``, ``pred_classes``.
        class_names: names of the model's classes, by index.
        category_ids: ids of the classes in the training annotations; empty if unknown.
        source: the pixels (H, W, 3), uint8, RGB; or a file, which is read when it is drawn, so
            that results of a large folder fit in memory.
        file_name: a path, an address or "image 3".
        frame: number of the frame in a video, from 0.
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
        """The upright image (H, W, 3), uint8, RGB; a ``UserError`` if its file is gone."""
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

    @property
    def label_ids(self) -> list[int]:
        """The annotation id of each box's class, or index + 1 if the ids are unknown."""
        ids, indices = self.category_ids, self.instances.pred_classes.tolist()
        return [ids[index] if ids else index + 1 for index in indices]

    def select(self, threshold: float, classes: Sequence[str] = ()) -> "Detections":
        """Returns the boxes with at least a score, of some classes or else of all."""
        keep = self.instances.scores >= threshold
        if classes:
            keep &= torch.tensor([label in classes for label in self.labels], dtype=torch.bool)
        return replace(self, instances=self.instances[keep])

    def draw(self) -> Image:
        """Returns the image with boxes, (H, W, 3), uint8, RGB; small images are enlarged."""
        return draw_instances(self.image, self.instances, self.class_names)

    def show(self) -> None:
        """Shows the image with boxes in a viewer, or below the cell of a notebook."""
        PIL.Image.fromarray(self.draw()).show()

    def save(self, path: str | Path) -> None:
        """Writes the image with boxes; creates its folder.

        Raises:
            UserError: the file cannot be written, or its suffix is not an image's.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(self.draw()).save(path, quality=92)  # ignored by PNG
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write '{path}': {error}") from error

    def to_coco(self, image_id: int = 1) -> list[dict[str, Any]]:
        """Returns a dict for each box in COCO's results format."""
        found: list[dict[str, Any]] = instances_to_coco_json(self.instances, image_id)
        return [{**box, "category_id": id_} for box, id_ in zip(found, self.label_ids, strict=True)]

    def to_supervision(self) -> "supervision.Detections":
        """Returns Roboflow's object, with "class_name" among its data."""
        try:
            import supervision
        except ImportError as error:
            raise _missing("supervision") from error
        return supervision.Detections(
            xyxy=self.boxes.numpy().reshape(-1, 4),
            confidence=self.scores.numpy(),
            class_id=self.instances.pred_classes.numpy(),
            data={"class_name": np.array(self.labels, dtype=str)},
        )

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns a row for each box: "label", "score", "x1", "y1", "x2", "y2" in pixels."""
        try:
            import pandas
        except ImportError as error:
            raise _missing("pandas") from error
        table = pandas.DataFrame(self.boxes.numpy(), columns=["x1", "y1", "x2", "y2"])
        table.insert(0, "label", self.labels)
        table.insert(1, "score", self.scores.numpy())
        return table


@dataclass
class Predictions:
    """Results on many images or files.

    Attributes:
        results: a dict for each box with "image_id", "file_name", "category_id", "bbox" (XYWH,
            pixels of the upright image) and "score"; "segmentation" (RLE) if the model predicts
            masks; "frame" (from 0) in videos, where each frame has its own image id. For a
            classifier, a dict for each image with "file_name" and "classes", the likeliest first,
            each with "name" and "score" in [0, 1].
        images: for a detector, "id", "file_name", "height" and "width" in pixels of each image and
            frame, "frame" in videos.
        num_images: number of images and videos that were predicted on.
        best_score: the highest score of all boxes, also of those below the threshold.
        skipped: path of each unreadable file, and the reason.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    num_images: int = 0
    best_score: float = 0.0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def add(self, found: Detections) -> None:
        """Adds the boxes of the next image or frame; image ids count from 1."""
        number, (height, width) = len(self.images) + 1, found.instances.image_size
        origin: dict[str, Any] = {"file_name": found.file_name}
        if found.frame is not None:
            origin["frame"] = found.frame
        self.images.append({"id": number, **origin, "height": height, "width": width})
        self.results += [{**box, **origin} for box in found.to_coco(number)]


def save_annotations(found: Iterable[Detections], path: str | Path, format: Format) -> None:
    """Writes detections as one file that a labelling tool imports, see ``render_annotations``.

    Args:
        found: results of one detector, such as ``detector.stream("photos/")``.
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


def _missing(package: str) -> UserError:
    return UserError(f"{package} is not installed: pip install {package}")


def render_annotations(
    results: Sequence[dict[str, Any]],
    images: Sequence[dict[str, Any]],
    class_names: Sequence[str],
    category_ids: Sequence[int],
    format: Format,
) -> Any:
    """Returns predictions as JSON data.

    Args:
        results: boxes as in ``Predictions.results``.
        images: all images, as in ``Predictions.images``.
        class_names: names of the model's classes, by index.
        category_ids: ids of these classes in ``results``; empty if they count from 1.
        format: "coco" adds "category_name" to ``results``, which COCO's evaluation reads. "cvat" is
            a whole annotation file for CVAT's import "COCO 1.0", which finds images by file name.
            "label-studio" is a list of tasks with predictions, for a configuration with
            ``<Image name="image" value="$image"/>`` and
            ``<RectangleLabels name="label" toName="image">``; images are files of local storage.

    Raises:
        UserError: there is no such format, or the format does not allow frames of a video.
    """
    if format not in FORMATS:
        raise UserError(f"the format '{format}' is not one of {', '.join(FORMATS)}")
    names = {box["category_id"]: str(box["category_id"]) for box in results}  # where unknown
    names |= dict(zip(category_ids or range(1, 1 + len(class_names)), class_names, strict=False))
    if format == "coco":
        return [{**box, "category_name": names[box["category_id"]]} for box in results]
    if video := next((image["file_name"] for image in images if "frame" in image), None):
        raise UserError(f"'{format}' takes images, and '{video}' is a video: use coco")
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
    return {"images": list(images), "annotations": annotations, "categories": categories}


def _render_task(
    image: dict[str, Any], boxes: Sequence[dict[str, Any]], names: dict[int, str]
) -> dict[str, Any]:
    """Returns a task of Label Studio, whose boxes are in per cent of the image."""
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
    mean = sum(box["score"] for box in boxes) / max(1, len(boxes))
    prediction = {"model_version": "qbheat_det", "score": mean, "result": shapes}
    path = _LOCAL_FILES + quote(image["file_name"])
    return {"data": {"image": path}, "predictions": [prediction]}
