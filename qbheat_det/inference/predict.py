# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens trained weights, and runs detectors, classifiers and backbones in PyTorch."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultPredictor
from detectron2.structures import ImageList, Instances
from torch import Tensor, nn

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    SafeCheckpointer,
    choose_device,
    holds_backbone_alone,
    info_of,
    load_run_config,
    local_weights,
)
from qbheat_det.config import get_cfg, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.deployment import deploy_by_config
from qbheat_det.fast import optimize
from qbheat_det.model_zoo.sources import open_trained
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.backbone.timm_backbone import list_outputs
from qbheat_det.modeling.contracts import get_backbone, normalise_pixels
from qbheat_det.tasks import CLASSIFICATION, DETECTION, PRETRAINING, find_task

from .exported import EXPORTED_SUFFIXES, Scores
from .images import Image, UnreadableImage, run_by_shape
from .predictor import DetectorSettings

_TIMM = "timm://"  # addresses of timm's weights begin with this prefix


class BatchPredictor(DefaultPredictor):
    """Detectron2's predictor, which can also process several images at once."""

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """Predicts on RGB images (H, W, 3) of any sizes. Returns instances on the CPU.

        Only images with the same size after resizing form a batch, so no padding is needed. The
        results are the same as for single images, up to rounding.
        """
        inputs: list[dict[str, Any]] = []
        for image in images:
            resized = self.aug.get_transform(image).apply_image(image)
            if self.input_format == "BGR":
                resized = resized[:, :, ::-1]
            pixels = torch.from_numpy(resized.astype("float32").transpose(2, 0, 1))
            height, width = image.shape[:2]
            inputs.append({"image": pixels, "height": height, "width": width})
        with torch.no_grad():
            outputs = run_by_shape(inputs, self.model, lambda entry: entry["image"].shape)
        return [output["instances"].to("cpu") for output in outputs]


def build_predictor(cfg: CfgNode) -> BatchPredictor:
    """Builds a predictor and loads ``MODEL.WEIGHTS``, which must fit the model exactly.

    Raises a ``UserError`` if the weights cannot be read or do not match the model.
    """
    info = info_of(cfg.MODEL.WEIGHTS)
    has_classes = info is None or bool(info.class_names)  # without ``info``, the file may have them
    if not has_classes and holds_backbone_alone(cfg.MODEL.WEIGHTS):
        raise UserError(
            f"'{cfg.MODEL.WEIGHTS}' is an encoder, which predicts neither boxes nor classes: train "
            "a detector or a classifier on it, or write it with qbheat export --backbone"
        )
    unloaded = with_values(cfg, {"MODEL.WEIGHTS": "", "MODEL.DEPLOY.ENABLED": False})
    predictor = BatchPredictor(unloaded)
    checkpointer = ExactCheckpointer(predictor.model, class_names=cfg.MODEL.CLASS_NAMES)
    checkpointer.load(cfg.MODEL.WEIGHTS)
    return predictor


def build_detector(cfg: CfgNode) -> BatchPredictor:
    """Builds a detector or classifier in the fastest form for its device.

    If ``MODEL.DEPLOY.ENABLED``, this is the deployed form. Raises a ``UserError`` if the weights
    are of a pre-training model, or do not fit the config.
    """
    if find_task(cfg) is PRETRAINING:
        raise UserError(
            f"'{cfg.MODEL.WEIGHTS}' are weights of pre-training ({cfg.MODEL.META_ARCHITECTURE}), "
            "which predict neither boxes nor classes: train a detector or a classifier on them"
        )
    predictor = build_predictor(cfg)
    if cfg.MODEL.DEPLOY.ENABLED:
        predictor.model = deploy_by_config(predictor.model, cfg.MODEL.DEPLOY)
    elif cfg.MODEL.DEVICE == "cpu":
        optimize(predictor.model, "cpu_inference")
    return predictor


class TrainedWeights:
    """Trained weights with their config. Has the interface of ``ExportedModel`` for prediction."""

    def __init__(self, cfg: CfgNode) -> None:
        """``cfg`` is the config of the weights, including ``MODEL.WEIGHTS``."""
        self.cfg = cfg
        self.settings = DetectorSettings.from_config(cfg)
        self.is_classifier = find_task(cfg) is CLASSIFICATION

    def build_predictor(self) -> BatchPredictor:
        """Loads the detector, or raises a ``UserError``."""
        predictor = build_detector(self.cfg)
        if self.cfg.MODEL.DEPLOY.ENABLED:
            print(predictor.model.report, file=sys.stderr)
        return predictor

    def build_scorer(self) -> Callable[[str | Path], Scores]:
        """Loads the classifier. Returns a function from an image's path to class scores (K,)."""
        return build_scorer(build_detector(self.cfg).model, self.cfg)


def build_scorer(model: nn.Module, cfg: CfgNode) -> Callable[[str | Path], Scores]:
    """Returns a function that maps an image path to class scores (K,).

    ``model`` is a classifier, and the evaluation mapper of ``cfg`` reads the image.
    """
    mapper = build_mapper(cfg, is_train=False)

    @torch.no_grad()
    def score(path: str | Path) -> Scores:
        entry = mapper({"file_name": str(path), "image_id": 0})
        if entry is None:
            raise UnreadableImage(path, "not an image")
        if not isinstance(entry, dict):  # a ``DataError``
            raise UnreadableImage(path, entry.reason)
        return model([entry])[0]["scores"].float().cpu().numpy()

    return score


def open_encoder(name: str, device: str | None = None) -> tuple[nn.Module, CfgNode]:
    """Opens the backbone of a pre-trained model, a classifier, an encoder file or a timm model.

    Args:
        name: a file or an address, as ``find_weights`` returns it.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.

    Raises:
        UserError: ``name`` is a detector or an exported file, or the weights do not fit their
            config.
    """
    if is_timm(name):
        return _open_timm(name, device)
    refused = UserError(f"'{name}' is a detector or an exported file, not an encoder")
    if name.lower().endswith(EXPORTED_SUFFIXES):
        raise refused
    cfg = load_run_config(name, device=device)
    if not is_encoder(name, cfg):
        raise refused
    model = open_trained(name, device=device).model
    return get_backbone(model) or model, cfg  # a bare backbone has no backbone in it


def is_encoder(name: str, cfg: CfgNode) -> bool:
    """Returns whether weights are of a backbone, a pre-training model or a classifier.

    ``cfg`` is their config.
    """
    return holds_backbone_alone(name) or find_task(cfg) is not DETECTION


def is_timm(name: str) -> bool:
    """Returns whether weights are of a timm model. Such weights have no config."""
    return name.startswith(_TIMM)


def _open_timm(address: str, device: str | None) -> tuple[nn.Module, CfgNode]:
    """Returns a timm model that outputs all feature maps, and its config with pixel statistics."""
    model_name = address.removeprefix(_TIMM).partition(".")[0]
    info = info_of(local_weights(address))
    cfg: CfgNode = get_cfg()
    cfg.MODEL.DEVICE = choose_device(device)
    cfg.MODEL.WEIGHTS = address
    cfg.MODEL.BACKBONE.NAME = f"timm:{model_name}"
    cfg.MODEL.TIMM.OUT_FEATURES = list_outputs(model_name)
    if info is not None:
        cfg.INPUT.FORMAT = info.pixel_format
        cfg.MODEL.PIXEL_MEAN = list(info.pixel_mean)
        cfg.MODEL.PIXEL_STD = list(info.pixel_std)
    model = build_bare_backbone(cfg).to(cfg.MODEL.DEVICE)
    SafeCheckpointer(model).load(address)  # leaves out the classifier
    return model.eval(), cfg


@torch.inference_mode()
def encode(model: Any, cfg: CfgNode, images: Sequence[Image]) -> dict[str, Tensor]:
    """Normalizes RGB images (H, W, 3), uint8, pads them to one size, and runs a backbone on them.

    Returns the backbone's outputs by name: feature maps (N, C, H', W') and tokens (N, M, D).
    """
    tensors = []
    for image in images:
        pixels = torch.from_numpy(image).to(cfg.MODEL.DEVICE).permute(2, 0, 1)  # (3, H, W)
        if cfg.INPUT.FORMAT == "BGR":
            pixels = pixels.flip(0)
        tensors.append(normalise_pixels(pixels, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD))
    batch = ImageList.from_tensors(tensors, model.size_divisibility).tensor
    return model(batch)
