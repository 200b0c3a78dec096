# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predictions as pre-annotations, which people correct in Label Studio or CVAT."""

from collections.abc import Sequence
from typing import Any, Literal, get_args
from urllib.parse import quote

from qbheat_det.core.errors import UserError

Format = Literal["coco", "cvat", "label-studio"]
FORMATS: tuple[Format, ...] = get_args(Format)
_LOCAL_FILES = "/data/local-files/?d="  # of Label Studio; its storage names the folder


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
