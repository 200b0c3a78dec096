# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny models on one frozen Mobile-Former, or on two convolutions where the exporter is slow."""

import numpy as np
import torch
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, build_model
from PIL import Image
from torch import nn

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.config import get_config_path, load_config
from tests.engine.gradient_cases import BLOCKS

_SHARED = """
MODEL.MOBILE_FORMER.STEM_CHANNELS 8 MODEL.MOBILE_FORMER.EXPANDED_CHANNELS 32
MODEL.MOBILE_FORMER.NUM_TOKENS 2 MODEL.MOBILE_FORMER.TOKEN_DIM 16
MODEL.BACKBONE.FREEZE_AT 5 MODEL.DEVICE cpu INPUT.MIN_SIZE_TEST 64 INPUT.MAX_SIZE_TEST 112 """
_RETINANET = """
MODEL.FPN.OUT_CHANNELS 16 MODEL.RETINANET.NUM_CONVS 1 MODEL.RETINANET.NUM_CLASSES 3
MODEL.RETINANET.PRIOR_PROB 0.5 TEST.DETECTIONS_PER_IMAGE 20
MODEL.CLASS_NAMES ["square","disc","cross"] MODEL.CATEGORY_IDS [4,9,11] """
_MF_DETR = """
MODEL.META_ARCHITECTURE MFDETR MODEL.BACKBONE.NAME MobileFormer MODEL.MF_DETR.NUM_BLOCKS [1,1,1]
MODEL.MF_DETR.HIDDEN_DIM 16 MODEL.MF_DETR.NHEADS 2 MODEL.MF_DETR.DIM_FEEDFORWARD 32
MODEL.MF_DETR.NUM_OBJECT_QUERIES 8 MODEL.MF_DETR.NUM_CLASSES 2
MODEL.CLASS_NAMES ["cat","dog"] MODEL.CATEGORY_IDS [17,18] """
# Few operators, because the exporter takes time for each.
_TWO_MAPS = f"{_RETINANET} MODEL.BACKBONE.NAME build_fpn_backbone MODEL.FPN.BOTTOM_UP TwoMaps "
_TWO_CLASSES = """
MODEL.RETINANET.NUM_CLASSES 2 MODEL.CLASS_NAMES ["cat","dog"] MODEL.CATEGORY_IDS [17,18] """
_FCOS = """
MODEL.META_ARCHITECTURE SyncFCOS MODEL.FCOS.NUM_CLASSES 3 MODEL.FCOS.NUM_CONVS 1
MODEL.FCOS.IN_FEATURES ["p3","p4"] MODEL.FCOS.NORM '' MODEL.FCOS.PRIOR_PROB 0.5 """
_CLASSIFIER = """
MODEL.META_ARCHITECTURE ImageClassifier MODEL.BACKBONE.NAME TwoMaps
MODEL.CLASSIFIER.IN_FEATURE s16 MODEL.CLASSIFIER.NUM_CLASSES 3
MODEL.CLASS_NAMES ["red","green","blue"] INPUT.DATASET_MAPPER_NAME classify
INPUT.PRETRAIN.SIZE 32 """
KINDS = {
    "classifier": _CLASSIFIER,
    "retinanet": _RETINANET,
    "mf_detr": _MF_DETR,
    "selected_queries": f"{_MF_DETR} MODEL.MF_DETR.CLASSIFICATION focal "
    "MODEL.MF_DETR.QUERY_SELECTION.ENABLED True",
    "two_maps": _TWO_MAPS,
    "two_classes": _TWO_MAPS + _TWO_CLASSES,
    "fcos": _TWO_MAPS + _FCOS,
    "qb_heat": "MODEL.MOBILE_FORMER.VARIANT custom INPUT.MIN_SIZE_TEST 48",
}


@BACKBONE_REGISTRY.register()
class TwoMaps(Backbone):
    """Two convolutions, the least that an FPN needs."""

    def __init__(self, cfg, input_shape):
        super().__init__()
        self.fine = nn.Conv2d(3, 8, 9, stride=8, padding=4)
        self.coarse = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self._out_features = ["s8", "s16"]
        self._out_feature_channels = {"s8": 8, "s16": 8}
        self._out_feature_strides = {"s8": 8, "s16": 16}

    def forward(self, x):
        fine = self.fine(x).relu()
        return {"s8": fine, "s16": self.coarse(fine)}


def make_config(kind, **changes):
    """Returns the config of a tiny model; ``changes`` name keys with ``__`` for dots."""
    words = [*_SHARED.split(), "MODEL.MOBILE_FORMER.BLOCKS", str(BLOCKS), *KINDS[kind].split()]
    for key, value in changes.items():
        words += [key.replace("__", "."), str(value)]
    base = "qb_heat" if kind == "qb_heat" else "retinanet"
    return load_config(get_config_path(f"quick_schedules/{base}_small_cells.yaml"), words)


def build(cfg, *, head_seed=0, backbone_seed=0):
    """Builds a model whose backbone depends only on its own seed, statistics included."""
    torch.manual_seed(head_seed)
    model = build_model(cfg).eval()
    backbone = getattr(model.backbone, "bottom_up", model.backbone)
    for name, tensor in sorted(backbone.state_dict().items()):
        generator = torch.Generator().manual_seed(backbone_seed + len(name))
        if name.endswith("bias"):
            tensor.zero_()
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("running_mean"):
            tensor.normal_(0, 0.1, generator=generator)
        elif tensor.ndim > 1:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
    return model


def save(folder, kind, **seeds):
    """Writes the weights that training writes; returns their path."""
    return save_model(folder, make_config(kind), **seeds)


def save_model(folder, cfg, **seeds):
    """As ``save``, of a config."""
    path = folder / "model_final.safetensors"
    folder.mkdir(parents=True)
    info = WeightsInfo.from_config(cfg, iteration=1, commit="")
    save_weights(str(path), build(cfg, **seeds).state_dict(), info)
    return str(path)


def save_photos(folder):
    """Writes images of noise, of three sizes; returns the folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index, (width, height) in enumerate([(90, 75), (61, 100), (130, 40)]):
        noise = rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height)).save(folder / f"{index}.png")
    return str(folder)
