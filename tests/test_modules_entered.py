# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How many of our modules a reader meets on the way of one image, so that it stays few."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.structures import BoxMode
from PIL import Image

import qbheat_det
from qbheat_det.data import build_mapper

from .tool_modules import load_tool

OF_PREDICT = 25
OF_TRAINING_STEP = 12
_CONFIG = """
MODEL.DEVICE cpu MODEL.META_ARCHITECTURE MFDETR MODEL.BACKBONE.NAME MobileFormer INPUT.FORMAT RGB
INPUT.DATASET_MAPPER_NAME detr INPUT.MIN_SIZE_TRAIN (96,) INPUT.MAX_SIZE_TRAIN 128
INPUT.DETR_CROP_RESIZE [96] INPUT.DETR_CROP_RANGE [64,96]
"""


@contextmanager
def modules_entered() -> Iterator[set[str]]:
    """Collects the modules of the package whose functions are called, imports aside."""
    entered: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("qbheat_det") and frame.f_code.co_name != "<module>":
            entered.add(name)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def make_config() -> CfgNode:
    """A small MF-DETR with the mapper of its recipes."""
    cfg = qbheat_det.get_cfg()
    cfg.merge_from_list([*_CONFIG.split(), "MODEL.MF_DETR.NUM_BLOCKS", "[2,1,1]"])
    return cfg


def save_image(path: Path) -> Path:
    """Writes noise as a JPEG of 120 x 90 pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_one_image_through_predict_enters_few_modules(tmp_path: Path) -> None:
    predict = load_tool("predict")
    image, drawn = save_image(tmp_path / "image.jpg"), tmp_path / "drawn"
    with modules_entered() as entered:
        command = f"--weights qbheat://retinanet/285M_bccd --input {image} --output {drawn}"
        predict.main([*command.split(), "--device", "cpu"])
    assert list(drawn.iterdir())
    assert len(entered) <= OF_PREDICT, sorted(entered)


def test_a_training_step_enters_few_modules(tmp_path: Path) -> None:
    cfg = make_config()
    record = {
        "file_name": str(save_image(tmp_path / "image.jpg")),
        "image_id": 0,
        "height": 90,
        "width": 120,
        "annotations": [
            {"bbox": [10, 10, 60, 50], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 3}
        ],
    }
    model, mapper = build_model(cfg).train(), build_mapper(cfg, is_train=True)
    with modules_entered() as entered:
        losses = model([mapper(record), mapper(record)])
        torch.stack(list(losses.values())).sum().backward()
    assert len(entered) <= OF_TRAINING_STEP, sorted(entered)
