# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A reader who follows a training step of MF-DETR, from mapper to loss, opens twelve files."""

import sys
from pathlib import Path
from types import FrameType

import numpy as np
from detectron2.modeling import build_model
from detectron2.structures import BoxMode
from PIL import Image

import qbheat_det
from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import build_mapper

PACKAGE = Path(qbheat_det.__file__).parent
OBJECT = {"bbox": [5, 5, 40, 40], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 0, "iscrowd": 0}


def test_a_training_step_enters_at_most_twelve_modules(tmp_path: Path) -> None:
    path = get_config_path("quick_schedules/mf_detr_211_285M_toy.yaml")
    cfg = load_config(path, ["MODEL.DEVICE", "cpu"])
    model, mapper = build_model(cfg).train(), build_mapper(cfg, is_train=True)
    records = []
    for number, (height, width) in enumerate([(96, 128), (128, 96)]):
        name = str(tmp_path / f"{number}.png")
        Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8)).save(name)
        record = {"file_name": name, "height": height, "width": width, "image_id": number}
        records.append({**record, "annotations": [OBJECT]})
    entered = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            entered.add(str(file.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        model([mapper(record) for record in records])
    finally:
        sys.setprofile(None)
    assert {"modeling/detr/mf_detr.py", "modeling/detr/criterion.py"} <= entered
    assert len(entered) <= 12, sorted(entered)
