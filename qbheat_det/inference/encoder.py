# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens trained backbones, and runs them on images."""

from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.structures import ImageList
from torch import Tensor, nn

from qbheat_det.checkpoint import (
    SafeCheckpointer,
    holds_backbone_alone,
    info_of,
    load_run_config,
    local_weights,
)
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_IMAGES
from qbheat_det.model_zoo.sources import open_trained
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.backbone.timm_backbone import list_outputs
from qbheat_det.modeling.contracts import get_backbone, normalise_pixels

from .exported import EXPORTED_SUFFIXES
from .images import Image

_TIMM = "timm://"


def open_encoder(name: str, device: str | None = None) -> tuple[nn.Module, CfgNode]:
    """Opens the backbone of a pre-trained model, a classifier, an encoder file or a timm model.

    Args:
        name: a result of ``find_weights``.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.

    Raises:
        UserError: ``name`` is a detector or an exported file, or the weights do not fit their
            config.
    """
    if is_timm(name):
        return _open_timm(name, device)
    if not name.lower().endswith(EXPORTED_SUFFIXES):
        cfg = load_run_config(name, device=device)
        if is_encoder(name, cfg):
            model = open_trained(name, device=device).model
            return get_backbone(model) or model, cfg
    raise UserError(f"'{name}' is a detector or an exported file, not an encoder")


def is_encoder(name: str, cfg: CfgNode) -> bool:
    """Returns whether weights are of a backbone, a pre-training model or a classifier."""
    return holds_backbone_alone(name) or cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES


def is_timm(name: str) -> bool:
    """Returns whether weights are of a timm model. Such weights have no config."""
    return name.startswith(_TIMM)


def _open_timm(address: str, device: str | None) -> tuple[nn.Module, CfgNode]:
    """Returns a timm model that outputs all feature maps, and its config with pixel statistics."""
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
    return model.eval(), cfg


@torch.inference_mode()
def encode(model: Any, cfg: CfgNode, images: Sequence[Image]) -> dict[str, Tensor]:
    """Pads RGB images (H, W, 3), uint8, at the bottom and right, and runs a backbone on them.

    Returns:
        The backbone's outputs by name: feature maps (N, C, H', W') and tokens (N, M, D).
    """
    node, is_bgr = cfg.MODEL, cfg.INPUT.FORMAT == "BGR"
    tensors = []
    for image in images:
        pixels = torch.from_numpy(image).to(node.DEVICE).permute(2, 0, 1)
        pixels = pixels.flip(0) if is_bgr else pixels
        tensors.append(normalise_pixels(pixels, node.PIXEL_MEAN, node.PIXEL_STD))
    batch = ImageList.from_tensors(tensors, model.size_divisibility).tensor
    return model(batch)
