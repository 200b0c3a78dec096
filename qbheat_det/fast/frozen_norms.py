# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Convolutions of a timm backbone that compute the frozen BatchNorm and activation behind them.

A frozen BatchNorm multiplies each channel by a constant and adds another. The scale is multiplied
into the weight of the convolution in each step, and the offset is its bias. This saves reading and
writing the feature map once in each direction. Where no gradient is needed, as in evaluation and in
frozen stages, oneDNN also computes the activation in the convolution, which saves another pass.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from timm.layers import pad_same
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.modeling.backbone.timm_backbone import (
    FrozenNorm,
    LeanReLU6,
    TimmBackbone,
    TraceableConv2dSame,
)

from .depthwise import Pair, Settings, convolve_depthwise, is_slow_depthwise, pads_with_zeros
from .form import FastForm

_ACTIVATIONS: Mapping[type[nn.Module], tuple[str, Sequence[float]]] = {
    nn.Identity: ("none", ()),
    nn.ReLU: ("relu", ()),
    nn.ReLU6: ("hardtanh", (0.0, 6.0)),
    LeanReLU6: ("hardtanh", (0.0, 6.0)),
    nn.SiLU: ("swish", ()),
    nn.Hardswish: ("hardswish", ()),
}
"""The activations that oneDNN computes in a convolution, with their name and scalars there."""


class FoldedNorm(FastForm, FrozenNorm):
    """A frozen BatchNorm that is computed, with its activation, in the convolution before it."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (N, C, H, W)."""
        return x


class NormedConv2d(FastForm, nn.Conv2d):
    """A convolution, with zeros or timm's "same" padding, and the frozen BatchNorm behind it.

    The BatchNorm stays in its place in the model, which has its buffers.
    """

    _norm: tuple[FrozenNorm]  # in a tuple, so that it is not registered as a child
    _pads_like_timm: bool

    @classmethod
    def before(cls, norm: FrozenNorm, conv: nn.Conv2d) -> "NormedConv2d":
        """Returns the fast form of ``conv``, which is followed by ``norm``."""
        layer = cast(NormedConv2d, cls.of(conv))
        layer._norm = (norm,)
        layer._pads_like_timm = isinstance(conv, TraceableConv2dSame)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        (norm,) = self._norm
        # PyTorch's fuse_conv_bn_weights returns new parameters, which would get the gradients.
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        offset = norm.bias - norm.running_mean * scale
        weight = self.weight * scale[:, None, None, None]
        bias = offset
        if self.bias is not None:
            bias = offset + self.bias * scale
        padding = cast(Pair, self.padding)
        if self._pads_like_timm:
            x = pad_same(x, self.kernel_size, self.stride, self.dilation)
            padding = (0, 0)
        settings = Settings.of(self, padding)
        if _fuses_activation(norm, x, weight, bias):
            return _convolve_and_activate(x, weight, bias, settings, norm.act)
        if is_slow_depthwise(self):
            x = convolve_depthwise(x, weight, bias, settings)
        else:
            x = F.conv2d(x, weight, bias, *settings)
        return cast(Tensor, norm.act(norm.drop(x)))


def _fuses_activation(norm: FrozenNorm, x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Returns whether oneDNN computes the activation behind ``norm`` in the convolution."""
    if type(norm.act) not in _ACTIVATIONS or not isinstance(norm.drop, nn.Identity):
        return False
    needs_gradient = x.requires_grad or weight.requires_grad or bias.requires_grad
    if torch.is_grad_enabled() and needs_gradient:
        return False
    if x.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    dtype = _choose_dtype(x)
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _choose_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which ``conv2d`` computes ``x``, which is autocast's if it is on."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return x.dtype


def _convolve_and_activate(
    x: Tensor, weight: Tensor, bias: Tensor, settings: Settings, activation: nn.Module
) -> Tensor:
    """``conv2d`` and then ``activation``, without gradients.

    ReLU and ReLU6 map NaN to 0, unlike PyTorch's.
    """
    dtype = _choose_dtype(x)
    name, scalars = _ACTIVATIONS[type(activation)]
    # PyTorch's compiler calls this operator, which is not part of the public API.
    return cast(
        Tensor,
        torch.ops.mkldnn._convolution_pointwise(
            x.to(dtype),
            weight.to(dtype),
            bias.to(dtype),
            settings.padding,
            settings.stride,
            settings.dilation,
            settings.groups,
            name,
            scalars,
            "",  # the algorithm, for activations of which there are several
        ),
    )


def fold_frozen_norms(model: nn.Module) -> None:
    """Replaces, in place, the frozen BatchNorms of timm backbones and the convolutions before them.

    Names, parameters and buffers do not change. Results are equal up to rounding.
    """
    for backbone in list(model.modules()):
        if not isinstance(backbone, TimmBackbone):
            continue
        net = backbone.net
        for norm_name, conv_name in backbone.norm_inputs.items():
            norm = net.get_submodule(norm_name)
            conv = net.get_submodule(conv_name)
            if type(norm) is not FrozenNorm or type(conv) not in (nn.Conv2d, TraceableConv2dSame):
                continue
            conv = cast(nn.Conv2d, conv)
            if not pads_with_zeros(conv):
                continue
            folded = cast(FrozenNorm, FoldedNorm.of(norm))
            net.set_submodule(norm_name, folded)
            net.set_submodule(conv_name, NormedConv2d.before(folded, conv))
