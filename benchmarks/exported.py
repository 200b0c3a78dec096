# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Latency of ONNX files in onnxruntime on a CPU, batch 1, beside the same models in PyTorch.

Both take an image of 480x640 as bytes, resize it to COCO's test size, and give boxes: PyTorch as
Detectron2's ``DefaultPredictor`` does, with Pillow's resize; the file with all of it inside.
Weights are random.
"""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.modeling import build_model

import qbheat_det  # noqa: F401  (registers the models)
from benchmarks.detectors import mf_detr_config
from benchmarks.timing import Result, set_threads, time_interleaved
from qbheat_det.config import get_config_path, load_config
from qbheat_det.export.api import write_model

HEIGHT, WIDTH = 480, 640  # what most images of COCO have
Image = np.ndarray[Any, Any]
Call = Callable[[Image], object]


def _retinanet_config() -> CfgNode:
    path = get_config_path("coco/retinanet_285M_finetune.yaml")
    return load_config(path, ["MODEL.WEIGHTS", "", "MODEL.DEVICE", "cpu"])


CONFIGS: Mapping[str, Callable[[], CfgNode]] = {
    "285m_211": partial(mf_detr_config, "285M", [2, 1, 1]),
    "3.7g_522": partial(mf_detr_config, "3.7G", [5, 2, 2]),
    "285m_retinanet": _retinanet_config,
}


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Times every model in both runtimes, in turns in this process.

    Args:
        quick: a small image, two rounds and the first model alone, to see that everything runs:
            writing a file takes far longer than timing it.
        threads: CPU threads, of each runtime.
    """
    set_threads(threads)
    image = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    names = list(CONFIGS)[: 1 if quick else None]
    calls: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            cfg = CONFIGS[name]()
            if quick:
                cfg.INPUT.MIN_SIZE_TEST = 120
            for runtime, call in load(cfg, Path(folder) / f"{name}.onnx", threads).items():
                calls[f"{name}_{runtime}"] = partial(call, image)
        print(f"seconds an image of {HEIGHT}x{WIDTH}, batch 1: median (least to greatest)")
        samples = time_interleaved(calls, rounds=2 if quick else 7)
    for name, sample in samples.items():
        print(f"  {name:<28} {sample}")
    return [
        Result.lower_is_better(
            f"exported/{name}_onnxruntime_vs_pytorch",
            samples[f"{name}_onnxruntime"].median,
            samples[f"{name}_pytorch"].median,
            "s",
        )
        for name in names
    ]


def load(cfg: CfgNode, path: Path, threads: int) -> dict[str, Call]:
    """Builds a model and exports it.

    Args:
        cfg: of the model.
        path: of the ONNX file that is written.
        threads: of onnxruntime.

    Returns:
        By the runtime's name, from an image (H, W, 3), uint8, to its boxes.
    """
    import onnxruntime

    model = build_model(cfg).eval()
    write_model(model, cfg, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    resize = ResizeShortestEdge([cfg.INPUT.MIN_SIZE_TEST] * 2, cfg.INPUT.MAX_SIZE_TEST)

    def in_pytorch(image: Image) -> object:
        pixels = resize.get_transform(image).apply_image(image)
        planes = torch.as_tensor(pixels.astype("float32").transpose(2, 0, 1))
        with torch.inference_mode():
            return model([{"image": planes, "height": image.shape[0], "width": image.shape[1]}])

    return {
        "pytorch": in_pytorch,
        "onnxruntime": lambda image: session.run(None, {"images": image[None]}),
    }
