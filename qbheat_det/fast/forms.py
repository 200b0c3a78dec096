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
from .frozen_norms import fold_frozen_norms
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
"""The fast form of each type of layer, by the use of the model. Subclasses are not replaced."""


def optimize(model: nn.Module, form: Form) -> None:
    """Replaces, in place, the layers inside a model that have a faster form on this machine.

    Names and parameters do not change. Results are equal up to rounding.
    """
    if form != "training":  # a pair of layers each, and before their single forms
        fold_frozen_norms(model)
    fast_forms = FORMS[form]
    fast_layers: dict[nn.Module, Any] = {}  # a layer that is used twice gets one fast form
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not name:  # the model itself
            continue
        fast_form = fast_forms.get(type(layer))
        if fast_form is None or not fast_form.is_faster_for(layer):
            continue
        if layer not in fast_layers:
            fast_layers[layer] = fast_form.of(layer)
        model.set_submodule(name, fast_layers[layer])


def count_fast_layers(model: nn.Module) -> int:
    """Returns the number of layers inside a model that are fast forms."""
    return sum(isinstance(layer, FastForm) for layer in model.modules())
