# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``load`` opens a detector or an encoder from a name, a file, a folder or a URL."""

from pathlib import Path

import torch
from detectron2.config import CfgNode

from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.inference.encoder import is_encoder, is_timm, locate_weights, open_encoder
from qbheat_det.inference.exported import EXPORTED_SUFFIXES, ExportedModel, ExportedPredictor
from qbheat_det.inference.predict import build_predictor

from .detector import Detector
from .encoder import Encoder


def load(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector | Encoder:
    """Opens trained weights.

    Args:
        weights: a name in the model zoo, with or without "qbheat://"; a file of weights
            (.safetensors, .pth) with its config inside or beside it; the folder of a run, of which
            the best weights are taken, or else the final ones; an exported file (.onnx);
            "timm://NAME", an encoder of timm; or "hf://USER/NAME" of Hugging Face.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        fast: whether a detector predicts in its deployed form, see ``Detector.deploy``.

    Returns:
        A detector, or of a backbone, a pre-training or a classifier the encoder.

    Raises:
        UserError: there is no such file, entry or device, or the file does not fit its config.
    """
    _check_device(device)
    name = locate_weights(str(weights))
    if name.lower().endswith(EXPORTED_SUFFIXES):
        if fast:
            raise UserError(f"'{name}' is exported: fast is for weights")
        return _build_exported(name, device)
    if is_timm(name):
        return Encoder(*open_encoder(name, device))
    opts = ["MODEL.DEPLOY.ENABLED", "True"] if fast else []
    cfg = load_run_config(name, device=device, opts=opts)
    if is_encoder(name, cfg):
        return Encoder(*open_encoder(name, device))
    return _build_detector(cfg)


def _check_device(device: str | None) -> None:
    try:
        kind = torch.device(device or "cpu").type
    except RuntimeError as error:
        raise UserError(f"device is '{device}', expected cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise UserError(f"device is '{device}', expected cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is '{device}', but PyTorch sees no GPU: use device='cpu'")


def _build_detector(cfg: CfgNode) -> Detector:
    """Returns the detector of a config, in its deployed form if ``MODEL.DEPLOY.ENABLED``."""
    detector = Detector(build_predictor(cfg), cfg)
    if not cfg.MODEL.DEPLOY.ENABLED:
        return detector
    node = cfg.MODEL.DEPLOY
    return detector.deploy(
        precision=node.PRECISION, compile=node.COMPILE, image_sizes=node.IMAGE_SIZES
    )


def _build_exported(path: str, device: str | None) -> Detector | Encoder:
    """Opens an exported detector or encoder; a ``UserError`` if it is a classifier."""
    exported = ExportedModel.open(path, device=device)
    cfg = exported.load_config()
    cfg.MODEL.WEIGHTS = path
    if exported.info.task == "features":
        return Encoder(exported, cfg)
    return Detector(ExportedPredictor(exported), cfg)
