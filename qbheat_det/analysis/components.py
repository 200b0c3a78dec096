# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Counts of the QB-Heat paper's components, each from an instantiated model."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.modeling.backbone import (
    MOBILE_FORMER_ARCHS,
    MobileFormer,
    build_mobile_former_fpn_backbone,
)
from qbheat_det.modeling.classification import LinearDecoder, TransformerDecoder
from qbheat_det.modeling.detr import MFDecoder

from .complexity import CountingRule, count_madds, count_parameters

DETECTION_SIZE = (800, 1333)
CLASSIFICATION_SIZE = (224, 224)
# Widths of the "tran" classifiers (Table 11).
DECODER_DIMS = {"3.7G": 768, "1.0G": 384, "285M": 192}


@dataclass(frozen=True)
class Counts:
    """What a component costs.

    Attributes:
        params: all parameters.
        params_no_bn: parameters without BatchNorm's scale and offset.
        core: multiply-adds under ``CountingRule.CORE``.
        ext: multiply-adds under ``CountingRule.EXT``.
    """

    params: int
    params_no_bn: int
    core: int
    ext: int


@cache
def backbone_counts(variant: str) -> Counts:
    """Counts the detection backbone at 800x1333: up to the last 1x1 convolution."""
    return _count(_backbone(variant), torch.zeros(1, 3, *DETECTION_SIZE))


@cache
def classifier_counts(variant: str, depth: int) -> Counts:
    """Counts encoder and 1000-class decoder at 224x224.

    Args:
        variant: name in ``MOBILE_FORMER_ARCHS``.
        depth: transformer blocks of the decoder; 0 is the linear one.
    """
    backbone = _backbone(variant)
    shape = backbone.output_shape()
    decoder = (
        TransformerDecoder(
            input_shape=shape, num_classes=1000, dim=DECODER_DIMS[variant], depth=depth
        )
        if depth
        else LinearDecoder(input_shape=shape, num_classes=1000)
    )
    model = nn.Sequential(OrderedDict(encoder=backbone, decoder=decoder))
    return _count(model, torch.zeros(1, 3, *CLASSIFICATION_SIZE))


@cache
def mf_decoder_counts(variant: str, num_blocks: tuple[int, int, int]) -> Counts:
    """Counts MF-DETR's decoder on a backbone's maps of an 800x1333 image.

    It has 100 queries and 91 classes; in inference the heads read the last block's queries alone.
    """
    shape = _backbone(variant).output_shape()
    shapes = [shape["s8"], shape["s16_expanded"]]
    decoder = MFDecoder(input_shape=shapes, num_classes=91, num_blocks=num_blocks)
    features = [
        torch.zeros(1, _channels(spec), *_map_size(DETECTION_SIZE, spec.stride or 1))
        for spec in shapes
    ]
    return _count(decoder, features)


@cache
def retinanet_counts(variant: str) -> Counts:
    """Counts pyramid and head of RetinaNet, without the backbone, and without P6's multiply-adds.

    80 classes, 9 anchors. The convolutions of Detectron2's pyramid and head are counted in closed
    form at the exact sizes of an 800x1333 image, which Detectron2 would pad; biases and the
    nearest-neighbour resizing are free. The parameters include P6 (256 to 256 channels).
    """
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.MOBILE_FORMER.VARIANT = variant
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
    pyramid = build_mobile_former_fpn_backbone(cfg, ShapeSpec(channels=3))
    head = RetinaNetHead(
        input_shape=[ShapeSpec(channels=256)] * 5,
        num_classes=80,
        num_anchors=9,
        conv_dims=[256] * 4,
    )
    positions = pyramid_positions(DETECTION_SIZE)
    p3, p4, p5, _, p7 = positions
    to_p5, _, to_p7 = pyramid.top_block.convs
    madds = (
        convolution_madds([pyramid.fpn_lateral3, pyramid.fpn_output3], p3)
        + convolution_madds([pyramid.fpn_lateral4, pyramid.fpn_output4], p4)
        + convolution_madds([to_p5], p5)
        + convolution_madds([to_p7], p7)
        + convolution_madds([head], sum(positions))
    )
    params = (
        count_parameters(pyramid) - count_parameters(pyramid.bottom_up) + count_parameters(head)
    )
    return Counts(params=params, params_no_bn=params, core=madds, ext=madds)


def convolution_madds_of_p6(variant: str, feature: str | None) -> tuple[int, int]:
    """Returns multiply-adds and input channels of a 3x3 P6 with 256 outputs at 800x1333.

    Args:
        variant: name in ``MOBILE_FORMER_ARCHS``.
        feature: backbone output whose width P6 reads, or None for no P6.
    """
    if feature is None:
        return 0, 0
    arch = MOBILE_FORMER_ARCHS[variant]
    backbone = MobileFormer(arch=arch, out_features=(feature,))
    channels = _channels(backbone.output_shape()[feature])
    return 9 * channels * 256 * pyramid_positions(DETECTION_SIZE)[3], channels


def pyramid_positions(size: tuple[int, int]) -> list[int]:
    """Returns the positions of P3 … P7 for an image of ``size`` (H, W)."""
    maps = [_map_size(size, 2**level) for level in range(3, 8)]
    return [height * width for height, width in maps]


def convolution_madds(modules: Iterable[nn.Module], positions: int) -> int:
    """Returns the multiply-adds of all convolutions within ``modules`` at that many outputs."""
    return positions * sum(
        layer.weight.numel()
        for module in modules
        for layer in module.modules()
        if isinstance(layer, nn.Conv2d)
    )


def _backbone(variant: str) -> MobileFormer:
    outputs = ("s8", "s16_expanded", "tokens")
    backbone: MobileFormer = MobileFormer(arch=MOBILE_FORMER_ARCHS[variant], out_features=outputs)
    return backbone


def _count(model: nn.Module, inputs: object) -> Counts:
    madds = count_madds(model, inputs)
    return Counts(
        params=count_parameters(model),
        params_no_bn=count_parameters(model, batch_norm_affine=False),
        core=madds.total(CountingRule.CORE),
        ext=madds.total(CountingRule.EXT),
    )


def _map_size(size: Sequence[int], stride: int) -> tuple[int, int]:
    height, width = size
    return ceil(height / stride), ceil(width / stride)


def _channels(spec: ShapeSpec) -> int:
    assert spec.channels is not None
    return int(spec.channels)
