# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens trained models in Python, see docs/python.md."""

from pathlib import Path

import torch

from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.inference.batch import Job, run_batch
from qbheat_det.inference.encoder import is_encoder, is_timm, locate_weights, open_encoder
from qbheat_det.inference.exported import EXPORTED_SUFFIXES, ExportedModel, ExportedPredictor
from qbheat_det.inference.files import predict_files
from qbheat_det.inference.predict import build_detector
from qbheat_det.inference.results import Detections, save_annotations

from .detector import Detector
from .encoder import Encoder

__all__ = [
    "Detections", "Detector", "Encoder", "Job", "load", "predict_files", "run_batch",
    "save_annotations",
]  # fmt: skip


def load(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector | Encoder:
    """Opens trained weights.

    Args:
        weights: a name in the model zoo, with or without "qbheat://"; a file of weights
            (.safetensors, .pth) with its config inside or beside it; the folder of a run, whose
            best weights are taken, or else the final ones; an exported file (.onnx);
            "timm://NAME", an encoder of timm; or "hf://USER/NAME" of Hugging Face.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        fast: whether a detector predicts in its deployed form, see ``Detector.deploy``.

    Returns:
        A detector; for a backbone, a pre-training or a classifier the encoder.

    Raises:
        UserError: there is no such file, entry or device, or the file does not fit its config.
    """
    _check_device(device)
    name = locate_weights(str(weights))
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
