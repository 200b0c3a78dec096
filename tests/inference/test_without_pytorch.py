# Copyright (c) qbheat_det contributors. Apache-2.0.
"""An exported file runs without PyTorch and Detectron2, with the results of their functions."""

import json
import subprocess
import sys

import numpy as np
import pytest
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from PIL import Image

from qbheat_det.inference.array_instances import ArrayInstances
from qbheat_det.inference.drawing import draw_instances
from qbheat_det.inference.results import Detections
from tests.export.test_runtime import DETECTOR, describe, write
from tests.tool_modules import TOOLS

# As on a machine without them: importing any of these fails.
_WITHOUT = """
import sys
for name in ("torch", "torchvision", "detectron2", "fvcore", "iopath", "timm", "cv2", "scipy"):
    sys.modules[name] = None
"""
_PYTHON = f"""{_WITHOUT}
import qbheat_det
detector = qbheat_det.load("detector.onnx", device="cpu")
result = detector.predict("photos/red.png")
print(result.boxes.tolist(), result.scores.tolist(), result.labels, result.image_size)
print(result[0].xyxy, len(result.select(0.5, ["cat"])), result)
result.save("drawn.png")
counts = [len(one) for one in detector.predict("photos/", batch_size=1)]
print(counts, detector.class_names, detector.weights)
"""
_COMMAND = f"""{_WITHOUT}
import runpy
sys.argv = ["qbheat", "predict", "--weights", "detector.onnx", "--images", "photos/"]
sys.argv += ["--json", "boxes.json", "--output", "drawn/", "--device", "cpu"]
runpy.run_path({str(TOOLS / "qbheat")!r}, run_name="__main__")
"""


def run(program, folder):
    """Runs a program in a new Python, and returns what it prints."""
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def make(number, seed=0):
    """Returns random boxes in an image of 400 x 500 pixels."""
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 380, (number, 2, 2)).astype(np.float32)
    boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1) + 5], axis=1)
    scores = np.sort(rng.random(number, dtype=np.float32))[::-1].copy()
    return ArrayInstances((400, 500), boxes, scores, rng.integers(0, 3, number))


@pytest.fixture
def folder(tmp_path):
    """A folder with an exported detector and two photos."""
    pytest.importorskip("onnx")
    write(tmp_path / "detector.onnx", DETECTOR, **describe())
    (tmp_path / "photos").mkdir()
    for color in ("red", "blue"):
        Image.new("RGB", (640, 480), color).save(tmp_path / "photos" / f"{color}.png")
    return tmp_path


def test_python_predicts_without_pytorch(folder):
    first, second, third = run(_PYTHON, folder).splitlines()
    assert first == "[[0.0, 0.0, 640.0, 480.0]] [1.0] ['dog'] (480, 640)"
    assert second == "(0.0, 0.0, 640.0, 480.0) 0 Detections(photos/red.png, 640x480: 1 dog)"
    assert third == "[0, 1] ['cat', 'dog'] detector.onnx"
    assert (folder / "drawn.png").is_file()


def test_the_command_predicts_without_pytorch(folder):
    run(_COMMAND, folder)
    (box,) = json.loads((folder / "boxes.json").read_text())
    assert (box["file_name"], box["category_name"], box["score"]) == ("red.png", "dog", 1.0)
    assert sorted(path.name for path in (folder / "drawn").iterdir()) == ["blue.png", "red.png"]


@pytest.mark.parametrize("number", [0, 1, 40])
def test_arrays_and_instances_give_the_same_results(number):
    arrays = make(number)
    instances = arrays.to_instances()
    assert arrays.to_coco(7) == instances_to_coco_json(instances, 7)
    image = np.random.default_rng(1).integers(0, 256, (400, 500, 3), dtype=np.uint8)
    names = ["a", "b"]  # the third class has no name
    assert np.array_equal(
        draw_instances(image, arrays, names), draw_instances(image, instances, names)
    )
    names = ["a", "b", "c"]
    ours = Detections(arrays, names, [3, 5, 7], image)
    theirs = Detections(instances, names, [3, 5, 7], image)
    for classes in ((), ("a", "c")):
        one = ours.select(0.3, classes)
        other = theirs.select(0.3, classes)
        assert one.to_coco() == other.to_coco()
        assert list(one) == list(other)
        assert repr(one) == repr(other)
        assert one.instances.pred_boxes.tensor.tolist() == one.boxes.tolist()


def test_a_very_long_class_name_is_drawn_in_part():
    image = np.zeros((400, 500, 3), np.uint8)
    drawn = draw_instances(image, make(3), ["x" * 100_000] * 3)
    assert np.array_equal(drawn, draw_instances(image, make(3), ["x" * 200] * 3))


_REGISTERED = """
import sys
import qbheat_det
assert "torch" not in sys.modules
{first}
from detectron2.data import DatasetCatalog
from detectron2.modeling import BACKBONE_REGISTRY, META_ARCH_REGISTRY
from detectron2.utils.file_io import PathManager
assert "MobileFormer" in BACKBONE_REGISTRY
assert "MFDETR" in META_ARCH_REGISTRY
assert "cells_sample_val" in DatasetCatalog.list()
assert PathManager.get_local_path("qbheat://distill/285M")
import detectron2.config
import timm
assert "mobile_former_285m" in timm.list_models()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "",
        "import timm",
        "from qbheat_det.checkpoint import load_run_config; load_run_config('distill/285M')",
    ],
)
def test_the_package_is_registered_before_its_names_are_looked_up(first, tmp_path):
    run(_REGISTERED.format(first=first), tmp_path)


def test_tools_that_are_imported_first_do_not_hide_what_is_missing(tmp_path):
    program = f"{_WITHOUT}\nimport qbheat_det\nqbheat_det.get_cfg"
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "qbheat setup" in process.stderr
