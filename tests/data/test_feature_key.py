# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The name of a cache: another for everything that features depend on, and for nothing else."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qbheat_det.config import get_cfg
from qbheat_det.data import describe_arithmetic, describe_cache, name_cache, number_records

Parts = dict[str, Any]


def make_parts(folder: Path) -> Parts:
    (folder / "images").mkdir(parents=True)
    for index in range(2):
        (folder / "images" / f"{index}.jpg").write_bytes(bytes([index]) * 9)
        os.utime(folder / "images" / f"{index}.jpg", (1000, 1000))
    boxes = [{"bbox": [1.0, 2.0, 3.0, 4.0], "bbox_mode": 1, "category_id": 5, "iscrowd": 0}]
    return {
        "weights": {"stem.weight": torch.arange(4.0).view(2, 2), "stem.count": torch.tensor(7)},
        "encoder": "Stem(2, 2)",
        "outputs": ["s8", "s16"],
        "pixel_mean": [1.0, 2.0, 3.0],
        "pixel_std": [4.0, 5.0, 6.0],
        "size_divisibility": 32,
        "dtype": "float16",
        "count": 4,
        "views_seed": 0,
        "is_train": True,
        "input_config": get_cfg().INPUT,
        "arithmetic": describe_arithmetic(get_cfg(), torch.device("cpu")),
        "records": [
            {
                "file_name": str(folder / "images" / f"{index}.jpg"),
                "image_id": index,
                "annotations": copy.deepcopy(boxes),
            }
            for index in range(2)
        ],
    }


def name(parts: Parts) -> str:
    return name_cache(describe_cache(**parts))


def _swap(parts: Parts) -> None:
    parts["records"].reverse()


def _set(*keys: Any, value: Any) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        for key in keys[:-1]:
            parts = parts[key]
        parts[keys[-1]] = value

    return change


def _touch(parts: Parts) -> None:
    os.utime(parts["records"][0]["file_name"], (1000, 1001))


def _rewrite(parts: Parts) -> None:
    path = Path(parts["records"][0]["file_name"])
    path.write_bytes(b"longer than before")
    os.utime(path, (1000, 1000))


def _rename(parts: Parts) -> None:
    path = Path(parts["records"][0]["file_name"])
    parts["records"][0]["file_name"] = str(path.rename(path.with_name("other.jpg")))


CHANGES = {
    "a weight": _set("weights", "stem.weight", value=torch.tensor([[0.0, 1.0], [2.0, 3.0001]])),
    "the sign of a zero": _set("weights", "stem.weight", value=torch.tensor([[-0.0, 1], [2, 3]])),
    "a weight's shape": _set("weights", "stem.weight", value=torch.arange(4.0)),
    "a weight's dtype": _set("weights", "stem.weight", value=torch.arange(4).view(2, 2)),
    "a buffer": _set("weights", "stem.count", value=torch.tensor(8)),
    "a weight's name": lambda parts: parts["weights"].update(x=parts["weights"].pop("stem.count")),
    "the encoder": _set("encoder", value="Stem(2, 2, stride=2)"),
    "the outputs": _set("outputs", value=["s16"]),
    "the mean": _set("pixel_mean", 0, value=1.5),
    "the deviation": _set("pixel_std", 2, value=6.5),
    "padding": _set("size_divisibility", value=0),
    "the dtype": _set("dtype", value="bfloat16"),
    "the number of views": _set("count", value=5),
    "the views' seed": _set("views_seed", value=1),
    "training": _set("is_train", value=False),
    "another device": _set("arithmetic", "device", value="cuda"),
    "precision of sums": _set("arithmetic", "float32_precision", value="medium"),
    "the layout of maps": _set("arithmetic", "channels_last", value=True),
    "PyTorch": _set("arithmetic", "torch", value="1.13.0"),
    "this package": _set("arithmetic", "qbheat_det", value="0.0.1"),
    "a box": _set("records", 1, "annotations", 0, "bbox", 2, value=3.5),
    "a class": _set("records", 1, "annotations", 0, "category_id", value=6),
    "a label": _set("records", 0, "label", value=1),
    "the order": _swap,
    "the number of images": lambda parts: parts["records"].pop(),
    "a file's time": _touch,
    "a file's size": _rewrite,
    "a file's name": _rename,
    "a file that is gone": lambda parts: os.remove(parts["records"][0]["file_name"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_whatever_features_depend_on_changes_the_name(
    tmp_path: Path, change: Callable[[Parts], object]
) -> None:
    parts = make_parts(tmp_path)
    before = name(parts)
    change(parts)
    assert name(parts) != before


_OF_ALL = {"FORMAT": "RGB", "PRETRAIN.SIZE": 64, "DATASET_MAPPER_NAME": "classify"}
_OF_TRAINING = {
    "MIN_SIZE_TRAIN": (96,),
    "DETR_CROP_RESIZE": [32],
    "RANDOM_FLIP": "none",
    "CROP.ENABLED": True,
    "PRETRAIN.SCALE": [0.5, 1.0],
    "CLASSIFY.RAND_AUGMENT": [9.0, 0.5],
    "TWO_VIEWS.GREY_PROBABILITY": 0.5,
}
_OF_TESTS = {"MIN_SIZE_TEST": 96, "MAX_SIZE_TEST": 160, "CLASSIFY.TEST_CROP": 0.5}
_OF_NONE = {"FIXED_VIEWS.COUNT": 3, "FIXED_VIEWS.SEED": 3, "PRETRAIN.MEMORY_GB": 1.0}


@pytest.mark.parametrize("is_train", [True, False])
def test_keys_of_the_input_count_for_the_sets_whose_views_they_change(
    tmp_path: Path, is_train: bool
) -> None:
    parts = {**make_parts(tmp_path), "is_train": is_train}
    before, changing = name(parts), set()
    for key, value in {**_OF_ALL, **_OF_TRAINING, **_OF_TESTS, **_OF_NONE}.items():
        cfg = get_cfg()
        cfg.merge_from_list([f"INPUT.{key}", value])
        parts["input_config"] = cfg.INPUT
        if name(parts) != before:
            changing.add(key)
    assert changing == {*_OF_ALL, *(_OF_TRAINING if is_train else _OF_TESTS)}


def _move(parts: Parts, folder: Path) -> None:
    moved = shutil.copytree(folder, folder.with_name("moved"))  # which keeps the times
    for record in parts["records"]:
        record["file_name"] = str(moved / "images" / Path(record["file_name"]).name)


def _number(parts: Parts, folder: Path) -> None:
    parts["records"] = number_records(parts["records"])


def _outline(parts: Parts, folder: Path) -> None:
    parts["records"][0]["annotations"][0]["segmentation"] = [[1.0, 2.0, 3.0, 2.0, 3.0, 4.0]]


def _reorder(parts: Parts, folder: Path) -> None:
    parts["weights"] = dict(reversed(parts["weights"].items()))


def _transpose(parts: Parts, folder: Path) -> None:
    parts["weights"]["stem.weight"] = torch.tensor([[0.0, 2.0], [1.0, 3.0]]).t()


def _use_numpy(parts: Parts, folder: Path) -> None:
    parts["records"][0]["annotations"][0]["bbox"] = np.array([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("change", [_move, _number, _outline, _reorder, _transpose, _use_numpy])
def test_what_features_do_not_depend_on_leaves_the_name(
    tmp_path: Path, change: Callable[[Parts, Path], None]
) -> None:
    folder = tmp_path / "set"
    parts = make_parts(folder)
    before = name(parts)
    change(parts, folder)
    assert name(parts) == before


def test_the_description_is_readable_and_short(tmp_path: Path) -> None:
    description = describe_cache(**make_parts(tmp_path))
    assert json.loads(json.dumps(description)) == description
    assert description["num_images"] == 2
    assert description["views_per_image"] == 4
    assert "MIN_SIZE_TRAIN_SAMPLING: choice" in description["input"]
    assert description["arithmetic"]["torch"] in torch.__version__


def test_a_file_whose_name_is_no_text_has_a_name(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    parts["records"][0]["file_name"] = os.fsdecode(b"/nowhere/\xff.jpg")
    assert len(name(parts)) == 32
