# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How many of our modules a reader meets on the way of one image, so that it stays few."""

import logging
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from detectron2.modeling import build_model
from detectron2.structures import BoxMode

import qbheat_det.api  # noqa: F401  its imports are not counted
from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import build_mapper

from .data.pictures import draw, save
from .tool_modules import load_tool

OF_PREDICT, OF_TRAINING = 28, 13


@contextmanager
def modules_entered():
    """Collects the modules of the package whose functions are called, imports aside."""
    entered = set()

    def watch(frame, event, argument):
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


def test_one_image_through_predict_enters_few_modules(tmp_path, monkeypatch):
    for name in ("qbheat_det", "detectron2", "fvcore"):  # those of a run before in this process
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    predict = load_tool("predict")
    image, drawn = save(tmp_path / "image.jpg", draw(120, 90)), tmp_path / "drawn"
    with modules_entered() as entered:
        command = f"--weights qbheat://retinanet/285M_bccd --images {image} --output {drawn}"
        predict.main([*command.split(), "--device", "cpu"])
    assert list(drawn.iterdir())
    assert len(entered) <= OF_PREDICT, "\n".join(sorted(entered))


@pytest.mark.slow
def test_a_prediction_imports_no_training_and_no_drawing(tmp_path):
    image = save(tmp_path / "image.jpg", draw(120, 90))
    large = ("scipy", "matplotlib", "pandas", "onnx", "fsspec", "jinja2", "qbheat_det.engine")
    large += ("qbheat_det.analysis", "qbheat_det.export", "qbheat_det.feature_cache")
    program = f"""if True:
        import sys, qbheat_det
        qbheat_det.load("retinanet/285M_bccd", device="cpu").predict({image!r})
        print(*{{*sys.modules}} & {{*{large}}})
    """
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout.split() == []


OBJECT = {"bbox": [5, 5, 40, 40], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 0, "iscrowd": 0}


def test_a_training_step_enters_few_modules(tmp_path):
    path = get_config_path("quick_schedules/mf_detr_211_285M_cells.yaml")
    cfg = load_config(path, ["MODEL.DEVICE", "cpu"])
    model, mapper = build_model(cfg).train(), build_mapper(cfg, is_train=True)
    records = []
    for number, (height, width) in enumerate([(96, 128), (128, 96)]):
        name = save(tmp_path / f"{number}.png", draw(width, height))
        record = {"file_name": name, "height": height, "width": width, "image_id": number}
        records.append({**record, "annotations": [OBJECT]})
    with modules_entered() as entered:
        model([mapper(record) for record in records])
    assert {"qbheat_det.modeling.detr.mf_detr", "qbheat_det.modeling.detr.criterion"} <= entered
    assert len(entered) <= OF_TRAINING, sorted(entered)
