# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The Python interface to trained models, see docs/python.md."""

from pathlib import Path

from qbheat_det.checkpoint import find_weights
from qbheat_det.inference.exported import ExportedPredictor
from qbheat_det.inference.files import open_weights, predict_files
from qbheat_det.inference.predict import build_detector, is_encoder, is_timm, open_encoder
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
    name = find_weights(str(weights))
    if is_timm(name):
        return Encoder(*open_encoder(name, device))
    exported, cfg = open_weights(name, device=device, fast=fast)
    if exported:
        if exported.info.task == "features":
            return Encoder(exported, cfg)
        return Detector(ExportedPredictor(exported), cfg)
    if is_encoder(name, cfg):
        return Encoder(*open_encoder(name, device))
    return Detector(build_detector(cfg), cfg)
