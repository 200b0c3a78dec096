# Copyright (c) qbheat_det contributors. Apache-2.0.
"""CPU seconds from the start of Python to the first boxes, against bare Detectron2.

Ours imports the package, loads ``retinanet/285M_bccd`` and predicts one image. Detectron2 does the
same with its ``DefaultPredictor`` and a RetinaNet on ResNet-18 of as many classes, as it has no
Mobile-Former. Both resize the image to the same size. Files are in the cache of the system.
"""

import os
import subprocess
import sys
import tempfile

import numpy as np
from PIL import Image

from benchmarks.timing import ROOT, Result, Sample, seconds_in_rounds

_OURS = """
import sys, time
import qbheat_det
detector = qbheat_det.load("retinanet/285M_bccd", device="cpu")
print(detector.cfg.INPUT.MIN_SIZE_TEST, detector.cfg.INPUT.MAX_SIZE_TEST, len(detector.class_names))
detector.predict(sys.argv[1])
print(time.process_time())
"""
_DETECTRON2 = """
import sys, time
import torch
from detectron2 import model_zoo
from detectron2.data.detection_utils import read_image
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model
cfg = model_zoo.get_config("COCO-Detection/retinanet_R_50_FPN_1x.yaml")
cfg.MODEL.DEVICE, cfg.MODEL.WEIGHTS = "cpu", sys.argv[2]
cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST, cfg.MODEL.RETINANET.NUM_CLASSES = (
    map(int, sys.argv[3:6])
)
if len(sys.argv) > 6:
    torch.save({"model": build_model(cfg).state_dict()}, sys.argv[2])
DefaultPredictor(cfg)(read_image(sys.argv[1], "BGR"))
print(time.process_time())
"""


def run(*, quick: bool, threads: int = 2, rounds: int = 5) -> list[Result]:
    """Starts both programs in turns."""
    if quick:
        rounds = 1
    with tempfile.TemporaryDirectory() as folder:
        image = f"{folder}/image.png"
        weights = f"{folder}/weights.pth"
        pixels = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(image)
        sizes = run_program(_OURS, image)[:-1]
        run_program(_DETECTRON2, image, weights, *sizes, "save")
        calls = {
            "ours": lambda: float(run_program(_OURS, image)[-1]),
            "detectron2": lambda: float(run_program(_DETECTRON2, image, weights, *sizes)[-1]),
        }
        taken = seconds_in_rounds(calls, rounds=rounds, warm_up=0, clock=None)
    name = "start/first_prediction_vs_detectron2"
    seconds = [Sample.of(taken[key]).median for key in ("ours", "detectron2")]
    return [Result.lower_is_better(name, *seconds, "s")]


def run_program(program: str, *arguments: str) -> list[str]:
    """Runs a program in a process, and returns the words that it prints."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    return process.stdout.split()
