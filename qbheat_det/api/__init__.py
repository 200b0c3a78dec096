# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The Python interface to trained models, see docs/python.md."""

from pathlib import Path

import torch

from qbheat_det.checkpoint import find_weights, load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.inference.exported import EXPORTED_SUFFIXES, ExportedModel, ExportedPredictor
from qbheat_det.inference.files import predict_files
from qbheat_det.inference.predict import (
    build_detector,
    is_encoder,
    is_timm,
    open_encoder,
)
from qbheat_det.inference.results import Detections, save_annotations

from .detector import Detector
from .encoder import Encoder

__all__ = [
    "Detections", "Detector", "Encoder", "load", "predict_files", "save_annotations",
]  # fmt: skip


def load(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector | Encoder:
    """Opens trained weights.

    Args:
        weights: one of

            - a name in the model zoo, with or without the prefix "qbheat://",
            - a weights file (.safetensors, .pth) with its config inside or in the same folder,
            - the folder of a run. Its best weights are used, or the final ones if there are none,
            - an exported file (.onnx),
            - "timm://NAME" for a timm encoder, or "hf://USER/NAME" for Hugging Face.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
        fast: whether to deploy a detector, see ``Detector.deploy``.

    Returns:
        A ``Detector`` for a detector. An ``Encoder`` for a backbone, and for the encoder of a
        pre-training model or a classifier.

    Raises:
        UserError: the file, name or device does not exist, or the file does not fit its config.
    """
    _check_device(device)
    name = find_weights(str(weights))
    if name.lower().endswith(EXPORTED_SUFFIXES):
        if fast:
            raise UserError(f"'{name}' is exported: leave out fast, which is for weights")
        exported = ExportedModel.open(name, device=device)
        if exported.info.task == "features":
            return Encoder(exported, exported.load_config())
        return Detector(ExportedPredictor(exported), exported.load_config())
    if is_timm(name):
        return Encoder(*open_encoder(name, device))
    opts = ["MODEL.DEPLOY.ENABLED", "True"] if fast else []
    cfg = load_run_config(name, device=device, opts=opts)
    if is_encoder(name, cfg):
        return Encoder(*open_encoder(name, device))
    return Detector(build_detector(cfg), cfg)


def _check_device(device: str | None) -> None:
    try:
        kind = torch.device(device or "cpu").type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise UserError(f"device is '{device}', expected cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is '{device}', but PyTorch sees no GPU: use device='cpu'")
