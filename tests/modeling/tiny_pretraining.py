# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Small models and inputs of pre-training, for tests."""

import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import nn
from torch.nn import functional as F

from qbheat_det.config import load_config
from qbheat_det.modeling.backbone import MobileFormerArch
from qbheat_det.modeling.pretrain import ReconstructionLoss

# Over stages of unequal length.
SMALL_ARCH = MobileFormerArch(
    num_tokens=3,
    token_dim=16,
    stem=8,
    rows=[
        ("lite", 16, 8),
        ("down", 16, 12, 24),
        ("down", 24, 10, 20),
        ("plain", 30, 10),
        ("plain", 20, 14),
        ("down", 28, 18, 36),
        ("plain", 36, 18),
    ],
    expanded=40,
)
MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)


class PatchesAsMap(Backbone):
    """A backbone without weights: the pixels of each patch are the channels of its position."""

    def __init__(self, *, stride=16, name="map"):
        super().__init__()
        self.stride = stride
        self.name = name

    def forward(self, x):
        return {self.name: F.pixel_unshuffle(x, self.stride)}

    def output_shape(self):
        return {self.name: ShapeSpec(channels=3 * self.stride**2, stride=self.stride)}


class Copies(nn.Module):
    """A decoder that takes features for pixels."""

    def __init__(self, *, grid_size, patch_size):
        super().__init__()
        self.grid_size, self.patch_size = grid_size, patch_size
        self.image_size = grid_size * patch_size

    def forward(self, z):
        return z.flatten(1, 2)


def make_copying_model(kind, predictor, grid_size, *, stride=16, **others):
    """What is visible passes through unchanged, and predicted features are taken for pixels."""
    model = kind(
        backbone=PatchesAsMap(stride=stride),
        predictor=predictor,
        decoder=Copies(grid_size=grid_size, patch_size=16),
        loss=ReconstructionLoss(normalize_patches=False),
        in_feature="map",
        pixel_mean=MEAN,
        pixel_std=STD,
        **others,
    )
    nn.init.dirac_(model.projection.weight)
    return model.eval()


def make_config(meta_arch="QBHeat", **qb_heat):
    """Returns that of a Mobile-Former at 64 pixels, with keys of ``MODEL.QB_HEAT``."""
    words = f"""
MODEL.META_ARCHITECTURE {meta_arch} MODEL.DEVICE cpu MODEL.BACKBONE.NAME MobileFormer
MODEL.BACKBONE.FREEZE_AT 0 MODEL.MOBILE_FORMER.OUT_FEATURES ["s16_expanded"]
INPUT.PRETRAIN.SIZE 64 MODEL.QB_HEAT.FEATURE_DIM 32 MODEL.QB_HEAT.DECODER_DIM 32
MODEL.QB_HEAT.DECODER_DEPTH 2 MODEL.QB_HEAT.DECODER_HEADS 4"""
    cfg = load_config(None, words.split())
    cfg.MODEL.QB_HEAT.update(qb_heat)
    return cfg


def make_tiny_config(meta_arch="QBHeat", **qb_heat):
    """Returns one whose Mobile-Former has four blocks of a few channels."""
    cfg = make_config(meta_arch, **qb_heat)
    own = {"VARIANT": "custom", "TOKEN_DIM": 16, "STEM_CHANNELS": 8, "EXPANDED_CHANNELS": 64}
    blocks = [["lite", 16, 8, 0], ["down", 16, 12, 24], ["down", 24, 16, 32], ["down", 32, 24, 48]]
    cfg.MODEL.MOBILE_FORMER.update(own | {"BLOCKS": blocks})
    return cfg


def make_inputs(count, size=64):
    shape = (3, size, size)
    return [{"image": torch.randint(256, shape, dtype=torch.uint8)} for _ in range(count)]
