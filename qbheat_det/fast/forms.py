# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The table of fast forms, and the function that puts them into a model."""

from collections.abc import Mapping
from typing import Any, Literal

from detectron2.layers import Conv2d
from torch import nn

from qbheat_det.layers import (
    DotProductAttention,
    DownMobile,
    DynamicReLU,
    LiteBottleneck,
    MapAttention,
    Mobile,
)
from qbheat_det.modeling.backbone.timm_backbone import TraceableConv2dSame
from qbheat_det.modeling.detr.decoder_block import LiteMobile

from .attention import ProductAttention
from .depthwise import DepthwiseConv2d, DepthwiseConv2dSame, NormedDepthwiseConv2d
from .dynamic_relu import TwoSlopeReLU
from .form import FastForm
from .linear import ConvolvedLinear, ConvolvedMapAttention
from .mobile_former import FusedDownMobile, FusedLiteBottleneck, FusedLiteMobile, FusedMobile

Form = Literal["training", "cpu_training", "cpu_inference"]
"""What a model is used for: training on any device, training on CPUs, or prediction on CPUs."""

FORMS: Mapping[Form, Mapping[type[nn.Module], type[FastForm]]] = {
    "training": {
        DynamicReLU: TwoSlopeReLU,
    },
    "cpu_training": {
        DynamicReLU: TwoSlopeReLU,
        DotProductAttention: ProductAttention,
        MapAttention: ConvolvedMapAttention,
        nn.Linear: ConvolvedLinear,
        nn.Conv2d: DepthwiseConv2d,
        Conv2d: NormedDepthwiseConv2d,
        TraceableConv2dSame: DepthwiseConv2dSame,
    },
    "cpu_inference": {
        DynamicReLU: TwoSlopeReLU,
        Mobile: FusedMobile,
        DownMobile: FusedDownMobile,
        LiteBottleneck: FusedLiteBottleneck,
        LiteMobile: FusedLiteMobile,
        MapAttention: ConvolvedMapAttention,
        nn.Linear: ConvolvedLinear,
    },
}
"""The fast form of each layer, by the use of the model. Only these exact types are replaced."""


def optimize(model: nn.Module, form: Form) -> None:
    """Replaces, in place, the layers inside a model that have a faster form on this machine.

    The replacements have the same names, parameters and results up to rounding.
    """
    replacements = FORMS[form]
    fast_layers: dict[nn.Module, Any] = {}  # a layer may be used in several places
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        replacement = replacements.get(type(layer))
        if not name or replacement is None or not replacement.is_faster_for(layer):
            continue
        if layer not in fast_layers:
            fast_layers[layer] = replacement.of(layer)
        model.set_submodule(name, fast_layers[layer])


def count_fast_layers(model: nn.Module) -> int:
    """Returns the number of layers inside a model that are fast forms."""
    return sum(isinstance(layer, FastForm) for layer in model.modules())
