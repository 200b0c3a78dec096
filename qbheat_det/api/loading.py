# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``load``: from a name, a file, a folder or an address to a detector or an encoder."""

from pathlib import Path

import torch
from detectron2.config import CfgNode
from torch import nn

from qbheat_det.checkpoint import (
    SafeCheckpointer,
    find_weights,
    holds_backbone_alone,
    info_of,
    load_run_config,
    local_weights,
)
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_IMAGES
from qbheat_det.engine.predict import build_predictor
from qbheat_det.export import EXPORTED_SUFFIXES, ExportedModel, ExportedPredictor
from qbheat_det.model_zoo.api import open_trained
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.backbone.timm_backbone import list_outputs
from qbheat_det.modeling.contracts import get_backbone

from .detector import Detector, Encoder, Trained
from .hub import HUB_PREFIX, download

_TIMM = "timm://"


def load(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector | Encoder:
    """Opens trained weights.

    Args:
        weights: a name in the model zoo, with or without "qbheat://"; a file of weights
            (.safetensors, .pth) with its config inside or beside it; the folder of a run, of which
            the best weights are taken, or else the final ones; an exported file (.onnx, .pt2);
            "timm://NAME", an encoder of timm; or "hf://USER/NAME" of Hugging Face.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        fast: whether a detector predicts in its deployed form, see ``Detector.deploy``.

    Returns:
        A detector, or of a backbone, a pre-training or a classifier the encoder.

    Raises:
        UserError: there is no such file, entry or device, or the file does not fit its config.
    """
    _check_device(device)
    is_hub = str(weights).startswith(HUB_PREFIX)
    name = download(str(weights)) if is_hub else find_weights(weights)
    if name.lower().endswith(EXPORTED_SUFFIXES):
        if fast:
            raise UserError(f"'{name}' is exported: fast is for weights")
        return _build_exported(name, device)
    if name.startswith(_TIMM):
        return _open_timm(name, device)
    opts = ["MODEL.DEPLOY.ENABLED", "True"] if fast else []
    cfg = load_run_config(name, device=device, opts=opts)
    if holds_backbone_alone(name) or cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        return _build_encoder(open_trained(name, device=device).model, cfg)
    return _build_detector(cfg)


Trained._load = staticmethod(load)  # for ``from_pretrained``


def _open_timm(address: str, device: str | None) -> Encoder:
    """Returns a network of timm with all of its maps, pixels normalised as in its training."""
    model_name = address.removeprefix(_TIMM).partition(".")[0]
    info = info_of(local_weights(address))
    cfg: CfgNode = get_cfg()
    cfg.MODEL.DEVICE = device or ("cuda" if torch.cuda.is_available() else "cpu")
    cfg.MODEL.WEIGHTS = address
    cfg.MODEL.BACKBONE.NAME = f"timm:{model_name}"
    cfg.MODEL.TIMM.OUT_FEATURES = list_outputs(model_name)
    if info is not None:
        cfg.INPUT.FORMAT = info.pixel_format
        cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD = list(info.pixel_mean), list(info.pixel_std)
    model = build_bare_backbone(cfg).to(cfg.MODEL.DEVICE)
    SafeCheckpointer(model).load(address)  # leaves out the classifier
    return _build_encoder(model.eval(), cfg)


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


def _build_encoder(model: nn.Module, cfg: CfgNode) -> Encoder:
    """Returns the encoder of a model, or of a backbone."""
    return Encoder(get_backbone(model) or model, cfg)
