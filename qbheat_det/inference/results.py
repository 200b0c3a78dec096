# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a detector found, drawn and converted: COCO, supervision, pandas, labelling tools."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from urllib.parse import quote

import numpy as np
import PIL.Image
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically

from .drawing import draw_instances
from .pictures import read_rgb
from .video import Image

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped, unused-ignore]
    import supervision

Format = Literal["coco", "cvat", "label-studio"]
FORMATS: tuple[Format, ...] = get_args(Format)
_LOCAL_FILES = "/data/local-files/?d="  # of Label Studio; its storage names the folder


class DetectedBox(NamedTuple):
    """One detection: ``xyxy`` in pixels, a score in [0, 1], name and index of its class."""

    xyxy: tuple[float, float, float, float]
    score: float
    class_name: str
    class_id: int


@dataclass(frozen=True, repr=False)
class Detections:
    """The detections on one image, the highest score first.

    Attributes:
        instances: Detectron2's, on the CPU: ``pred_boxes``, ``scores``, ``pred_classes``.
        class_names: of the model, in the order of its classes.
        category_ids: ids of the classes in the annotations that the model was trained on.
        source: the pixels (H, W, 3) of uint8, RGB; or a file, which is read when it is drawn, so
            that the results of a large folder fit in memory.
        file_name: path, address or "image 3".
        frame: of a video, counted from 0.
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

    @property
    def image(self) -> Image:
        """(H, W, 3), uint8, RGB, upright; a ``UserError`` if its file is gone."""
        return read_rgb(self.source) if isinstance(self.source, Path) else self.source

    @property
    def boxes(self) -> Tensor:
        """(N, 4), XYXY in pixels of the image."""
        boxes: Tensor = self.instances.pred_boxes.tensor
        return boxes

    @property
    def scores(self) -> Tensor:
        """(N,), in [0, 1]."""
        scores: Tensor = self.instances.scores
        return scores

    @property
    def labels(self) -> list[str]:
        """The name of each box's class."""
        names, indices = self.class_names, self.instances.pred_classes.tolist()
        return [names[index] if names else str(index) for index in indices]

    def __iter__(self) -> Iterator[DetectedBox]:
        """Yields the boxes, the highest score first."""
        classes = self.instances.pred_classes.tolist()
        rows = zip(self.boxes.tolist(), self.scores.tolist(), self.labels, classes, strict=True)
        for xyxy, score, name, index in rows:
            yield DetectedBox(tuple(xyxy), score, name, index)

    def show(self) -> None:
        """Shows the image with boxes in a viewer, or below the cell of a notebook."""
        PIL.Image.fromarray(self.draw()).show()

    def draw(self) -> Image:
        """Returns the image with boxes, (H, W, 3) uint8, RGB."""
        return draw_instances(self.image, self.instances, self.class_names)

    def save(self, path: str | Path) -> None:
        """Writes the drawn image; its folder is made.

        Raises:
            UserError: the file cannot be written, or its suffix is that of no image.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(self.draw()).save(path)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write '{path}': {error}") from error

    def to_coco(self, image_id: int = 1) -> list[dict[str, Any]]:
        """Returns a dict for each box in COCO's results format."""
        found: list[dict[str, Any]] = instances_to_coco_json(self.instances, image_id)
        for box in found:
            index = box["category_id"]
            box["category_id"] = self.category_ids[index] if self.category_ids else index + 1
        return found

    def to_supervision(self) -> "supervision.Detections":
        """Returns Roboflow's supervision object, with "class_name" among its data.

        Raises:
            UserError: supervision is not installed.
        """
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
        """Returns a row for each box: "label", "score", "x1", "y1", "x2", "y2" in pixels.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise _missing("pandas") from error
        table = pandas.DataFrame(self.boxes.numpy(), columns=["x1", "y1", "x2", "y2"])
        table.insert(0, "label", self.labels)
        table.insert(1, "score", self.scores.numpy())
        return table


def save_annotations(found: Iterable[Detections], path: str | Path, format: Format) -> None:
    """Writes detections as one file that a labelling tool imports, see ``render_annotations``.

    Args:
        found: of one detector, such as ``detector.stream("photos/")``.
        path: the file, JSON.
        format: "coco", "cvat" or "label-studio".

    Raises:
        UserError: the file cannot be written, or the format takes no frames of videos.
    """
    check_writable(path)
    results: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    names: Sequence[str] = ()
    ids: Sequence[int] = ()
    for number, one in enumerate(found, start=1):
        height, width = one.instances.image_size
        image = {"id": number, "file_name": one.file_name, "height": height, "width": width}
        images.append(image if one.frame is None else {**image, "frame": one.frame})
        results += [{**box, "file_name": one.file_name} for box in one.to_coco(number)]
        names, ids = one.class_names, one.category_ids
    content = json.dumps(render_annotations(results, images, names, ids, format)).encode()
    write_atomically(path, content)


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
        results: COCO's results, "image_id", "category_id", "bbox" (XYWH, pixels) and "score".
        images: "id", "file_name", "height" and "width" of each image, also of those without boxes.
        class_names: of the model.
        category_ids: ids of these classes in ``results``; empty if they count from 1.
        format: "coco" adds "category_name" to ``results``, which COCO's evaluation reads. "cvat" is
            a whole annotation file for CVAT's import "COCO 1.0", which finds images by file name.
            "label-studio" is a list of tasks with predictions, for a configuration with
            ``<Image name="image" value="$image"/>`` and
            ``<RectangleLabels name="label" toName="image">``; images are files of local storage.

    Raises:
        UserError: there is no such format, or frames of a video are to be annotated as images.
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
    annotations = [
        {
            "id": number,
            "image_id": box["image_id"],
            "category_id": box["category_id"],
            "bbox": box["bbox"],
            "area": box["bbox"][2] * box["bbox"][3],
            "iscrowd": 0,
            "segmentation": [],
            "score": box["score"],
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
    shapes = []
    for number, box in enumerate(boxes):
        x, y, w, h = box["bbox"]
        value = {"x": x / width, "y": y / height, "width": w / width, "height": h / height}
        shapes.append(
            {
                "id": f"{image['id']}-{number}",
                "type": "rectanglelabels",
                "from_name": "label",
                "to_name": "image",
                "original_width": width,
                "original_height": height,
                "image_rotation": 0,
                "score": box["score"],
                "value": {
                    **{key: 100 * part for key, part in value.items()},
                    "rotation": 0,
                    "rectanglelabels": [names[box["category_id"]]],
                },
            }
        )
    mean = sum(box["score"] for box in boxes) / max(1, len(boxes))
    prediction = {"model_version": "qbheat_det", "score": mean, "result": shapes}
    path = _LOCAL_FILES + quote(image["file_name"])
    return {"data": {"image": path}, "predictions": [prediction]}
