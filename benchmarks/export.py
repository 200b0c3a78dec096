# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compares exported files of MF-285M + MF-Dec-211 for one image size with the PyTorch model.

The files are timed from uint8 images to boxes, in onnxruntime and in OpenVINO, in float32 and in
8-bit integers. The integers are calibrated on noise, which does not affect their speed. OpenVINO is
timed in float32 and in its default, which is bfloat16 if the processor supports it. Each contender
has a process, and they take turns, as in ``latency.py``.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.detectors import HEIGHT, WIDTH, mf_detr_config
from benchmarks.forms import EAGER, Forwards
from benchmarks.timing import Result, samples_in_rounds

_NAME = "285m_211"
_ROUNDS = 9
# Runtime and file of each contender. "openvino" uses the default precision of the runtime.
FILES = {
    "onnxruntime": ("onnxruntime", "float"),
    "onnxruntime_int8": ("onnxruntime", "int8"),
    "openvino": ("openvino-f32", "float"),
    "openvino_int8": ("openvino-f32", "int8"),
    "openvino_default": ("openvino", "float"),
    "openvino_default_int8": ("openvino", "int8"),
}
# Contenders in each row of the results: ours and the peer.
_PAIRS = {
    "onnxruntime_vs_eager": ("onnxruntime", "eager"),
    "openvino_vs_eager": ("openvino", "eager"),
    "openvino_default_vs_eager": ("openvino_default", "eager"),
    "int8_vs_float": ("openvino_int8", "openvino"),
    "int8_default_vs_float": ("openvino_default_int8", "openvino"),
    "int8_default_vs_float_default": ("openvino_default_int8", "openvino_default"),
    "int8_vs_float_onnxruntime": ("onnxruntime_int8", "onnxruntime"),
}


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Writes the files, and times them in turns with the PyTorch model."""
    height = HEIGHT
    width = WIDTH
    rounds = _ROUNDS
    if quick:
        height //= 4
        width //= 4
        rounds = 2
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("float", "int8"):
            write(Path(folder) / f"{precision}.onnx", height, width)
        forms = {EAGER: EAGER}
        for name, (runtime, file) in FILES.items():
            forms[f"{runtime}:{folder}/{file}.onnx"] = name
        contenders = [(_NAME, form) for form in forms]
        with Forwards(contenders, height, width, threads=threads, quick=quick) as calls:
            named = {forms[form]: call for (_, form), call in calls.items()}
            samples = samples_in_rounds(named, rounds=rounds, clock=None)
    for name, sample in samples.items():
        print(f"  {name:<20} {sample}")
    return [
        Result.lower_is_better(
            f"export/{_NAME}_{row}", samples[ours].median, samples[peer].median, "s"
        )
        for row, (ours, peer) in _PAIRS.items()
        if ours in samples and peer in samples
    ]


def write(path: Path, height: int, width: int) -> None:
    """Exports the detector with random weights; quantizes it if the file is ``int8.onnx``."""
    from detectron2.modeling import build_model

    import qbheat_det  # noqa: F401  (registers the model)
    from qbheat_det.export.files import quantize_onnx, write_model

    cfg = mf_detr_config("285M", (2, 1, 1))
    cfg.INPUT.MIN_SIZE_TEST = 0  # images are not resized, as in the PyTorch contender
    torch.manual_seed(0)
    write_model(build_model(cfg).eval(), cfg, path, image_size=(height, width))
    if path.stem == "int8":
        shape = height, width, 3
        quantize_onnx(path, [np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)])
