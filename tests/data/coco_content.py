# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A small annotation file in which everything is right, and how tests spoil it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.data import check_coco_json

Content = dict[str, Any]

GOOD: Content = {
    "images": [
        {"id": 10, "file_name": "a.jpg", "width": 100, "height": 50},
        {"id": 3, "file_name": "sub/b.jpg", "width": 40, "height": 60},
        {"id": 7, "file_name": "c.jpg", "width": 40, "height": 60},
    ],
    "annotations": [
        {"id": 1, "image_id": 10, "category_id": 9, "bbox": [5, 5.5, 20, 30], "iscrowd": 0},
        {"id": 2, "image_id": 10, "category_id": 2, "bbox": [0, 0, 100, 50]},
        {"id": 5, "image_id": 3, "category_id": 9, "bbox": [1, 1, 9, 9], "iscrowd": 1},
    ],
    "categories": [{"id": 9, "name": "cat"}, {"id": 2, "name": "dog"}],
}


def write(folder: Path, content: object) -> tuple[str, str]:
    """Writes an annotation file and GOOD's images; returns the two paths."""
    (folder / "images" / "sub").mkdir(parents=True, exist_ok=True)
    for image in GOOD["images"]:
        (folder / "images" / image["file_name"]).touch()
    (folder / "set.json").write_text(json.dumps(content))
    return str(folder / "set.json"), str(folder / "images")


def changed(change: Callable[[Content], object]) -> Content:
    content = copy.deepcopy(GOOD)
    change(content)
    return content


def with_annotation(**fields: object) -> Callable[[Content], object]:
    """Returns a change of the second annotation, which has id 2 and lies in image 10."""
    return lambda content: content["annotations"][1].update(fields)


def sentence(folder: Path, content: object) -> str:
    with pytest.raises(UserError) as caught:
        check_coco_json(*write(folder, content))
    text = str(caught.value)
    assert "set.json" in text
    assert "\n" not in text
    return text
