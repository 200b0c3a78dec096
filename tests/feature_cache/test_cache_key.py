# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The key of a cache: what changes it, and what does not."""

import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.data import FixedViews, number_records
from qbheat_det.feature_cache.cache_key import hash_key, make_key
from qbheat_det.feature_cache.store import AllViews


class Encoder(nn.Module):
    """Two numbers and a buffer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2, bias=False)
        self.register_buffer("count", torch.tensor(7))
        nn.init.eye_(self.stem.weight)


def make_parts(folder):
    (folder / "images").mkdir(parents=True)
    for index in range(2):
        (folder / "images" / f"{index}.jpg").write_bytes(bytes([index]) * 9)
        os.utime(folder / "images" / f"{index}.jpg", (1000, 1000))
    boxes = [{"bbox": [1.0, 2.0, 3.0, 4.0], "bbox_mode": 1, "category_id": 5, "iscrowd": 0}]
    return {
        "cfg": get_cfg(),
        "encoder": Encoder(),
        "outputs": ["s8", "s16"],
        "records": [
            {
                "file_name": str(folder / "images" / f"{index}.jpg"),
                "image_id": index,
                "annotations": copy.deepcopy(boxes),
            }
            for index in range(2)
        ],
        "views": FixedViews(lambda record: None, count=4),
        "is_train": True,
        "device": torch.device("cpu"),
        "size_divisibility": 32,
    }


def name(parts):
    return hash_key(make(parts))


def make(parts):
    rest = {key: value for key, value in parts.items() if key not in ("records", "views")}
    return make_key(views=AllViews(parts["records"], parts["views"]), **rest)


def _rewrite(parts):
    path = Path(parts["records"][0]["file_name"])
    path.write_bytes(b"longer than before")
    os.utime(path, (1000, 1000))


def _rename(parts):
    path = Path(parts["records"][0]["file_name"])
    parts["records"][0]["file_name"] = str(path.rename(path.with_name("other.jpg")))


def _set_weight(value):
    return lambda p: vars(p["encoder"].stem)["_parameters"].update(weight=nn.Parameter(value))


CHANGES = {
    "a weight": _set_weight(torch.tensor([[1.0, 0.0], [0.0, 1.0001]])),
    "the sign of a zero": _set_weight(torch.tensor([[1.0, -0.0], [0.0, 1.0]])),
    "a buffer": lambda p: p["encoder"].count.fill_(8),
    "the structure": lambda p: p["encoder"].add_module("x", nn.ReLU()),
    "the outputs": lambda p: p["outputs"].pop(),
    "the mean": lambda p: p["cfg"].MODEL.merge_from_list(["PIXEL_MEAN", [1.0, 2.0, 3.0]]),
    "the layout": lambda p: p["cfg"].MODEL.merge_from_list(["CHANNELS_LAST", True]),
    "the channels": lambda p: p["cfg"].INPUT.merge_from_list(["FORMAT", "RGB"]),
    "the dtype": lambda p: p["cfg"].merge_from_list(["MODEL.CACHE_FEATURES.DTYPE", "bfloat16"]),
    "the padding": lambda p: p.update(size_divisibility=16),
    "the number of views": lambda p: p.update(views=FixedViews(lambda record: None, 3)),
    "their seed": lambda p: p.update(views=FixedViews(lambda record: None, 4, 1)),
    "the kind of set": lambda p: p.update(is_train=False),
    "the device": lambda p: p.update(device=torch.device("cuda")),
    "a box": lambda p: p["records"][1]["annotations"][0].update(bbox=[1.0, 2.0, 3.5, 4.0]),
    "a label": lambda p: p["records"][0].update(label=1),
    "the order": lambda p: p["records"].reverse(),
    "a file's time": lambda p: os.utime(p["records"][0]["file_name"], (1000, 1001)),
    "a file's size": _rewrite,
    "a file's name": _rename,
}


def _move(parts):
    folder = Path(parts["records"][0]["file_name"]).parent
    moved = shutil.copytree(folder, folder.parents[1] / "moved")  # which keeps the times
    for record in parts["records"]:
        record["file_name"] = str(moved / Path(record["file_name"]).name)


NEUTRAL = {
    "another folder": _move,
    "numbers of records": lambda p: p.update(records=number_records(p["records"])),
    "the annotated classes": lambda p: p["records"][0].update(annotated_classes=[5]),
    "an image id": lambda p: p["records"][0].update(image_id=7),
    "arrays": lambda p: p["records"][0]["annotations"][0].update(bbox=np.array([1.0, 2, 3, 4])),
    "memory format": _set_weight(torch.eye(2).t()),
}


@pytest.mark.parametrize("what", [*CHANGES, *NEUTRAL])
def test_the_key_changes_with_its_parts_alone(tmp_path, what):
    parts = make_parts(tmp_path / "set")
    before = name(parts)
    {**CHANGES, **NEUTRAL}[what](parts)
    assert (name(parts) != before) == (what in CHANGES)


def test_the_key_is_plain_json_for_any_file_name(tmp_path):
    parts = make_parts(tmp_path)
    parts["records"][0]["file_name"] = os.fsdecode(b"/nowhere/\xff.jpg")
    key = make(parts)
    assert json.loads(json.dumps(key)) == key
